"""How a target comes to see what its sources show: what a transport between processes brings for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from omnikv.core.keys import PayloadId
from omnikv.core.messages import Ack, Return
from omnikv.errors import LocalProtocolError
from omnikv.transports.base import Lease
from omnikv.transports.links import Link


def _nothing() -> None:
    """What most leases have to free here when they end."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A payload that is whole and readable here: which ask it answers, its lease at the source, and its bytes.

    `free` is called once, with the lock, when the lease ends, for transports that hold memory of their own under it.
    """

    ask: int
    lease: int
    view: memoryview
    free: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Preparation:
    """A payload that `ask` waits for is on its way: it is being written into `view`, or soon will be somewhere.

    In `view` it will begin with `head`.
    """

    ask: int
    view: memoryview | None = None
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class Vanished:
    """Memory in which this source's payloads lay is given up, perhaps some in which one is waited for."""


class Window(Protocol):
    """How a target comes to see what its sources show. Called with the lock."""

    def handle(self, link: Link, message: Any, extra: Any) -> Arrival | Preparation | Vanished | None:
        """A source said something that is no plain answer; what came of it for whoever waits, if anything did.

        Raises:
            RemoteProtocolError: it may not be said, or not now.
        """

    def expected(self, link: Link) -> memoryview | None:
        """Where this source's next payload is likely to be, if it comes in memory that is here already."""

    def link_ready(self, link: Link) -> None:
        """A source is there that has shown nothing yet."""

    def link_gone(self, link: Link) -> None:
        """A source is gone; nothing more comes from it."""

    def given_up(self, link: Link, ask: int) -> None:
        """Nobody waits for the answer to `ask` any more, which was asked over `link` and not answered yet."""

    def close(self) -> None:
        """Nothing more is wanted; what is leased still may stay readable where the medium allows it."""


class PairLease(Lease):
    """A payload that came over a link. Its bytes may outlive the sender as long as a view of them does."""

    def __init__(self, payload: PayloadId, arrival: Arrival, end: LeaseEnd) -> None:
        self.payload = payload
        self.arrival = arrival
        self._end = end
        # Never released by hand: tensors made from it keep it, and with it a mapping, alive.
        self._view: memoryview | None = arrival.view

    @property
    def buffer(self) -> memoryview:
        """The payload's bytes, valid until acknowledged or released, never to be written.

        Raises:
            LocalProtocolError: it was acknowledged or released.
        """
        if self._view is None:
            raise LocalProtocolError("this lease has ended, its bytes are the sender's again; get it once more")
        return self._view

    def acknowledge(self) -> None:
        """End the payload's life."""
        self._end_with(Ack(self.arrival.lease))

    def release(self) -> None:
        """Give the payload back unread."""
        self._end_with(Return(self.arrival.lease))

    def let_go(self) -> bool:
        """Whether it was held until now; from here on its bytes are the sender's. Call with the lock."""
        was_held, self._view = self._view is not None, None
        return was_held

    def _end_with(self, message: Ack | Return) -> None:
        # Decided with the lock: another thread may be first, and Ctrl-C may come while it is waited for.
        if self._view is not None:
            self._end(self, message)


LeaseEnd = Callable[[PairLease, Ack | Return], None]
