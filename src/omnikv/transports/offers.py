"""The sending role of a transport between processes: its payloads, who asked for which, and what they are told.

Where payloads lie and how a target comes to see one is the transport's own, as a `Shelf`: shared memory is pointed at,
a stream is sent. What is asked, answered, leased, acknowledged and given back is the same everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

from omnikv.core.keys import PayloadId
from omnikv.core.messages import Absent, Ack, Failed, Return, Unwant, Want
from omnikv.errors import ConfigError, RemoteProtocolError, TransportError
from omnikv.transports.base import Endpoint, Slot
from omnikv.transports.bell import Bell
from omnikv.transports.ledger import Entry, Ledger, PayloadState
from omnikv.transports.link_loop import LinkLoop
from omnikv.transports.links import Link

# How many asks of one peer are remembered; a peer that has more in flight breaks the protocol.
MAX_ASKS = 4096

Room = TypeVar("Room")


class Shelf(Protocol[Room]):
    """Where a source's payloads lie, and how its targets come to see them. All but `take` and `view` with the lock."""

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

    def taken(self) -> None:
        """Rooms were taken; the time to tell targets what that changed."""

    def link_ready(self, link: Link) -> None:
        """A target is there that has seen nothing yet."""

    def link_gone(self, link: Link) -> None:
        """A target is gone; its leases come back after this."""

    def close(self) -> None:
        """Give everything back. Leased bytes may stay readable where the medium allows it."""


class PairSlot(Slot):
    """Room for one payload at its sender."""

    def __init__(self, offers: Offers[Any], entry: Entry[Any], view: memoryview) -> None:
        self._offers = offers
        self._entry = entry
        self._view = view

    @property
    def buffer(self) -> memoryview:
        """The writable bytes of the payload."""
        return self._view

    def publish(self) -> None:
        """Make the payload readable and tell a receiver that waits for it."""
        self._offers.publish(self._entry)

    def drop(self) -> None:
        """Give the room back unless the payload was published."""
        self._offers.drop(self._entry)


class Offers(Generic[Room]):
    """What one source rank offers. Methods named like the transport's take the lock; the rest is called with it."""

    # Nothing that a source does has its time.
    due_at: float | None = None

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        shelf: Shelf[Room],
        lock: threading.Lock,
        require_open: Callable[[], None],
    ) -> None:
        self.loop: LinkLoop
        self._name = name
        self._endpoint = endpoint
        self._shelf = shelf
        self._lock = lock
        self._require_open = require_open
        self._settled = Bell(lock)
        self._ledger: Ledger[Room] = Ledger(name, shelf.give)
        # Who waits for a payload, first come first served; and by link and ask, for asks that are taken back.
        self._waiting: dict[PayloadId, dict[tuple[Link, int], None]] = {}
        self._asks: dict[Link, dict[int, PayloadId]] = {}

    def reserve(self, payload: PayloadId, nbytes: int) -> PairSlot:
        """Room for a payload; finding it may take long and happens outside of the lock."""
        with self._lock:
            self._require_open()
            entry = self._ledger.reserve(payload, nbytes)
        with ExitStack() as on_failure:
            # Long enough to be interrupted; the identity must be free again whatever ends it.
            on_failure.callback(self.drop, entry)
            try:
                (room,) = self._shelf.take([nbytes])
            except TransportError as error:
                error.request_id, error.key, error.rank = payload.transfer_id, payload.encode(), payload.source_rank
                raise
            on_failure.pop_all()
        with self._lock:
            self._shelf.taken()
            if entry.state is PayloadState.GONE:
                raise TransportError(
                    f"{self._name}: closed while room for {payload.encode()} was found", transport=self._name
                )
            entry.room = room
        return PairSlot(self, entry, self._shelf.view(room))

    def publish(self, entry: Entry[Room]) -> None:
        """Hand the payload over, to a waiting receiver from this very thread."""
        with self._lock:
            self._require_open()
            self._ledger.publish(entry)
            self._serve(entry.payload)

    def drop(self, entry: Entry[Room]) -> None:
        """End the payload unless it was published."""
        with self._lock:
            self._ledger.drop(entry)

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell every receiver that waits, and remember it for those who ask later."""
        with self._lock:
            self._require_open()
            self._ledger.fail(payload, cause)
            self._serve(payload)
            self._settled.ring()

    def drain(self, deadline: float) -> int:
        """How many payloads are still not acknowledged once all are, or `deadline` passes."""
        self._settled.wait_for(lambda: self._ledger.unacknowledged == 0 or None, deadline)
        return self._ledger.unacknowledged

    def link_ready(self, link: Link) -> None:
        """A target is there; an earlier life of it is over, so its leases come back first."""
        assert link.peer is not None
        for other in list(self._asks):
            if other.seat == link.seat and other.peer and other.peer.incarnation != link.peer.incarnation:
                self.loop.forget(other)
        self._asks[link] = {}
        self._shelf.link_ready(link)

    def link_refused(self, link: Link) -> None:
        """A target that does not fit holds nothing."""
        self.link_gone(link)

    def link_gone(self, link: Link) -> None:
        """What the target had leased is ready again."""
        for ask in list(self._asks.get(link, ())):
            self._forget_ask(link, ask)
        self._asks.pop(link, None)
        self._shelf.link_gone(link)
        for payload in self._ledger.leave(link):
            self._serve(payload)
        self._settled.ring()

    def on_time(self, now: float) -> None:
        """Nothing; never called."""

    def handle(self, link: Link, message: Any, extra: Any) -> None:
        """A target asks, takes back, acknowledges or returns."""
        if extra:
            raise RemoteProtocolError("a target may send messages only: no descriptors, no payload")
        if isinstance(message, Want):
            self._want(link, message)
        elif isinstance(message, Ack):
            if self._ledger.acknowledge(message.lease, link) is not None:
                self._settled.ring()
        elif isinstance(message, Return):
            payload = self._ledger.give_back(message.lease, link)
            if payload is not None:
                self._serve(payload)
            self._settled.ring()
        elif isinstance(message, Unwant):
            self._forget_ask(link, message.ask)

    def stopped(self, error: BaseException | None) -> None:
        """Nothing is offered any more; `drain` ends."""
        self._ledger.clear()
        self._shelf.close()
        self._settled.ring()

    def _want(self, link: Link, want: Want) -> None:
        asks = self._asks[link]
        if want.ask in asks or len(asks) >= MAX_ASKS:
            raise RemoteProtocolError(f"ask {want.ask} is in flight already, or more than {MAX_ASKS} are")
        assert link.seat is not None
        try:
            payload = PayloadId(
                edge=self._endpoint.edge,
                transfer_id=want.transfer_id,
                role=want.role,
                attempt=want.attempt,
                source_rank=self._endpoint.rank,
                target_rank=link.seat.rank,
            )
        except ConfigError as error:
            raise RemoteProtocolError(f"an ask for no payload: {error}") from error
        asks[want.ask] = payload
        self._waiting.setdefault(payload, {})[link, want.ask] = None
        self._serve(payload)
        if not want.patient and want.ask in asks:
            self._forget_ask(link, want.ask)
            link.send(Absent(want.ask))

    def _serve(self, payload: PayloadId) -> None:
        """Answer those who wait for `payload`, as far as it can be answered now."""
        cause = self._ledger.failure(payload)
        while waiting := self._waiting.get(payload):
            link, ask = next(iter(waiting))
            if cause is not None:
                self._forget_ask(link, ask)
                link.send(Failed(ask, cause))
                continue
            entry = self._ledger.lease(payload, link)
            if entry is None:
                return
            assert entry.room is not None
            self._forget_ask(link, ask)
            self._shelf.show(link, ask, entry.lease, entry.room)

    def _forget_ask(self, link: Link, ask: int) -> None:
        payload = self._asks[link].pop(ask, None)
        if payload is not None:
            waiting = self._waiting[payload]
            del waiting[link, ask]
            if not waiting:
                del self._waiting[payload]
