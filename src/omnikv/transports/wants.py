"""The receiving role of a transport between processes: what it asked for, what came of it, and the leases it holds.

How a payload becomes visible here is the transport's own, as a `Window`: memory is mapped, or a stream is received.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omnikv.core.keys import PayloadId
from omnikv.core.messages import Absent, Ack, Failed, Return, Unwant, Want
from omnikv.errors import (
    ConnectError,
    LocalProtocolError,
    OmniKVError,
    ProducerFailed,
    TransportError,
)
from omnikv.transports.base import Endpoint, Lease, Seat
from omnikv.transports.bell import Bell
from omnikv.transports.ledger import producer_failed
from omnikv.transports.link_loop import LinkLoop
from omnikv.transports.links import Knock, Link
from omnikv.transports.pairing import describe

# How long an ask whose deadline has passed already may take to be answered by a source that is there.
ANSWER_S = 1.0


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


class Window(Protocol):
    """How a target comes to see what its sources show. Called with the lock."""

    def handle(self, link: Link, message: Any, extra: Any) -> Arrival | None:
        """A source said something that is no plain answer; the payload that became readable by it, if one did.

        Raises:
            RemoteProtocolError: it may not be said, or not now.
        """

    def link_ready(self, link: Link) -> None:
        """A source is there that has shown nothing yet."""

    def link_gone(self, link: Link) -> None:
        """A source is gone; nothing more comes from it."""

    def close(self) -> None:
        """Nothing more is wanted; what is leased still may stay readable where the medium allows it."""


class PairLease(Lease):
    """A payload that came over a link. Its bytes may outlive the sender as long as a view of them does."""

    def __init__(self, wants: Wants, link: Link, arrival: Arrival) -> None:
        self._wants = wants
        self._link = link
        self.arrival = arrival
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
        self._end(Ack(self.arrival.lease))

    def release(self) -> None:
        """Give the payload back unread."""
        self._end(Return(self.arrival.lease))

    def _end(self, message: Ack | Return) -> None:
        if self._view is not None:
            self._view = None
            self._wants.end_lease(self._link, self.arrival, message)


class _Ask:
    """One payload that is waited for: over which link it was asked for, and what came of it."""

    def __init__(self, number: int, payload: PayloadId, is_patient: bool, changed: Bell) -> None:
        self.number = number
        self.payload = payload
        self.is_patient = is_patient
        self.changed = changed
        self.link: Link | None = None
        self.lease: PairLease | None = None
        self.error: OmniKVError | None = None
        self.is_absent = False

    @property
    def is_settled(self) -> bool:
        """Whether the waiting thread may go on."""
        return self.lease is not None or self.error is not None or self.is_absent

    def pop_error(self) -> OmniKVError:
        """The error, no longer kept here: raised, it refers to the frame that refers to this ask."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def settle(
        self, *, lease: PairLease | None = None, error: OmniKVError | None = None, is_absent: bool = False
    ) -> None:
        """Nothing; wakes the waiting thread with its answer."""
        self.lease, self.error, self.is_absent = lease, error, is_absent
        self.changed.ring()


class Wants:
    """What one target rank asks for. `get_as_ready` and `end_lease` take the lock; the rest is called with it."""

    # Nothing that a target does has its time; whoever waits has a deadline.
    due_at: float | None = None

    def __init__(
        self, name: str, endpoint: Endpoint, window: Window, lock: threading.Lock, require_open: Callable[[], None]
    ) -> None:
        self.loop: LinkLoop
        self._name = name
        self._endpoint = endpoint
        self._window = window
        self._lock = lock
        self._require_open = require_open
        self._sources: dict[Seat, Link] = {}
        self._refused: dict[Seat, Link] = {}
        self._asks: dict[int, _Ask] = {}
        self._next_ask = 1

    def get_as_ready(
        self, payloads: Sequence[PayloadId], deadline: float
    ) -> Generator[tuple[PayloadId, PairLease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not."""
        now = time.monotonic()
        is_patient = deadline > now
        limit = deadline if is_patient else now + ANSWER_S
        changed = Bell(self._lock)
        asks: dict[int, _Ask] = {}
        try:
            with self._lock:
                self._require_open()
                for payload in payloads:
                    ask = self._open(payload, is_patient, changed)
                    asks[ask.number] = ask
                    self._pursue(ask)
            while asks:
                settled = changed.wait_for(lambda: next((ask for ask in asks.values() if ask.is_settled), None), limit)
                if settled is None:
                    return
                with self._lock:
                    del self._asks[settled.number]
                error = None if settled.error is None else settled.pop_error()
                outcome = settled.lease or error
                # The last thing before it is handed on: until then an interruption gives it back.
                del asks[settled.number]
                if outcome is not None:
                    yield settled.payload, outcome
        finally:
            # Given up, interrupted or refused while asking: an answer that came meanwhile goes back.
            with self._lock:
                for ask in asks.values():
                    self._take_back(ask)

    def end_lease(self, link: Link, arrival: Arrival, message: Ack | Return) -> None:
        """Tell the source; when it is gone, it knows already."""
        with self._lock:
            arrival.free()
            link.send(message)

    def is_expected(self, link: Link, ask: int) -> bool:
        """Whether an answer to `ask` over `link` is still wanted; one that is not may be thrown away as it comes."""
        wanted = self._asks.get(ask)
        return wanted is not None and wanted.link is link and not wanted.is_settled

    def link_ready(self, link: Link) -> None:
        """A source is there. The first link of one life of a source is used, later ones are closed."""
        assert link.seat is not None
        assert link.peer is not None
        current = self._sources.get(link.seat)
        if current is not None and current.peer is not None:
            if current.peer.incarnation == link.peer.incarnation:
                self.loop.forget(link)
                return
            self.loop.forget(current)
        self._sources[link.seat] = link
        self._window.link_ready(link)
        for ask in self._asks_of(link.seat):
            if ask.link is None:
                self._send(link, ask)

    def link_refused(self, link: Link) -> None:
        """A source that does not fit: whoever waits for it is told."""
        if link.seat is None:
            return
        self._drop(link)
        self._refused[link.seat] = link
        for ask in self._asks_of(link.seat):
            ask.settle(error=self._refusal(link, ask.payload))

    def link_gone(self, link: Link) -> None:
        """A source died or closed: whoever had asked it is told at once."""
        if link.seat is None:
            return
        self._drop(link)
        for ask in self._asks_of(link.seat):
            if ask.link is link:
                ask.settle(error=self._refusal(link, ask.payload) if link.refusal else self._lost(link, ask.payload))
            elif ask.link is None and not ask.is_patient and not self.loop.is_greeting(link.seat):
                ask.settle(is_absent=True)

    def on_time(self, now: float) -> None:
        """Nothing; never called."""

    def handle(self, link: Link, message: Any, extra: Any) -> None:
        """A source answers an ask, or shows something."""
        if isinstance(message, Failed | Absent) and not extra:
            if not self.is_expected(link, message.ask):
                return
            ask = self._asks[message.ask]
            if isinstance(message, Absent):
                ask.settle(is_absent=True)
            else:
                ask.settle(error=producer_failed(ask.payload, message.cause))
            return
        arrival = self._window.handle(link, message, extra)
        if arrival is None:
            return
        if self.is_expected(link, arrival.ask):
            self._asks[arrival.ask].settle(lease=PairLease(self, link, arrival))
        else:
            arrival.free()
            link.send(Return(arrival.lease))

    def stopped(self, error: BaseException | None) -> None:
        """Wake whoever waits: this end is closed."""
        for ask in self._asks.values():
            if not ask.is_settled:
                closed = TransportError(
                    f"{self._name}: {describe(self._endpoint)} closed during a get", transport=self._name
                )
                closed.__cause__ = error
                ask.settle(error=closed)
        self._window.close()

    def _open(self, payload: PayloadId, is_patient: bool, changed: Bell) -> _Ask:
        ask = _Ask(self._next_ask, payload, is_patient, changed)
        self._next_ask += 1
        self._asks[ask.number] = ask
        return ask

    def _pursue(self, ask: _Ask) -> None:
        """Nothing; the ask was sent, or its source was knocked on, or it is settled."""
        seat = Seat(ask.payload.source_rank)
        link, refused = self._sources.get(seat), self._refused.get(seat)
        if refused is not None:
            ask.settle(error=self._refusal(refused, ask.payload))
            return
        if link is not None:
            self._send(link, ask)
        try:
            if ask.link is None and self.loop.knock(seat) is not Knock.ANSWERED and not ask.is_patient:
                ask.settle(is_absent=True)
        except ConnectError as error:
            ask.settle(error=error)

    def _send(self, link: Link, ask: _Ask) -> None:
        ask.link = link
        wanted = ask.payload
        link.send(Want(ask.number, wanted.transfer_id, wanted.role, wanted.attempt, ask.is_patient))
        if link.is_over:
            # It was dead before it was asked, so this ask is one for its next life.
            ask.link = None

    def _take_back(self, ask: _Ask) -> None:
        self._asks.pop(ask.number, None)
        if ask.link is not None and not ask.is_settled:
            ask.link.send(Unwant(ask.number))
        elif ask.lease is not None and ask.link is not None:
            ask.lease.arrival.free()
            ask.link.send(Return(ask.lease.arrival.lease))

    def _drop(self, link: Link) -> None:
        assert link.seat is not None
        if self._sources.get(link.seat) is link:
            del self._sources[link.seat]
        if self._refused.get(link.seat) is link:
            del self._refused[link.seat]
        self._window.link_gone(link)

    def _asks_of(self, seat: Seat) -> list[_Ask]:
        return [ask for ask in self._asks.values() if ask.payload.source_rank == seat.rank and not ask.is_settled]

    def _refusal(self, link: Link, payload: PayloadId) -> ConnectError:
        return ConnectError(
            f"{self._name}: source {link.seat} and {describe(self._endpoint)} do not fit: {link.refusal}",
            transport=self._name,
            request_id=payload.transfer_id,
            key=payload.encode(),
            rank=payload.source_rank,
        )

    def _lost(self, link: Link, payload: PayloadId) -> ProducerFailed:
        return ProducerFailed(
            f"{self._name}: source {link.seat} ({link.who}) closed its connection before {payload.encode()} came",
            request_id=payload.transfer_id,
            key=payload.encode(),
            rank=payload.source_rank,
        )
