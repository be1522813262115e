"""The receiving role of a transport between processes: what it asked for, what came of it, and the leases it holds.

How a payload becomes visible here is the transport's own, as a `Window`: memory is mapped, or a stream is received.

A source that is absent is waited for, as its payloads are. One that was there and has died is not: whoever waits for it
is told at once, and so is whoever asks later, unless its next life came within `RETURN_S` of the death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from omnikv.core.keys import PayloadId
from omnikv.core.lease import End, error_of
from omnikv.core.messages import Absent, Ack, Interest, Over, Return, Unwant, Want
from omnikv.errors import (
    ConfigError,
    ConnectError,
    OmniKVError,
    ProducerFailed,
    TransportError,
)
from omnikv.transports.ahead import AT_ONCE_S, next_of, show_formed, show_likely
from omnikv.transports.ask import Ask
from omnikv.transports.base import MAX_ASKS, Endpoint, Preview, Seat
from omnikv.transports.bell import Bell
from omnikv.transports.link_loop import LinkLoop
from omnikv.transports.links import Knock, Link
from omnikv.transports.pairing import RETURN_S, dead_source, describe, lost_source, misfit, withdrawn
from omnikv.transports.repeated_acks import RepeatedAcks
from omnikv.transports.window import Arrival, PairLease, Preparation, Vanished, Window

# How long an ask whose deadline has passed already may take to be answered by a source that is there.
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class _Death:
    """When a source that had been met was lost, and which process it was."""

    at: float
    who: str


class Wants:
    """What one target rank asks for. Methods that the transport or a lease calls take the lock; the rest is called
    with it.
    """

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
        self._acks = RepeatedAcks()
        self._refused: dict[Seat, Link] = {}
        self._asks: dict[int, Ask] = {}
        self._next_ask = 1
        self._deaths: dict[Seat, _Death] = {}
        self._announced: dict[PayloadId, None] = {}

    def get_as_ready(
        self, payloads: Sequence[PayloadId], deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, PairLease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not.

        `preview` is shown where one of them is being written, if its source says so.
        """
        now = time.monotonic()
        is_patient = deadline > now
        limit = deadline if is_patient else now + ANSWER_S
        changed = Bell(self._lock)
        asks: dict[int, Ask] = {}
        try:
            with self._lock:
                self._require_open()
                for payload in payloads:
                    self._pursue(self._open(payload, is_patient, changed, asks))
                # Others that wait here too have use for the time, and for the memory in which a payload is likely.
                is_alone = len(self._asks) == len(asks)

            def look() -> Ask | None:
                return next_of(asks.values(), preview, limit)

            at_once = time.monotonic() + AT_ONCE_S
            may_prepare = bool(asks) and is_alone and is_patient and at_once < limit
            if preview is not None and may_prepare and changed.wait_for(look, at_once) is None:
                show_likely(asks.values(), preview, self._window, self._lock, limit)
            while asks:
                known = changed.wait_for(look, limit)
                if known is None:
                    return
                if preview is not None and not known.is_settled:
                    show_formed(known, preview, self._lock, self.loop.hear)
                    continue
                with self._lock:
                    del self._asks[known.number]
                error = None if known.error is None else known.pop_error()
                outcome = known.lease or error
                # The last thing before it is handed on: until then an interruption gives it back.
                del asks[known.number]
                if outcome is not None:
                    yield known.payload, outcome
        finally:
            self._take_all_back(asks)

    def others_ready(self, payload: PayloadId, deadline: float) -> tuple[str, ...]:
        """What the source has ready instead of `payload`; nothing where it does not answer by `deadline`."""
        changed = Bell(self._lock)
        asks: dict[int, Ask] = {}
        try:
            with self._lock:
                self._require_open()
                ask = self._open(payload, False, changed, asks)
                ask.is_curious = True
                self._pursue(ask)
            changed.wait_for(lambda: ask.is_settled or None, deadline)
            return ask.others
        finally:
            self._take_all_back(asks)

    def announce(self, payloads: Sequence[PayloadId]) -> None:
        """Tell the sources, now or when they are met, that this target will come for the payloads."""
        with self._lock:
            self._require_open()
            new = [payload for payload in dict.fromkeys(payloads) if payload not in self._announced]
            if len(self._announced) + len(new) > MAX_ASKS:
                raise ConfigError(
                    f"{self._name}: {len(self._announced)} payloads are announced and {len(new)} more would be over "
                    f"{MAX_ASKS}; take some back"
                )
            for payload in new:
                self._announced[payload] = None
                self._send_interest(payload, is_given=True)

    def withdraw(self, payloads: Sequence[PayloadId]) -> None:
        """Take announcements back; whoever waits for one of the payloads here is told."""
        with self._lock:
            for payload in payloads:
                if self._announced.pop(payload, payload) is None:
                    self._send_interest(payload, is_given=False)
            for ask in list(self._asks.values()):
                if ask.payload in payloads and not ask.is_settled:
                    self._unwant(ask)
                    ask.settle(error=withdrawn(self._name, ask.payload))

    def end_lease(self, link: Link, lease: PairLease, message: Ack | Return) -> None:
        """Tell the source. When it is gone, it knows that the payload came back, and hears of an Ack if it returns."""
        with self._lock:
            if not lease.let_go():
                return
            lease.arrival.free()
            if isinstance(message, Ack):
                # The source takes the announcement for done.
                self._announced.pop(lease.payload, None)
                self._acks.say(link, message)
                self._meet_if_owed(link)
            else:
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
        self._deaths.pop(link.seat, None)
        self._window.link_ready(link)
        self._acks.link_ready(link)
        for payload in self._announced:
            if payload.source_rank == link.seat.rank:
                self._send_interest(payload, is_given=True)
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
        if self._sources.get(link.seat) is link and link.refusal is None:
            self._deaths[link.seat] = _Death(time.monotonic(), link.who)
        self._drop(link)
        for ask in self._asks_of(link.seat):
            if link.refusal is not None and ask.link in (link, None):
                # What answers at the source's address speaks nonsense: no source to wait for.
                ask.settle(error=self._refusal(link, ask.payload))
            elif ask.link is link:
                ask.settle(error=self._lost(link, ask.payload))
            elif ask.link is None and not ask.is_patient and not self.loop.is_greeting(link.seat):
                ask.settle(is_absent=True)
        self._meet_if_owed(link)

    @property
    def due_at(self) -> float | None:
        """When the next ask for a dead source is given up, unless it has come back by then."""
        if not self._deaths or not self._asks:
            return None
        times = [death.at + RETURN_S for seat, death in self._deaths.items() if self._orphans_of(seat)]
        return min(times, default=None)

    def on_time(self, now: float) -> None:
        """A dead source has had its time to come back."""
        for seat, death in self._deaths.items():
            if now >= death.at + RETURN_S:
                for ask in self._orphans_of(seat):
                    ask.settle(error=self._dead(seat, ask.payload, now))

    def handle(self, link: Link, message: Any, extra: Any) -> None:
        """A source answers an ask, or shows something."""
        if isinstance(message, Over | Absent) and not extra:
            if not self.is_expected(link, message.ask):
                return
            ask = self._asks[message.ask]
            if isinstance(message, Absent):
                ask.others = message.others
                ask.settle(is_absent=True)
            else:
                self._announced.pop(ask.payload, None)
                ask.settle(error=error_of(ask.payload, End(message.how, message.generation, message.cause)))
            return
        told = self._window.handle(link, message, extra)
        if isinstance(told, Arrival):
            self.arrive(link, told)
        elif isinstance(told, Preparation) and self.is_expected(link, told.ask):
            ask = self._asks[told.ask]
            ask.forming = ask.forming if told.view is None else told
            # Awake, it is at hand when the payload comes.
            ask.changed.ring()
        elif isinstance(told, Vanished):
            for ask in self._asks.values():
                if ask.link is link and not ask.is_settled:
                    ask.forming = Preparation(ask.number, memoryview(b""))
                    ask.changed.ring()

    def arrive(self, link: Link, arrival: Arrival) -> None:
        """A payload is here; for windows that know of it later than by a message."""
        if self.is_expected(link, arrival.ask):
            ask = self._asks[arrival.ask]
            ask.settle(lease=PairLease(ask.payload, arrival, partial(self.end_lease, link)))
        else:
            arrival.free()
            link.send(Return(arrival.lease))

    def fail_ask(self, link: Link, ask: int, error: OmniKVError) -> None:
        """What `ask` was answered with over `link` cannot be had here."""
        if self.is_expected(link, ask):
            self._asks[ask].settle(error=error)

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

    def _open(self, payload: PayloadId, is_patient: bool, changed: Bell, asks: dict[int, Ask]) -> Ask:
        """A new ask, which is the caller's to take back: it is in `asks` first."""
        ask = Ask(self._next_ask, payload, is_patient, changed)
        self._next_ask += 1
        asks[ask.number] = self._asks[ask.number] = ask
        return ask

    def _pursue(self, ask: Ask) -> None:
        """Nothing; the ask was sent, or its source was knocked on, or it is settled."""
        seat = Seat(ask.payload.source_rank)
        link, refused = self._sources.get(seat), self._refused.get(seat)
        if refused is not None:
            ask.settle(error=self._refusal(refused, ask.payload))
            return
        if link is not None:
            self._send(link, ask)
        try:
            if ask.link is None and self.loop.knock(seat) is not Knock.ANSWERED:
                self._miss(ask, seat)
        except ConnectError as error:
            ask.settle(error=error)

    def _miss(self, ask: Ask, seat: Seat) -> None:
        """Nothing; an ask for a source that is not there is settled, or will be in time."""
        death, now = self._deaths.get(seat), time.monotonic()
        if death is not None and now >= death.at + RETURN_S:
            ask.settle(error=self._dead(seat, ask.payload, now))
        elif not ask.is_patient:
            ask.settle(is_absent=True)
        elif death is not None:
            self.loop.wake_by(death.at + RETURN_S)

    def _send(self, link: Link, ask: Ask) -> None:
        ask.link = link
        wanted = ask.payload
        link.send(Want(ask.number, wanted.transfer_id, wanted.role, wanted.attempt, ask.is_patient, ask.is_curious))
        if link.is_over:
            # It was dead before it was asked, so this ask is one for its next life.
            ask.link = None

    def _meet_if_owed(self, link: Link) -> None:
        """Nothing; goes to the source anew if `link` to it has ended and may have taken an acknowledgement with it."""
        assert link.seat is not None
        if link.seat not in self._sources and self._acks.are_owed(link) and not self.loop.has_ended:
            with suppress(ConnectError):
                self.loop.knock(link.seat)

    def _send_interest(self, payload: PayloadId, *, is_given: bool) -> None:
        link = self._sources.get(Seat(payload.source_rank))
        if link is not None:
            link.send(Interest(payload.transfer_id, payload.role, payload.attempt, is_given))

    def _take_all_back(self, asks: dict[int, Ask]) -> None:
        """Nothing; given up, interrupted or refused while asking: an answer that came meanwhile goes back."""
        # Twice, since Ctrl-C may come while the first waits for the lock.
        try:
            self._take_each_back(asks)
        finally:
            self._take_each_back(asks)

    def _take_each_back(self, asks: dict[int, Ask]) -> None:
        if asks:
            with self._lock:
                for number, ask in list(asks.items()):
                    self._take_back(ask)
                    del asks[number]

    def _take_back(self, ask: Ask) -> None:
        self._asks.pop(ask.number, None)
        if not ask.is_settled:
            self._unwant(ask)
        elif ask.lease is not None and ask.link is not None:
            # Where it was interrupted in between, it is said again; room is freed once.
            ask.link.send(Return(ask.lease.arrival.lease))
            if ask.lease.let_go():
                ask.lease.arrival.free()

    def _unwant(self, ask: Ask) -> None:
        if ask.link is not None:
            ask.link.send(Unwant(ask.number))
            self._window.given_up(ask.link, ask.number)

    def _drop(self, link: Link) -> None:
        assert link.seat is not None
        if self._sources.get(link.seat) is link:
            del self._sources[link.seat]
        if self._refused.get(link.seat) is link:
            del self._refused[link.seat]
        self._window.link_gone(link)

    def _asks_of(self, seat: Seat) -> list[Ask]:
        return [ask for ask in self._asks.values() if ask.payload.source_rank == seat.rank and not ask.is_settled]

    def _orphans_of(self, seat: Seat) -> list[Ask]:
        """The asks for a source that nobody answers for, and that nobody is about to."""
        if self.loop.is_greeting(seat):
            return []
        return [ask for ask in self._asks_of(seat) if ask.link is None]

    def _dead(self, seat: Seat, payload: PayloadId, now: float) -> ProducerFailed:
        death = self._deaths[seat]
        return dead_source(self._name, f"source {seat} ({death.who})", payload, since_s=now - death.at)

    def _refusal(self, link: Link, payload: PayloadId) -> ConnectError:
        return misfit(self._name, f"source {link.seat} and {describe(self._endpoint)}", str(link.refusal), payload)

    def _lost(self, link: Link, payload: PayloadId) -> ProducerFailed:
        return lost_source(self._name, f"source {link.seat} ({link.who})", payload)
