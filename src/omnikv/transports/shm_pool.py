"""The memory of one shm sender: segments of memfd, touched once and reused for the sender's whole life.

A fresh mapping costs three to five times a warm one, so a segment is paid for when it is made and never given back
while it is useful. Segments grow the pool up to its limit; a segment in which nothing lives is retired only when a
payload needs its share of that limit. `shm_map` seals and maps them. What the system allows is asked of `memory_left`,
at the start and before each growth, because later it would kill the process instead of refusing.

Who still holds a view of room that was given back reads stale bytes at worst. A pool that poisons overwrites that room
with ones, which are NaN in every float format, so that a stale read shows.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnikv.core.extents import Extents
from omnikv.errors import ConfigError, PutRejected, TransportError
from omnikv.transports.memory_left import memory_bounds, tightest_bound
from omnikv.transports.pairing import require_size
from omnikv.transports.shm_map import make_segment

PAGE_NBYTES = mmap.PAGESIZE
DEFAULT_POOL_NBYTES = 2 << 30
DEFAULT_SEGMENT_NBYTES = 64 << 20
# The most segments that a target maps of one source. A pool of small ones grows by at least a part of itself, so that
# it stays far below: each segment costs a descriptor here and a mapping on both sides.
MAX_SEGMENTS = 1024
GROWTH_PART = 32
# How often the pool grows for one request, which needs it once unless others are faster at what it grew by.
MAX_GROWTHS = 8
# What a poisoned byte holds.
POISON = 0xFF
_POISON_PIECE = bytes([POISON]) * (1 << 20)


# Makes so many bytes of memory: its descriptor or -1, and its one writable view.
SegmentMaker = Callable[[int], tuple[int, memoryview]]


class PoolSegment:
    """One stretch of memory: its descriptor (-1 where it is not shared), its mapping, and which parts of it are taken.

    Raises:
        OSError: the system has not that much memory.
    """

    def __init__(self, number: int, nbytes: int, make: SegmentMaker) -> None:
        self.number = number
        self.nbytes = nbytes
        self.extents = Extents(nbytes, align_nbytes=PAGE_NBYTES)
        self.fd, self.view = make(nbytes)
        self._unpin = _pin(self.view)

    def close(self) -> None:
        """Nothing; gives the descriptor back. The memory goes with its last view."""
        if self.view:
            self._unpin()
            self.view = memoryview(b"")
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Part of a segment, given to one payload."""

    segment: PoolSegment
    offset: int
    nbytes: int

    def is_like(self, other: Room | None) -> bool:
        """Whether it is the same part of the same segment."""
        mine = (self.segment, self.offset, self.nbytes)
        return other is not None and mine == (other.segment, other.offset, other.nbytes)

    @property
    def view(self) -> memoryview:
        """The payload's bytes, writable."""
        return self.segment.view[self.offset : self.offset + self.nbytes]


class Pool:
    """Room for payloads, up to `pool_nbytes` (None: 2 GiB, or half of what the system allows where that is less).

    `prefault_nbytes` of it are paid for here rather than by the first payloads. With `poison`, room is overwritten when
    it is given back.

    Raises:
        ConfigError: a size is not positive, or more than is left of the memory that the system allows.
    """

    def __init__(
        self,
        pool_nbytes: int | None,
        segment_nbytes: int,
        *,
        prefault_nbytes: int = 0,
        poison: bool = False,
        make: SegmentMaker = make_segment,
        transport: str = "shm",
        setting: str = "pool_nbytes",
    ) -> None:
        self._make_segment = make
        self._transport = transport
        self._setting = setting
        if pool_nbytes is None:
            allowed = min(bound.limit_nbytes for bound in memory_bounds())
            pool_nbytes = min(DEFAULT_POOL_NBYTES, allowed // 2)
        else:
            require_size(transport, setting, pool_nbytes, at_least=1)
            bound = tightest_bound()
            if pool_nbytes > bound.left_nbytes:
                raise ConfigError(
                    f"{transport}: {setting}={pool_nbytes} is more than this process may take: {bound}; lower "
                    f"{setting} or raise that limit"
                )
        require_size(transport, "segment_nbytes", segment_nbytes, at_least=1)
        require_size(transport, "prefault_nbytes", prefault_nbytes, at_least=0)
        self._limit_nbytes = _round_up(pool_nbytes)
        self._segment_nbytes = min(_round_up(segment_nbytes), self._limit_nbytes)
        self._poison = poison
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._segments: list[PoolSegment] = []
        self._next_number = 0
        self._retired: list[int] = []
        self._closed = False
        if prefault_nbytes:
            self._prefault(prefault_nbytes)

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
        """Room for one payload of `nbytes`; see `take_all`."""
        (room,) = self.take_all([nbytes])
        return room

    def take_all(self, sizes: Sequence[int]) -> list[Room]:
        """Room on whole pages for payloads of these sizes, for all of them or for none.

        The pool grows or retires idle segments where it must. Until there is room for all, none of it is taken: a part
        that was held meanwhile could keep out another request that fits, and nobody would tell that one to try again.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
            TransportError: the pool is closed.
        """
        self._require_possible(sizes)
        with self._lock:
            rooms, _ = self._fit(sizes)
        if rooms is not None:
            return rooms
        with self._growing:
            for _ in range(MAX_GROWTHS):
                with self._lock:
                    rooms, missing_nbytes = self._fit(sizes)
                    if rooms is not None:
                        return rooms
                    least, most = self._plan_growth(sizes, missing_nbytes)
                    number = self._next_number
                    self._next_number += 1
                segment = self._make(number, least, most)
                with self._lock:
                    if self._closed:
                        segment.close()
                    self._require_open()
                    self._segments.append(segment)
        raise self._no_room(sum(sizes), "others take what the pool grows by")

    def give(self, room: Room) -> None:
        """Nothing; the room is free again. After `close` this does nothing."""
        if self._poison:
            _overwrite(room.view)
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

    def _prefault(self, nbytes: int) -> None:
        try:
            self.give(self.take(nbytes))
        except PutRejected as error:
            raise ConfigError(f"{self._transport}: prefault_nbytes={nbytes} cannot be had: {error}") from error

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self._transport}: the pool is closed", transport=self._transport)

    def _require_possible(self, sizes: Sequence[int]) -> None:
        if sum(map(_round_up, sizes)) > self._limit_nbytes:
            what = "a payload" if len(sizes) == 1 else f"{len(sizes)} payloads together"
            raise PutRejected(
                f"{self._transport}: {what} of {sum(sizes)} bytes can never fit the pool of {self._limit_nbytes} "
                f"bytes; raise {self._setting}",
                transport=self._transport,
            )

    def _fit(self, sizes: Sequence[int], *, beside_idle: bool = False) -> tuple[list[Room] | None, int]:
        """Room for all, taken; or None, nothing taken, and how many bytes more it needs in one stretch.

        `beside_idle` looks at the segments in use alone, and takes nothing.
        """
        self._require_open()
        segments = [segment for segment in self._segments if not (beside_idle and segment.extents.is_empty)]
        rooms, missing_nbytes = [], 0
        for nbytes in sizes:
            room = next((room for segment in segments if (room := _fit_in(segment, nbytes))), None)
            if room is None:
                missing_nbytes += _round_up(nbytes)
            else:
                rooms.append(room)
        if not missing_nbytes and not beside_idle:
            return rooms, 0
        for room in rooms:
            room.segment.extents.give(room.offset)
        return None, missing_nbytes

    def _plan_growth(self, sizes: Sequence[int], missing_nbytes: int) -> tuple[int, int]:
        """At least and at most how large the next segment is; idle ones are retired where it needs their share."""
        spare = self._limit_nbytes - sum(segment.nbytes for segment in self._segments)
        if missing_nbytes > spare:
            spare, missing_nbytes = self._make_way(sizes, spare)
        if len(self._segments) >= MAX_SEGMENTS:
            raise self._no_room(missing_nbytes, f"the pool is in {MAX_SEGMENTS} pieces already")
        wanted = max(self._segment_nbytes, _round_up((self._limit_nbytes - spare) // GROWTH_PART))
        return missing_nbytes, max(missing_nbytes, min(wanted, spare))

    def _make_way(self, sizes: Sequence[int], spare: int) -> tuple[int, int]:
        """What the pool may grow by once idle segments were retired, and what it must grow by then."""
        _, needed = self._fit(sizes, beside_idle=True)
        idle = [segment for segment in self._segments if segment.extents.is_empty]
        if needed > spare + sum(segment.nbytes for segment in idle):
            used = sum(segment.nbytes - segment.extents.free_nbytes for segment in self._segments)
            why = f"{used} of {self._setting}={self._limit_nbytes} are in use or too scattered"
            raise self._no_room(sum(sizes), why)
        for segment in idle:
            if spare < needed:
                spare += segment.nbytes
                self._segments.remove(segment)
                segment.close()
                self._retired.append(segment.number)
        return spare, needed

    def _make(self, number: int, least_nbytes: int, most_nbytes: int) -> PoolSegment:
        bound = tightest_bound()
        if least_nbytes > bound.left_nbytes:
            raise self._no_room(least_nbytes, f"the pool must grow by that, and {bound}")
        nbytes = min(most_nbytes, max(least_nbytes, bound.left_nbytes // PAGE_NBYTES * PAGE_NBYTES))
        try:
            return PoolSegment(number, nbytes, self._make_segment)
        except OSError as error:
            raise self._no_room(nbytes, f"the system gives no more memory ({error})") from error

    def _no_room(self, nbytes: int, why: str) -> PutRejected:
        return PutRejected(
            f"{self._transport}: no room for {nbytes} bytes: {why}; wait for acknowledgements or change "
            f"{self._setting}",
            retryable=True,
            transport=self._transport,
        )


def _fit_in(segment: PoolSegment, nbytes: int) -> Room | None:
    offset = segment.extents.take(nbytes)
    return None if offset is None else Room(segment, offset, nbytes)


def _round_up(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES


def _pin(view: memoryview) -> Callable[[], None]:
    """What undoes the pinning of `view`, which is pinned where a GPU is in use."""
    # A process that has not loaded torch uses no GPU, and need not load it for this.
    if "torch" in sys.modules:
        from omnikv.tensors.lanes import pin, unpin

        if pin(view):
            return functools.partial(unpin, view)
    return lambda: None


def _overwrite(view: memoryview) -> None:
    for start in range(0, len(view), len(_POISON_PIECE)):
        piece = view[start : start + len(_POISON_PIECE)]
        piece[:] = _POISON_PIECE[: len(piece)]
