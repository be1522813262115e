"""The memory of one shm sender: segments of memfd, touched once and reused for the sender's whole life.

A fresh mapping costs three to five times a warm one, so a segment is paid for when it is made and never given back
while it is useful. Segments grow the pool up to its limit; a segment in which nothing lives is retired only when a
payload needs its share of that limit. A segment is sealed against shrinking, so that no reader can be made to touch
memory that is gone. Mappings end with their last view, never before: who still holds a view reads stale bytes at worst.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from omnikv.core.extents import Extents
from omnikv.errors import ConfigError, PutRejected, TransportError
from omnikv.transports.pairing import require_size

PAGE_NBYTES = mmap.PAGESIZE
DEFAULT_POOL_NBYTES = 2 << 30
DEFAULT_SEGMENT_NBYTES = 64 << 20
# Segments are touched in pieces, so that other threads of the process get their turn in between.
TOUCH_NBYTES = 8 << 20
# The most segments that a target maps of one source. A pool of small ones grows by at least a part of itself, so that
# it stays far below: each segment costs a descriptor here and a mapping on both sides.
MAX_SEGMENTS = 1024
GROWTH_PART = 32
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_limit_nbytes() -> int:
    """What this process may use at most: the machine's memory, or its control group's limit where that is lower."""
    limit = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


class PoolSegment:
    """One stretch of shared memory: its descriptor, its mapping, and which parts of it are taken.

    Raises:
        OSError: the system has not that much memory.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.extents = Extents(nbytes, align_nbytes=PAGE_NBYTES)
        self.fd = os.memfd_create("omnikv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, self.fd)
            os.ftruncate(self.fd, nbytes)
            os.posix_fallocate(self.fd, 0, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.view = memoryview(mmap.mmap(self.fd, nbytes))
            on_failure.pop_all()
        self._touch()

    def close(self) -> None:
        """Nothing; gives the descriptor back. The memory goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")

    def _touch(self) -> None:
        for start in range(0, self.nbytes, TOUCH_NBYTES):
            piece = self.view[start : start + TOUCH_NBYTES : PAGE_NBYTES]
            piece[:] = bytes(len(piece))


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Part of a segment, given to one payload."""

    segment: PoolSegment
    offset: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        """The payload's bytes, writable."""
        return self.segment.view[self.offset : self.offset + self.nbytes]


class Pool:
    """Room for payloads, up to `pool_nbytes` (None: 2 GiB, or half of what the machine allows where that is less).

    Raises:
        ConfigError: a size is not positive, or more than this machine's memory allows.
    """

    def __init__(self, pool_nbytes: int | None, segment_nbytes: int) -> None:
        allowed = memory_limit_nbytes()
        if pool_nbytes is None:
            pool_nbytes = min(DEFAULT_POOL_NBYTES, allowed // 2)
        require_size("shm", "pool_nbytes", pool_nbytes, at_least=1)
        require_size("shm", "segment_nbytes", segment_nbytes, at_least=1)
        if pool_nbytes > allowed:
            raise ConfigError(
                f"shm: pool_nbytes={pool_nbytes} is more than the {allowed} bytes of memory that this process may use; "
                "lower pool_nbytes or raise the memory limit"
            )
        self._limit_nbytes = _round_up(pool_nbytes)
        self._segment_nbytes = min(_round_up(segment_nbytes), self._limit_nbytes)
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._segments: list[PoolSegment] = []
        self._next_number = 0
        self._retired: list[int] = []
        self._closed = False

    @property
    def limit_nbytes(self) -> int:
        """The most that the pool holds, whole pages."""
        return self._limit_nbytes

    @property
    def mapped_nbytes(self) -> int:
        """What all segments have together."""
        with self._lock:
            return sum(segment.nbytes for segment in self._segments)

    @property
    def used_nbytes(self) -> int:
        """What payloads take of it, rounded up to pages."""
        with self._lock:
            return sum(segment.nbytes - segment.extents.free_nbytes for segment in self._segments)

    def take(self, nbytes: int) -> Room:
        """Room for `nbytes` on whole pages; the pool grows or retires idle segments where it must.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
            TransportError: the pool is closed.
        """
        with self._lock:
            room = self._fit(nbytes)
        if room is not None:
            return room
        with self._growing:
            with self._lock:
                room = self._fit(nbytes)
                if room is not None:
                    return room
                most = self._plan_growth(nbytes)
                number = self._next_number
                self._next_number += 1
            segment = self._make(number, _round_up(nbytes), most)
            with self._lock:
                if self._closed:
                    segment.close()
                self._require_open()
                self._segments.append(segment)
                room = self._fit_in(segment, nbytes)
                assert room is not None
                return room

    def give(self, room: Room) -> None:
        """Nothing; the room is free again. After `close` this does nothing."""
        with self._lock:
            if not self._closed:
                room.segment.extents.give(room.offset)

    def pop_retired(self) -> list[int]:
        """The numbers of the segments that were retired since the last call; readers may unmap them."""
        with self._lock:
            retired, self._retired = self._retired, []
            return retired

    def close(self) -> None:
        """Nothing; descriptors are given back, memory goes with the last view of it. Idempotent."""
        with self._lock:
            self._closed = True
            for segment in self._segments:
                segment.close()
            self._segments.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("shm: the sender's pool is closed", transport="shm")

    def _fit(self, nbytes: int) -> Room | None:
        self._require_open()
        for segment in self._segments:
            room = self._fit_in(segment, nbytes)
            if room is not None:
                return room
        return None

    def _fit_in(self, segment: PoolSegment, nbytes: int) -> Room | None:
        offset = segment.extents.take(nbytes)
        return None if offset is None else Room(segment, offset, nbytes)

    def _plan_growth(self, nbytes: int) -> int:
        needed = _round_up(nbytes)
        if needed > self._limit_nbytes:
            raise PutRejected(
                f"shm: a payload of {nbytes} bytes can never fit the pool of {self._limit_nbytes} bytes; raise "
                "pool_nbytes",
                transport="shm",
            )
        spare = self._limit_nbytes - sum(segment.nbytes for segment in self._segments)
        idle = [segment for segment in self._segments if segment.extents.is_empty]
        if spare < needed <= spare + sum(segment.nbytes for segment in idle):
            for segment in idle:
                if spare < needed:
                    spare += segment.nbytes
                    self._segments.remove(segment)
                    segment.close()
                    self._retired.append(segment.number)
        if spare < needed:
            used = sum(segment.nbytes - segment.extents.free_nbytes for segment in self._segments)
            raise _no_room(nbytes, f"{used} of pool_nbytes={self._limit_nbytes} are in use or too scattered")
        if len(self._segments) >= MAX_SEGMENTS:
            raise _no_room(nbytes, f"the pool is in {MAX_SEGMENTS} pieces already")
        wanted = max(self._segment_nbytes, _round_up((self._limit_nbytes - spare) // GROWTH_PART))
        return max(needed, min(wanted, spare))

    def _make(self, number: int, least_nbytes: int, most_nbytes: int) -> PoolSegment:
        available = _available_nbytes()
        if least_nbytes > available:
            raise _no_room(least_nbytes, f"the pool must grow by that, and the system has {available} bytes left")
        nbytes = most_nbytes if most_nbytes <= available else least_nbytes
        try:
            return PoolSegment(number, nbytes)
        except OSError as error:
            raise _no_room(nbytes, f"the system gives no more memory ({error})") from error


def _no_room(nbytes: int, why: str) -> PutRejected:
    return PutRejected(
        f"shm: no room for {nbytes} bytes: {why}; wait for acknowledgements or change pool_nbytes",
        retryable=True,
        transport="shm",
    )


def _round_up(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES


def _available_nbytes() -> int:
    """What the machine has left now, as the kernel estimates it; its limit where that is not told."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return memory_limit_nbytes()
