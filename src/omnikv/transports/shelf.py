"""Where a source's payloads lie, and how its targets come to see them: what a transport between processes brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from omnikv.core.lending import Loan
from omnikv.transports.links import Link

Room = TypeVar("Room")


class Shelf(Protocol[Room]):
    """Where a source's payloads lie, and how its targets come to see them. All but `take` and `view` with the lock."""

    @property
    def sends_ahead(self) -> bool:
        """Whether `wrote` does anything."""

    @property
    def num_lingering(self) -> int:
        """How many rooms were given back and are not free yet, for something still reads them; none once closed."""

    def take(self, sizes: Sequence[int]) -> list[Room]:
        """Room for payloads of these sizes in bytes, for all of them or for none. Called without the lock.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
        """

    def view(self, room: Room) -> memoryview:
        """The writable bytes of one payload. Called without the lock."""

    def give(self, room: Room) -> None:
        """Nobody writes or reads this room any more."""

    def show(self, link: Link, ask: int, lease: int, room: Room) -> None:
        """Answer `ask` with the payload in `room`, leased to this peer as `lease`.

        Its bytes stay until the lease ends: by Ack or Return of the peer, or with the link.
        """

    def promise(self, link: Link, ask: int, room: Room, head: bytes) -> None:
        """`ask` waits for the payload that is being written into `room`; what is written may be sent ahead.

        It will begin with `head`, empty where that is not known.
        """

    def wrote(self, room: Room, begin: int, end: int) -> None:
        """These bytes are final, before the payload is published. Called without the lock."""

    def taken(self) -> None:
        """Rooms were taken; the time to tell targets what that changed."""

    def handle(self, link: Link, message: Any) -> None:
        """A target said something that is not said over every transport.

        Raises:
            RemoteProtocolError: it may not be said, or not now.
        """

    def link_ready(self, link: Link) -> None:
        """A target is there that has seen nothing yet."""

    def link_gone(self, link: Link) -> None:
        """A target is gone; its leases come back after this."""

    def close(self) -> None:
        """Give everything back. Leased bytes may stay readable where the medium allows it."""


@runtime_checkable
class LendingShelf(Protocol):
    """A shelf that can also show what stays in its caller's memory."""

    def lend(self, room: Any, loan: Loan) -> None:
        """The payload in `room` is what `loan` says. Called without the lock, before it is shown.

        Raises:
            TransportError: the engine does not take the memory.
        """
