"""How a shm source shows its payloads: a segment's descriptor travels once, then a few numbers say where to look.

A target that waits and reads is told ahead, unless the source is busy: where its payload is being written, and how it
will begin. So it is awake, and has prepared its views of the tensors, when the payload is shown. A payload that takes
the place of the latest is prepared for already, and the target is only told to wake up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from omnikv.core.messages import MAX_FORMING_HEAD_NBYTES, Forming, Ready, Retired, Segment, Soon
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.shm_link import ShmLink
from omnikv.transports.shm_pool import Pool, Room

# So long after a payload was shown, processes and their caches are taken to be awake.
AWAKE_S = 0.001
# Writing so much takes so long that a target that was woken would be asleep again.
LONG_NBYTES = 4 << 20


class ShmShelf:
    """The pool of a source, and which of its segments each target has been told of."""

    num_lingering = 0
    sends_ahead = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._told: dict[Link, set[int]] = {}
        self._latest: dict[Link, Room] = {}
        self._shown_at = -math.inf

    def take(self, sizes: Sequence[int]) -> list[Room]:
        """Room on whole pages for all payloads or for none; the pool may grow.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
        """
        return self._pool.take_all(sizes)

    def view(self, room: Room) -> memoryview:
        """The writable bytes of one payload."""
        return room.view

    def give(self, room: Room) -> None:
        """Nothing; the room is free again."""
        self._pool.give(room)

    def show(self, link: Link, ask: int, lease: int, room: Room) -> None:
        """Nothing; tells the target where to look."""
        self._share(link, room)
        link.send(Ready(ask, lease, room.segment.number, room.offset, room.nbytes))
        self._latest[link] = room
        self._shown_at = time.monotonic()

    def promise(self, link: Link, ask: int, room: Room, head: bytes) -> None:
        """Nothing; what is read in place is not sent ahead, but a target that knows its head can prepare for it.

        It has already where it lies as the latest did (`Window.expected`), and is only woken, unless that is too early.
        """
        if not 0 < len(head) <= MAX_FORMING_HEAD_NBYTES or not self._may_tell_ahead(link):
            return
        if not room.is_like(self._latest.get(link)):
            self._share(link, room)
            link.send(Forming(ask, room.segment.number, room.offset, room.nbytes, head))
        elif room.nbytes < LONG_NBYTES:
            link.send(Soon(ask))

    def wrote(self, room: Room, begin: int, end: int) -> None:
        """Nothing; it is read in place, all of it together."""

    def taken(self) -> None:
        """Nothing; segments that made way for others may be unmapped by their readers."""
        for number in self._pool.pop_retired():
            for link, told in self._told.items():
                if number in told:
                    told.remove(number)
                    link.send(Retired(number))

    def handle(self, link: Link, message: Any) -> None:
        """Never returns; a target says nothing here that is not said over every transport.

        Raises:
            RemoteProtocolError: always.
        """
        raise RemoteProtocolError(f"{message} is nothing that a target says here")

    def link_ready(self, link: Link) -> None:
        """A target that sees nothing yet."""
        self._told[link] = set()

    def link_gone(self, link: Link) -> None:
        """Nothing; forgets what the target saw."""
        self._told.pop(link, None)
        self._latest.pop(link, None)

    def close(self) -> None:
        """Nothing; descriptors are given back, memory goes with the last view of it."""
        self._pool.close()

    def _may_tell_ahead(self, link: Link) -> bool:
        """Whether early words are worth it: not where targets are awake anyway, for they take time from what is under
        way, nor where one does not read, for they would only fill its queue.
        """
        return time.monotonic() - self._shown_at >= AWAKE_S and not link.has_queue

    def _share(self, link: Link, room: Room) -> None:
        """Nothing; the target sees the memory."""
        assert isinstance(link, ShmLink)
        segment = room.segment
        if segment.number not in self._told[link]:
            self._told[link].add(segment.number)
            link.send(Segment(segment.number, segment.nbytes), segment.fd)
