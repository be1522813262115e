"""The sending end of a shm transport: its payloads, who asked for which, and what they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from omnikv.core.keys import PayloadId
from omnikv.core.messages import (
    Absent,
    Ack,
    Failed,
    Ready,
    Retired,
    Return,
    Segment,
    ToSource,
    Unwant,
    Want,
)
from omnikv.errors import ConfigError, RemoteProtocolError, TransportError
from omnikv.transports.base import Endpoint, Slot
from omnikv.transports.bell import Bell
from omnikv.transports.ledger import Entry, Ledger, PayloadState
from omnikv.transports.shm_link import Link
from omnikv.transports.shm_loop import LinkLoop
from omnikv.transports.shm_pool import Pool, Room

# How many asks of one peer are remembered; a peer that has more in flight breaks the protocol.
MAX_ASKS = 4096


class ShmSlot(Slot):
    """Room in the sender's pool, on whole pages."""

    def __init__(self, source: ShmSource, entry: Entry[Room], view: memoryview) -> None:
        self._source = source
        self._entry = entry
        self._view = view

    @property
    def buffer(self) -> memoryview:
        """The writable bytes of the payload."""
        return self._view

    def publish(self) -> None:
        """Make the payload readable and tell a receiver that waits for it."""
        self._source.publish(self._entry)

    def drop(self) -> None:
        """Give the room back unless the payload was published."""
        self._source.drop(self._entry)


class ShmSource:
    """What one source rank offers. Methods named like the transport's take the lock; the rest is called with it."""

    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToSource)

    def __init__(self, endpoint: Endpoint, pool: Pool, lock: threading.Lock, require_open: Callable[[], None]) -> None:
        self.loop: LinkLoop
        self._endpoint = endpoint
        self._pool = pool
        self._lock = lock
        self._require_open = require_open
        self._settled = Bell(lock)
        self._ledger: Ledger[Room] = Ledger("shm", pool.give)
        # Who waits for a payload, first come first served; and by link and ask, for asks that are taken back.
        self._waiting: dict[PayloadId, dict[tuple[Link, int], None]] = {}
        self._asks: dict[Link, dict[int, PayloadId]] = {}
        self._told: dict[Link, set[int]] = {}

    def reserve(self, payload: PayloadId, nbytes: int) -> ShmSlot:
        """Room for a payload; the pool may grow outside the lock."""
        with self._lock:
            self._require_open()
            entry = self._ledger.reserve(payload, nbytes)
        with ExitStack() as on_failure:
            # Growing takes long enough to be interrupted; the identity must be free again whatever ends it.
            on_failure.callback(self.drop, entry)
            try:
                room = self._pool.take(nbytes)
            except TransportError as error:
                error.request_id, error.key, error.rank = payload.transfer_id, payload.encode(), payload.source_rank
                raise
            on_failure.pop_all()
        with self._lock:
            self._tell_retired()
            if entry.state is PayloadState.GONE:
                raise TransportError(f"shm: closed while room for {payload.encode()} was found", transport="shm")
            entry.room = room
        return ShmSlot(self, entry, room.view)

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
            if other.rank == link.rank and other.peer and other.peer.incarnation != link.peer.incarnation:
                self.loop.forget(other)
        self._asks[link] = {}
        self._told[link] = set()

    def link_refused(self, link: Link) -> None:
        """A target that does not fit holds nothing."""
        self.link_gone(link)

    def link_gone(self, link: Link) -> None:
        """What the target had leased is ready again."""
        for ask in list(self._asks.get(link, ())):
            self._forget_ask(link, ask)
        self._asks.pop(link, None)
        self._told.pop(link, None)
        for payload in self._ledger.leave(link):
            self._serve(payload)
        self._settled.ring()

    def handle(self, link: Link, message: Any, fds: list[int]) -> None:
        """A target asks, takes back, acknowledges or returns."""
        if fds:
            raise RemoteProtocolError("a target may not send descriptors")
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
        self._pool.close()
        self._settled.ring()

    def _want(self, link: Link, want: Want) -> None:
        asks = self._asks[link]
        if want.ask in asks or len(asks) >= MAX_ASKS:
            raise RemoteProtocolError(f"ask {want.ask} is in flight already, or more than {MAX_ASKS} are")
        assert link.rank is not None
        try:
            payload = PayloadId(
                edge=self._endpoint.edge,
                transfer_id=want.transfer_id,
                role=want.role,
                attempt=want.attempt,
                source_rank=self._endpoint.rank,
                target_rank=link.rank,
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
            self._share(link, entry.room)
            link.send(Ready(ask, entry.lease, entry.room.segment.number, entry.room.offset, entry.nbytes))

    def _share(self, link: Link, room: Room) -> None:
        segment = room.segment
        if segment.number not in self._told[link]:
            self._told[link].add(segment.number)
            link.send(Segment(segment.number, segment.nbytes), segment.fd)

    def _tell_retired(self) -> None:
        for number in self._pool.pop_retired():
            for link, told in self._told.items():
                if number in told:
                    told.remove(number)
                    link.send(Retired(number))

    def _forget_ask(self, link: Link, ask: int) -> None:
        payload = self._asks[link].pop(ask, None)
        if payload is not None:
            waiting = self._waiting[payload]
            del waiting[link, ask]
            if not waiting:
                del self._waiting[payload]
