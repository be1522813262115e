"""How a shm source shows its payloads: a segment's descriptor travels once, then a few numbers say where to look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnikv.core.messages import Ready, Retired, Segment
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.shm_link import ShmLink
from omnikv.transports.shm_pool import Pool, Room


class ShmShelf:
    """The pool of a source, and which of its segments each target has been told of."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._told: dict[Link, set[int]] = {}

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
        """Nothing; tells the target where to look, and shares the memory first where it does not see it yet."""
        assert isinstance(link, ShmLink)
        segment = room.segment
        if segment.number not in self._told[link]:
            self._told[link].add(segment.number)
            link.send(Segment(segment.number, segment.nbytes), segment.fd)
        link.send(Ready(ask, lease, segment.number, room.offset, room.nbytes))

    def promise(self, link: Link, ask: int, room: Room) -> None:
        """Nothing; what is read in place need not be sent ahead."""

    def wrote(self, room: Room, begin: int, end: int) -> None:
        """Nothing; as `promise`."""

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

    def close(self) -> None:
        """Nothing; descriptors are given back, memory goes with the last view of it."""
        self._pool.close()
