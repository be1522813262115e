"""The sending role of a transport between processes: its payloads, who asked for which, and what they are told.

Where payloads lie and how a target comes to see one is the transport's own, as a `Shelf`: shared memory is pointed at,
a stream is sent. What is asked, answered, leased, acknowledged and given back is the same everywhere.

A target asks with Want. The answer comes at once, or, where the ask is patient, when there is one: the shelf shows the
payload, or Over says how its life ended. Whoever waits, holds a lease or sent Interest keeps the payload from expiring;
the end of a connection ends all three. An Ack that was lost with it is said again by the same life of the target
(`repeated_acks`), and counts until somebody leases the payload anew.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic

from omnikv.core.keys import PayloadId
from omnikv.core.lease import End
from omnikv.core.lending import Loan
from omnikv.core.messages import Absent, Ack, Interest, Over, Return, Unwant, Want
from omnikv.errors import ConfigError, RemoteProtocolError, TransportError
from omnikv.transports.base import MAX_ASKS, Endpoint, PutRequest, Slot
from omnikv.transports.bell import Bell
from omnikv.transports.ledger import Grant, Ledger, Ticket
from omnikv.transports.link_loop import LinkLoop
from omnikv.transports.links import Link
from omnikv.transports.shelf import LendingShelf, Room, Shelf
from omnikv.transports.waiting_room import WaitingRoom


class PairSlot(Slot):
    """Room for one payload at its sender."""

    def __init__(self, offers: Offers[Any], ticket: Ticket[Any], shelf: Shelf[Any], room: Any) -> None:
        self._offers = offers
        self._ticket = ticket
        self._shelf = shelf
        self._room = room
        self._view = shelf.view(room)
        self.sends_ahead = shelf.sends_ahead

    @property
    def buffer(self) -> memoryview:
        """The writable bytes of the payload."""
        return self._view

    def written(self, begin: int, end: int) -> None:
        """Let these bytes travel while others are still written, where a receiver waits for the payload.

        Raises:
            ConfigError: they are not in the buffer.
        """
        if not 0 <= begin <= end <= len(self._view):
            raise ConfigError(f"bytes {begin} to {end} are not in a payload of {len(self._view)} bytes")
        self._shelf.wrote(self._room, begin, end)

    def lend(self, loan: Loan) -> None:
        """Leave a part of the payload in its caller's memory, where the shelf can."""
        if isinstance(self._shelf, LendingShelf):
            self._shelf.lend(self._room, loan)
        else:
            super().lend(loan)

    def publish(self) -> None:
        """Make the payload readable and tell a receiver that waits for it."""
        self._offers.publish(self._ticket)

    def drop(self) -> None:
        """Give the room back unless the payload was published."""
        self._offers.drop(self._ticket)


class Offers(Generic[Room]):
    """What one source rank offers. Methods named like the transport's take the lock; the rest is called with it."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        shelf: Shelf[Room],
        lock: threading.Lock,
        require_open: Callable[[], None],
    ) -> None:
        self.loop: LinkLoop
        # When the loop looks for what has expired; it stays set when nothing is due any more, which saves waking it.
        self.due_at: float | None = None
        self._name = name
        self._endpoint = endpoint
        self._shelf = shelf
        self._lock = lock
        self._require_open = require_open
        self._settled = Bell(lock)
        self._waiting_room = WaitingRoom(name, lock)
        self._ledger: Ledger[Room] = Ledger(name, ttl_s=endpoint.payload_ttl_s, free=self._free, look_again=self._serve)
        # Who waits for a payload, first come first served; and by link, what it asks for and what it has announced.
        self._waiting: dict[PayloadId, dict[tuple[Link, int], None]] = {}
        self._asks: dict[Link, dict[int, PayloadId]] = {}
        self._announced: dict[Link, set[PayloadId]] = {}

    def reserve_all(self, requests: Sequence[PutRequest], deadline: float) -> list[Slot]:
        """Room for all payloads or for none; finding it may take long and happens outside of the lock."""
        tickets: list[Ticket[Room]] = []
        rooms: list[Room] = []
        with ExitStack() as on_failure:
            # Long enough to be interrupted; identities and room must be free again whatever ends it. Twice, since
            # Ctrl-C may come while the first of them waits for the lock.
            for _ in range(2):
                on_failure.callback(self._undo, tickets, rooms)
            with self._lock:
                self._require_open()
                for wanted in requests:
                    readers = wanted.num_readers or self._endpoint.num_readers
                    tickets.append(self._ledger.reserve(wanted.payload, readers, time.monotonic()))
            self._admit(requests, deadline, rooms)
            with self._lock:
                # Where it is closed by now, the shelf is too, and the rooms with it.
                self._require_open()
                self._shelf.taken()
                for wanted, ticket, room in zip(requests, tickets, rooms, strict=True):
                    self._ledger.furnish(ticket, room)
                    for link, ask in self._waiting.get(ticket.payload, ()):
                        self._shelf.promise(link, ask, room, wanted.head)
            on_failure.pop_all()
        return [PairSlot(self, ticket, self._shelf, room) for ticket, room in zip(tickets, rooms, strict=True)]

    def publish(self, ticket: Ticket[Room]) -> None:
        """Hand the payload over, to a waiting receiver from this very thread."""
        with self._lock:
            self._require_open()
            self._ledger.publish(ticket, time.monotonic())
            self._set_alarm()

    def drop(self, ticket: Ticket[Room]) -> None:
        """End the payload unless it was published."""
        with self._lock:
            self._ledger.drop(ticket, time.monotonic())

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell every receiver that waits, and remember it for those who ask later."""
        with self._lock:
            self._require_open()
            self._ledger.fail(payload, cause, time.monotonic())

    def abort(self, payload: PayloadId, cause: str) -> None:
        """As `fail`, for a payload that nobody needs any more."""
        with self._lock:
            self._require_open()
            self._ledger.abort(payload, cause, time.monotonic())

    def drain(self, deadline: float) -> int:
        """How many published payloads still have their room once none has, or `deadline` passes."""
        self._settled.wait_for(lambda: self._num_held() == 0 or None, deadline)
        with self._lock:
            return self._num_held()

    def wait_until_free(self, payload: PayloadId, deadline: float) -> bool:
        """Whether the payload has ended and nobody writes or reads it, once that is so or `deadline` passes."""
        return bool(self._settled.wait_for(lambda: not self._ledger.holds(payload) or None, deadline))

    def census(self) -> dict[str, int]:
        """How many payloads stand where, and how many lives have ended in which way."""
        with self._lock:
            return self._ledger.census()

    def link_ready(self, link: Link) -> None:
        """A target is there; an earlier life of it is over, so its leases come back first."""
        assert link.peer is not None
        for other in list(self._asks):
            if other.seat == link.seat and other.peer and other.peer.incarnation != link.peer.incarnation:
                self.loop.forget(other)
        self._asks[link] = {}
        self._announced[link] = set()
        self._shelf.link_ready(link)

    def link_refused(self, link: Link) -> None:
        """A target that does not fit holds nothing."""
        self.link_gone(link)

    def link_gone(self, link: Link) -> None:
        """What the target had leased is ready again, and what it was interested in may expire."""
        now = time.monotonic()
        for ask in list(self._asks.get(link, ())):
            self._forget_ask(link, ask)
        self._asks.pop(link, None)
        for payload in self._announced.pop(link, ()):
            self._ledger.no_interest(payload, link, now)
        self._shelf.link_gone(link)
        self._ledger.lapse(link, link.life, now)
        self._set_alarm()

    def on_time(self, now: float) -> None:
        """Something may have expired."""
        self._ledger.expire(now)
        self.due_at = self._ledger.next_expiry

    def handle(self, link: Link, message: Any, extra: Any) -> None:
        """A target asks, takes back, acknowledges or returns."""
        if extra:
            raise RemoteProtocolError("a target may send messages only: no descriptors, no payload")
        if isinstance(message, Want):
            self._want(link, message)
        elif isinstance(message, Ack):
            self._acknowledge(link, message.lease, time.monotonic())
        elif isinstance(message, Return):
            self._ledger.give_back(message.lease, link, time.monotonic())
        elif isinstance(message, Unwant):
            self._forget_ask(link, message.ask)
        elif isinstance(message, Interest):
            self._note_interest(link, message)
        else:
            self._shelf.handle(link, message)
        self._set_alarm()

    def room_came_back(self) -> None:
        """Nothing; whoever waits for room tries again. For shelves that get room back later than it was given."""
        self._waiting_room.freed()
        self._settled.ring()

    def stopped(self, error: BaseException | None) -> None:
        """Nothing is offered any more; `drain` ends, and so does waiting for room."""
        # Closed first, so that what is still leased or written is given back to nobody who would overwrite it.
        self._shelf.close()
        self._ledger.clear(time.monotonic())
        self._waiting_room.look_again()
        self._settled.ring()

    def _admit(self, requests: Sequence[PutRequest], deadline: float, rooms: list[Room]) -> None:
        sizes = [wanted.nbytes for wanted in requests]
        try:
            self._waiting_room.admit(lambda: rooms.extend(self._shelf.take(sizes)), deadline, self._while_waiting)
        except TransportError as error:
            payload = requests[0].payload
            error.request_id, error.key, error.rank = payload.transfer_id, payload.encode(), payload.source_rank
            raise

    def _while_waiting(self) -> float:
        self._require_open()
        # What expires is freed by the loop's thread.
        return math.inf

    def _undo(self, tickets: Sequence[Ticket[Room]], rooms: Sequence[Room]) -> None:
        with self._lock:
            # A room that no life has yet is freed with its life.
            for ticket, room in zip(tickets, rooms, strict=False):
                self._ledger.furnish(ticket, room)
            for ticket in tickets:
                self._ledger.drop(ticket, time.monotonic())
            # Lives that never had room gave none back, and may be waited for.
            self._settled.ring()

    def _free(self, room: Room) -> None:
        self._shelf.give(room)
        self.room_came_back()

    def _num_held(self) -> int:
        return self._ledger.held + self._shelf.num_lingering

    def _set_alarm(self) -> None:
        due_at = self._ledger.next_expiry
        if due_at is not None and (self.due_at is None or due_at < self.due_at):
            self.due_at = due_at
            self.loop.wake_by(due_at)

    def _want(self, link: Link, want: Want) -> None:
        asks = self._asks[link]
        if want.ask in asks or len(asks) >= MAX_ASKS:
            raise RemoteProtocolError(f"ask {want.ask} is in flight already, or more than {MAX_ASKS} are")
        payload = self._payload_of(link, want)
        if self._answer(link, want.ask, payload):
            return
        if not want.patient:
            link.send(Absent(want.ask, self._ledger.others_ready(payload) if want.curious else ()))
            return
        asks[want.ask] = payload
        self._waiting.setdefault(payload, {})[link, want.ask] = None
        self._ledger.interest(payload, (link, want.ask), time.monotonic())
        room = self._ledger.room_being_written(payload)
        if room is not None:
            self._shelf.promise(link, want.ask, room, b"")

    def _acknowledge(self, link: Link, lease: int, now: float) -> None:
        if not self._ledger.acknowledge(lease, link, now):
            # Perhaps leased over an earlier connection, whose end the system may not have noticed yet.
            self.loop.forget_earlier(link)
            self._ledger.acknowledge(lease, link.life, now)

    def _note_interest(self, link: Link, said: Interest) -> None:
        announced, payload, now = self._announced[link], self._payload_of(link, said), time.monotonic()
        if not said.is_given:
            announced.discard(payload)
            self._ledger.no_interest(payload, link, now)
            return
        if len(announced) >= MAX_ASKS:
            # Only now, since an end takes interest back without looking for who had announced it.
            announced.intersection_update([one for one in announced if self._ledger.is_interested(one, link)])
        if len(announced) >= MAX_ASKS:
            raise RemoteProtocolError(f"more than {MAX_ASKS} payloads are announced; take some back")
        announced.add(payload)
        self._ledger.interest(payload, link, now)

    def _payload_of(self, link: Link, said: Want | Interest) -> PayloadId:
        assert link.seat is not None
        try:
            return PayloadId(
                edge=self._endpoint.edge,
                transfer_id=said.transfer_id,
                role=said.role,
                attempt=said.attempt,
                source_rank=self._endpoint.rank,
                target_rank=link.seat.rank,
            )
        except ConfigError as error:
            raise RemoteProtocolError(f"an ask for no payload: {error}") from error

    def _serve(self, payload: PayloadId) -> None:
        """Answer those who wait for `payload`, as far as they can be answered now."""
        for link, ask in list(self._waiting.get(payload, ())):
            if self._answer(link, ask, payload):
                self._forget_ask(link, ask)

    def _answer(self, link: Link, ask: int, payload: PayloadId) -> bool:
        assert link.seat is not None
        show = partial(self._show, link, ask)
        told = self._ledger.ask(payload, link.seat.reader, link, time.monotonic(), show)
        if isinstance(told, End):
            link.send(Over(ask, told.how, told.generation, told.cause))
        return told is not None

    def _show(self, link: Link, ask: int, grant: Grant[Room]) -> None:
        self._shelf.show(link, ask, grant.lease, grant.room)

    def _forget_ask(self, link: Link, ask: int) -> None:
        payload = self._asks[link].pop(ask, None)
        if payload is not None:
            waiting = self._waiting[payload]
            del waiting[link, ask]
            if not waiting:
                del self._waiting[payload]
            self._ledger.no_interest(payload, (link, ask), time.monotonic())
