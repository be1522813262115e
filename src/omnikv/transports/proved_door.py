"""How connections over TCP come up: a source listens, a target calls and calls again.

A target keeps one control link to each of its sources. Where there is none, because the source is not there yet or not
any more, it calls again after a wait that grows (`retry`), for as long as it is open, and at once when somebody asks
for a payload. Over each control link it opens lanes for payloads, bound to this life of the source.

A connection that is not proved in time is ended, whatever it does meanwhile: who sends a byte a second is no better
than who sends none. All of it happens under the transport's lock.
"""

from __future__ import annotations

import heapq
import os
import random
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from omnikv.core.authentication import Claim
from omnikv.errors import ConfigError, ConnectError
from omnikv.transports.base import Endpoint, Seat
from omnikv.transports.links import Door, Knock, Link
from omnikv.transports.proved_address import Address, PeerBook, is_loopback
from omnikv.transports.proved_greeting import Greeting, Identity
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.proved_stream import Stream, notice_death
from omnikv.transports.retry import BackOff
from omnikv.transports.shared_secret import SECRET_VARIABLE

ACCEPT_RETRY_S = 0.05
ACCEPTED_A_TURN = 64
# Connections that may be in the middle of their greeting; beyond, the oldest is ended.
MAX_GREETING = 1024


class LaneCall(NamedTuple):
    """A lane that a target opens beside the control link `link`, as its lane `number`."""

    link: ProvedLink
    number: int


class LaneOwner(Protocol):
    """What the door tells its transport; all of it with the lock. `name` is the transport's."""

    name: ClassVar[str]

    def forget(self, link: Link) -> None:
        """This link took too long."""

    def lane_up(self, stream: Stream, peer: Claim, call: LaneCall | None) -> None:
        """A lane is proved: one that `call` was made for, or one that a target opened."""

    def let_go_of_lanes(self) -> None:
        """This is a forked child: its copies of the lanes are to be closed."""


class ProvedDoor(Door):
    """The listener of a source, or the calls of a target, and the greetings of both. `transport` takes the lanes.

    `from_peer` is the union of the messages that a peer may send.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        listener: socket.socket | None,
        peers: PeerBook,
        *,
        greeting_s: float,
        dead_after_s: float,
        from_peer: Any,
        adopt: Callable[[socket.socket, Seat | None], None],
        count: Callable[[str, str], None],
        wake: Callable[[], None],
        transport: LaneOwner,
    ) -> None:
        self._pid = os.getpid()
        self._transport = transport
        self._endpoint = endpoint
        self._identity = identity
        self._listener = listener
        self._peers = peers
        self._greeting_s = greeting_s
        self._dead_after_s = dead_after_s
        self._decoder = msgspec.msgpack.Decoder(from_peer)
        self._adopt, self._count, self._wake = adopt, count, wake
        # What is done at a set time: when, in which order among equals, and what.
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self._calls: dict[socket.socket, tuple[Address, LaneCall | None]] = {}
        self._links: dict[Seat, ProvedLink] = {}
        # In the order in which they must be proved.
        self._greetings: dict[ProvedLink, float] = {}
        self._back_offs: dict[Seat, BackOff] = {}
        self._to_call_again: set[Seat] = set()
        self._lane_back_offs: dict[LaneCall, BackOff] = {}
        self._fault: BaseException | None = None
        self._is_closed = False

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Nothing; `selector` reports `accept` when somebody calls."""
        self._selector = selector
        if self._listener is not None:
            selector.register(self._listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """Nothing; takes those who call, for as long as they prove themselves in time."""
        assert self._listener is not None
        for _ in range(ACCEPTED_A_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self._count("accept_failed", f"cannot accept a connection ({error.strerror}); trying again")
                self._selector.unregister(self._listener)
                self._at(ACCEPT_RETRY_S, self._listen_again)
                return
            self._adopt(connection, None)

    def knock(self, seat: Seat) -> Knock:
        """What came of calling the source at `seat`; whether it answers is known later.

        Raises:
            ConnectError: nobody has said where it listens, or what was said is no address.
        """
        if self._listener is not None:
            # A source is called and calls nobody.
            return Knock.NOBODY
        if seat in self._links:
            return Knock.ANSWERED
        return self._call(seat, None)

    def call_lane(self, call: LaneCall) -> None:
        """Nothing; opens a lane, and tries again while its control link is there."""
        if call.link.is_ready and not call.link.is_over and not self._is_closed:
            assert call.link.seat is not None
            self._call(call.link.seat, call)
        else:
            self._lane_back_offs.pop(call, None)

    def call_lane_again(self, call: LaneCall) -> None:
        """Nothing; as `call_lane`, after a wait, since it failed or broke."""
        self._lane_back_offs[call], wait_s = self._lane_back_offs.get(call, BackOff()).failed(random.random())
        self._at(wait_s, lambda: self.call_lane(call))

    def open_link(self, connection: socket.socket, seat: Seat | None, watch: Callable[[Link], None]) -> ProvedLink:
        """The link over a connection that was accepted, or made by `_call`."""
        address, lane_call = self._calls.pop(connection, (None, None))
        claim = None if address is None else self._claim_for(lane_call)
        notice_death(connection, self._dead_after_s)
        link = ProvedLink(
            Greeting(connection, self._identity, claim, "" if address is None else address.host),
            seat,
            side=self._endpoint.side,
            decoder=self._decoder,
            address=address or _address_of(connection),
            watch=watch,
            count=self._count,
            lane=lambda stream, peer: self._lane_proved(stream, peer, lane_call),
            ended=lambda link: self._link_ended(link, lane_call),
        )
        if seat is not None:
            self._links[seat] = link
        self._greetings[link] = time.monotonic() + self._greeting_s
        self._be_awake_at(self._greetings[link])
        return link

    def retry_if_due(self) -> None:
        """Nothing; does what is due.

        Raises:
            BaseException: what another thread of the transport died of, so that this one ends as well.
        """
        if self._fault is not None:
            raise self._fault
        if self.retry_at is None or time.monotonic() < self.retry_at:
            return
        self._end_slow_greetings()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()
        times = [at for at, _, _ in self._agenda[:1]] + [*self._greetings.values()][:1]
        self.retry_at = min(times, default=None)

    def break_down(self, fault: BaseException) -> None:
        """Nothing; the transport's thread ends by `fault`. Call with the lock."""
        self._fault = fault
        self.retry_at = 0.0
        self._wake()

    def close(self) -> None:
        """Nothing; nobody is let in or called any more."""
        self._is_closed = True
        self._agenda.clear()
        if self._listener is not None:
            self._listener.close()
        if os.getpid() != self._pid:
            self._transport.let_go_of_lanes()

    def _call(self, seat: Seat, lane: LaneCall | None) -> Knock:
        try:
            address = self._peers.find(seat.rank) if lane is None else lane.link.address
        except ConfigError as error:
            raise ConnectError(str(error), transport=self._transport.name, rank=seat.rank) from error
        if address is None:
            self._call_again(seat)
            return Knock.NOBODY
        if self._identity.is_users_own and not is_loopback(address.host):
            raise ConnectError(
                f"{self._transport.name}: {address} of source {seat} is on another host, and nothing tells who may "
                f"connect: set {SECRET_VARIABLE} (or secret_file=, secret=) to one secret at all ranks, or give tls=",
                transport=self._transport.name,
                endpoint=str(address),
                rank=seat.rank,
            )
        try:
            family, place = self._peers.resolve(address)
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            self._count("call_failed", f"cannot call {address} ({error.strerror or error}); trying again")
            self._failed(seat, lane)
            return Knock.BUSY
        try:
            connection.connect(place)
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            self._failed(seat, lane)
            return Knock.NOBODY
        self._calls[connection] = (address, lane)
        self._adopt(connection, seat if lane is None else None)
        return Knock.ANSWERED

    def _claim_for(self, lane: LaneCall | None) -> Claim:
        if lane is None:
            return self._identity.claim
        assert lane.link.claim is not None
        return replace(self._identity.claim, purpose="data", peer_life=lane.link.claim.life)

    def _failed(self, seat: Seat, lane: LaneCall | None) -> None:
        if lane is None:
            self._call_again(seat)
        else:
            self.call_lane_again(lane)

    def _call_again(self, seat: Seat) -> None:
        if seat not in self._to_call_again and not self._is_closed:
            self._back_offs[seat], wait_s = self._back_offs.get(seat, BackOff()).failed(random.random())
            self._at(wait_s, lambda: self._redial(seat))
            self._to_call_again.add(seat)

    def _redial(self, seat: Seat) -> None:
        self._to_call_again.discard(seat)
        if seat not in self._links:
            # What is wrong with an address is said to whoever asks for a payload.
            with suppress(ConnectError):
                self._call(seat, None)

    def _lane_proved(self, stream: Stream, peer: Claim, call: LaneCall | None) -> None:
        if self._is_closed:
            stream.close()
            return
        if call is not None:
            self._lane_back_offs.pop(call, None)
        self._transport.lane_up(stream, peer, call)

    def _link_ended(self, link: ProvedLink, lane: LaneCall | None) -> None:
        self._greetings.pop(link, None)
        if link.is_lane:
            return
        if lane is not None:
            self.call_lane_again(lane)
        elif link.seat is not None and self._links.get(link.seat) is link:
            if link.claim is not None and link.refusal is None:
                self._back_offs.pop(link.seat, None)
            # First, so that where Ctrl-C comes in between, closing the link anew does it.
            self._call_again(link.seat)
            del self._links[link.seat]

    def _end_slow_greetings(self) -> None:
        now = time.monotonic()
        for link, due_at in list(self._greetings.items()):
            if due_at > now:
                return
            del self._greetings[link]
            if not link.is_ready and link.refusal is None:
                self._count("slow_greetings", f"{link.address} did not prove itself within {self._greeting_s} s: ended")
                self._transport.forget(link)

    def _listen_again(self) -> None:
        assert self._listener is not None
        if self._listener.fileno() not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self.accept)

    def _at(self, wait_s: float, what: Callable[[], None]) -> None:
        at = time.monotonic() + wait_s
        self._entries += 1
        heapq.heappush(self._agenda, (at, self._entries, what))
        self._be_awake_at(at)

    def _be_awake_at(self, at: float) -> None:
        if self.retry_at is None or at < self.retry_at:
            # In this order, so that where Ctrl-C comes in between, the next call wakes the thread.
            self._wake()
            self.retry_at = at


def _address_of(connection: socket.socket) -> Address:
    try:
        return Address(*connection.getpeername()[:2])
    except OSError:
        return Address("a peer that went away", 0)
