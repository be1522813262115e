"""The thread that moves payloads over a tcp transport's lanes, so that no payload is in the way of what is said.

It owns the lanes: what other threads want of them they leave with `submit`. A lane does a bounded piece of work each
time its connection is ready, so that none holds up another, and one that does not move although it should is given up.
Lanes come and go under the transport's lock, because a fork waits for that and must know all descriptors.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from omnikv.errors import RemoteProtocolError
from omnikv.transports.proved_stream import Stream

log = logging.getLogger("omnikv.tcp")


class Lane(ABC):
    """One connection for payloads. Its methods are called by the lane thread only, without the transport's lock."""

    def __init__(self, stream: Stream, peer: str) -> None:
        self.stream = stream
        self.peer = peer
        # When it last moved, or began to wait; monotonic seconds.
        self.moved_at = time.monotonic()
        self.events = 0

    @property
    @abstractmethod
    def wants_write(self) -> bool:
        """Whether it has something that the connection should take."""

    @property
    @abstractmethod
    def is_owed(self) -> bool:
        """Whether the peer should be moving: it is to take something, or to send something."""

    @abstractmethod
    def read(self) -> bool:
        """Whether there may be more to read at once; takes a bounded part of what came.

        Raises:
            RemoteProtocolError: the peer says something that it may not.
            OSError: the connection broke or ended.
        """

    @abstractmethod
    def write(self) -> None:
        """Nothing; gives the connection a bounded part of what it should take.

        Raises:
            OSError: the connection broke.
        """

    @abstractmethod
    def gone(self) -> None:
        """Nothing; the lane has ended. Called with the transport's lock."""


class LaneThread:
    """Runs the lanes of one transport. `lock` is the transport's; `fault` is told of what the thread dies of.

    Raises:
        OSError: the system has no descriptor left.
    """

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        *,
        stall_s: float,
        count: Callable[[str, str], None],
        fault: Callable[[BaseException], None],
    ) -> None:
        self._lock = lock
        self._stall_s = stall_s
        self._count = count
        self._fault = fault
        self._lanes: set[Lane] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        # Lanes with bytes that no selector knows of.
        self._unread: set[Lane] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Nothing; starts the thread. Call once."""
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Nothing; the thread will call `job`, without the lock, before it sleeps again.

        For any thread that has the lock, and for the lane thread.
        """
        self._jobs.append(job)
        if not self._is_closing:
            os.eventfd_write(self._wake_fd, 1)

    def add(self, lane: Lane) -> None:
        """Nothing; the thread owns `lane` from now on. Call with the lock."""
        if self._is_closing:
            lane.stream.close()
            return
        self._lanes.add(lane)
        self.submit(lambda: self._begin(lane))

    def end(self, lane: Lane) -> None:
        """Nothing; the lane is closed and told so. Idempotent; for the lane thread, without the lock."""
        with self._lock:
            self._end(lane)

    def close(self) -> None:
        """Nothing; ends every lane and the thread. Idempotent; call without the lock."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def let_go(self) -> None:
        """Nothing; in a forked child, closes its copies of the descriptors. Call with the lock."""
        self._is_closing = True
        for lane in self._lanes:
            lane.stream.close()
        self._release()

    def push(self, lane: Lane) -> None:
        """Nothing; `lane` writes what it can at once, unless it waits for its connection. For the lane thread."""
        if not lane.events & selectors.EVENT_WRITE:
            self._serve(lane, selectors.EVENT_WRITE)

    def refresh(self, lane: Lane) -> None:
        """Nothing; looks again at what `lane` waits for. For the lane thread."""
        if lane not in self._lanes or not lane.events:
            # It ended, or begins later.
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if lane.wants_write else 0)
        if events != lane.events:
            lane.events = events
            self._selector.modify(lane.stream.connection, events, lane)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception as error:  # edge: top of a thread of the transport, whose users must be told
            log.exception("tcp: the thread of the lanes ends")
            self._fault(error)
        with self._lock:
            self._is_closing = True
            for lane in list(self._lanes):
                self._end(lane)
            self._release()

    def _release(self) -> None:
        if self._wake_fd >= 0:
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._patience_s()):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
            else:
                self._serve(key.data, mask)
        for lane in list(self._unread):
            self._serve(lane, selectors.EVENT_READ)
        while self._jobs:
            self._jobs.popleft()()
        self._end_stalled()

    def _patience_s(self) -> float | None:
        if self._unread or self._jobs:
            return 0.0
        owed = [lane.moved_at for lane in self._lanes if lane.is_owed]
        return max(0.0, min(owed) + self._stall_s - time.monotonic()) if owed else None

    def _begin(self, lane: Lane) -> None:
        if lane in self._lanes:
            lane.events = selectors.EVENT_READ
            self._selector.register(lane.stream.connection, selectors.EVENT_READ, lane)
            # Encryption may have read on while the greeting ended.
            self._serve(lane, selectors.EVENT_READ)

    def _serve(self, lane: Lane, mask: int) -> None:
        self._unread.discard(lane)
        if lane not in self._lanes:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                lane.write()
            if mask & selectors.EVENT_READ and lane.read() and lane.stream.has_unread:
                self._unread.add(lane)
        except RemoteProtocolError as error:
            self._count_with_lock("refused_lane", f"the lane of {lane.peer} is ended: {error}")
            self.end(lane)
        except OSError:
            # It broke or ended, which whoever needs it sees in `gone`.
            self.end(lane)
        self.refresh(lane)

    def _end_stalled(self) -> None:
        # What comes too slowly to wake anybody is looked for before a lane is given up.
        for lane in self._stalled():
            self._serve(lane, selectors.EVENT_READ)
        for lane in self._stalled():
            self._count_with_lock("stalled_lanes", f"the lane of {lane.peer} did not move for {self._stall_s} s: ended")
            self.end(lane)

    def _stalled(self) -> list[Lane]:
        now = time.monotonic()
        return [lane for lane in self._lanes if lane.is_owed and now - lane.moved_at >= self._stall_s]

    def _count_with_lock(self, kind: str, text: str) -> None:
        with self._lock:
            self._count(kind, text)

    def _end(self, lane: Lane) -> None:
        if lane in self._lanes:
            self._lanes.discard(lane)
            self._unread.discard(lane)
            if lane.events:
                self._selector.unregister(lane.stream.connection)
            lane.stream.close()
            lane.gone()
