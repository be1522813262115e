"""The receiving end of a shm transport: what it asked for, the memory it sees, and the leases it holds."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from omnikv.core.keys import PayloadId
from omnikv.core.messages import Absent, Ack, Failed, Ready, Retired, Return, Segment, ToTarget, Unwant, Want
from omnikv.errors import (
    ConnectError,
    LocalProtocolError,
    OmniKVError,
    ProducerFailed,
    RemoteProtocolError,
    TransportError,
)
from omnikv.transports.base import Endpoint, Lease
from omnikv.transports.bell import Bell
from omnikv.transports.ledger import producer_failed
from omnikv.transports.pairing import describe
from omnikv.transports.shm_address import is_sealed
from omnikv.transports.shm_door import Knock
from omnikv.transports.shm_link import Link
from omnikv.transports.shm_loop import LinkLoop
from omnikv.transports.shm_pool import MAX_SEGMENTS

# How long an ask whose deadline has passed already may take to be answered by a source that is there.
ANSWER_S = 1.0


class ShmLease(Lease):
    """A payload in the sender's pool, read in place. Its bytes outlive the sender as long as a view of them does."""

    def __init__(self, target: ShmTarget, link: Link, number: int, view: memoryview) -> None:
        self._target = target
        self._link = link
        self.number = number
        # Never released by hand: tensors made from it keep it, and with it the mapping, alive.
        self._view: memoryview | None = view

    @property
    def buffer(self) -> memoryview:
        """The payload's bytes, valid until acknowledged or released, never to be written.

        Raises:
            LocalProtocolError: it was acknowledged or released.
        """
        if self._view is None:
            raise LocalProtocolError("shm: this lease has ended, its bytes are the sender's again; get it once more")
        return self._view

    def acknowledge(self) -> None:
        """End the payload's life."""
        if self._view is not None:
            self._view = None
            self._target.end_lease(self._link, Ack(self.number))

    def release(self) -> None:
        """Give the payload back unread."""
        if self._view is not None:
            self._view = None
            self._target.end_lease(self._link, Return(self.number))


class _Ask:
    """One payload that is waited for: over which link it was asked for, and what came of it."""

    def __init__(self, number: int, payload: PayloadId, is_patient: bool, changed: Bell) -> None:
        self.number = number
        self.payload = payload
        self.is_patient = is_patient
        self.changed = changed
        self.link: Link | None = None
        self.lease: ShmLease | None = None
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
        self, *, lease: ShmLease | None = None, error: OmniKVError | None = None, is_absent: bool = False
    ) -> None:
        """Nothing; wakes the waiting thread with its answer."""
        self.lease, self.error, self.is_absent = lease, error, is_absent
        self.changed.ring()


class ShmTarget:
    """What one target rank asks for. `get_as_ready` and `end_lease` take the lock; the rest is called with it."""

    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToTarget)

    def __init__(self, endpoint: Endpoint, lock: threading.Lock, require_open: Callable[[], None]) -> None:
        self.loop: LinkLoop
        self._endpoint = endpoint
        self._lock = lock
        self._require_open = require_open
        self._sources: dict[int, Link] = {}
        self._refused: dict[int, Link] = {}
        self._segments: dict[Link, dict[int, memoryview]] = {}
        self._asks: dict[int, _Ask] = {}
        self._next_ask = 1

    def get_as_ready(
        self, payloads: Sequence[PayloadId], deadline: float
    ) -> Generator[tuple[PayloadId, ShmLease | OmniKVError], None, None]:
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

    def end_lease(self, link: Link, message: Ack | Return) -> None:
        """Tell the source; when it is gone, it knows already."""
        with self._lock:
            link.send(message)

    def link_ready(self, link: Link) -> None:
        """A source is there. The first link of one life of a source is used, later ones are closed."""
        assert link.rank is not None
        assert link.peer is not None
        current = self._sources.get(link.rank)
        if current is not None and current.peer is not None:
            if current.peer.incarnation == link.peer.incarnation:
                self.loop.forget(link)
                return
            self.loop.forget(current)
        self._sources[link.rank] = link
        self._segments[link] = {}
        for ask in self._asks_of(link.rank):
            if ask.link is None:
                self._send(link, ask)

    def link_refused(self, link: Link) -> None:
        """A source that does not fit: whoever waits for it is told."""
        if link.rank is None:
            return
        self._drop(link)
        self._refused[link.rank] = link
        for ask in self._asks_of(link.rank):
            ask.settle(error=self._refusal(link, ask.payload))

    def link_gone(self, link: Link) -> None:
        """A source died or closed: whoever had asked it is told at once."""
        if link.rank is None:
            return
        self._drop(link)
        for ask in self._asks_of(link.rank):
            if ask.link is link:
                ask.settle(error=self._refusal(link, ask.payload) if link.refusal else self._lost(link, ask.payload))
            elif ask.link is None and not ask.is_patient and not self.loop.is_greeting(link.rank):
                ask.settle(is_absent=True)

    def handle(self, link: Link, message: Any, fds: list[int]) -> None:
        """A source shares memory or answers an ask."""
        if bool(fds) != isinstance(message, Segment):
            raise RemoteProtocolError("a descriptor belongs to a Segment and to nothing else")
        if isinstance(message, Segment):
            self._map(link, message, fds)
        elif isinstance(message, Retired):
            self._segments[link].pop(message.segment, None)
        elif isinstance(message, Ready):
            self._take(link, message)
        elif isinstance(message, Failed | Absent):
            ask = self._asks.get(message.ask)
            if ask is not None and ask.link is link and not ask.is_settled:
                if isinstance(message, Absent):
                    ask.settle(is_absent=True)
                else:
                    ask.settle(error=producer_failed(ask.payload, message.cause))

    def stopped(self, error: BaseException | None) -> None:
        """Wake whoever waits: this end is closed."""
        for ask in self._asks.values():
            if not ask.is_settled:
                closed = TransportError(f"shm: {describe(self._endpoint)} closed during a get", transport="shm")
                closed.__cause__ = error
                ask.settle(error=closed)

    def _open(self, payload: PayloadId, is_patient: bool, changed: Bell) -> _Ask:
        ask = _Ask(self._next_ask, payload, is_patient, changed)
        self._next_ask += 1
        self._asks[ask.number] = ask
        return ask

    def _pursue(self, ask: _Ask) -> None:
        """Nothing; the ask was sent, or its source was knocked on, or it is settled."""
        rank = ask.payload.source_rank
        link, refused = self._sources.get(rank), self._refused.get(rank)
        if refused is not None:
            ask.settle(error=self._refusal(refused, ask.payload))
            return
        if link is not None:
            self._send(link, ask)
        try:
            if ask.link is None and self.loop.knock(rank) is not Knock.ANSWERED and not ask.is_patient:
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
            ask.link.send(Return(ask.lease.number))

    def _take(self, link: Link, ready: Ready) -> None:
        segment = self._segments[link].get(ready.segment)
        if segment is None or ready.offset + ready.nbytes > segment.nbytes:
            raise RemoteProtocolError(f"a payload outside of shared memory: {ready}")
        ask = self._asks.get(ready.ask)
        if ask is None or ask.link is not link or ask.is_settled:
            link.send(Return(ready.lease))
            return
        view = segment[ready.offset : ready.offset + ready.nbytes]
        ask.settle(lease=ShmLease(self, link, ready.lease, view))

    def _map(self, link: Link, shared: Segment, fds: list[int]) -> None:
        segments = self._segments[link]
        if len(fds) != 1 or shared.segment in segments or len(segments) >= MAX_SEGMENTS:
            raise RemoteProtocolError(
                f"segment {shared.segment} comes with {len(fds)} descriptors, or again, or after {MAX_SEGMENTS} others"
            )
        if not is_sealed(fds[0], shared.nbytes):
            raise RemoteProtocolError(f"segment {shared.segment} is no sealed memory of {shared.nbytes} bytes")
        try:
            # Writable, because tensors cannot be made on read-only memory without a warning; nobody writes to it.
            segments[shared.segment] = memoryview(mmap.mmap(fds[0], shared.nbytes))
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(
                f"segment {shared.segment} of {shared.nbytes} bytes cannot be mapped: {error}"
            ) from error

    def _drop(self, link: Link) -> None:
        assert link.rank is not None
        if self._sources.get(link.rank) is link:
            del self._sources[link.rank]
        if self._refused.get(link.rank) is link:
            del self._refused[link.rank]
        self._segments.pop(link, None)

    def _asks_of(self, rank: int) -> list[_Ask]:
        return [ask for ask in self._asks.values() if ask.payload.source_rank == rank and not ask.is_settled]

    def _refusal(self, link: Link, payload: PayloadId) -> ConnectError:
        return ConnectError(
            f"shm: source rank {link.rank} and {describe(self._endpoint)} do not fit: {link.refusal}",
            transport="shm",
            request_id=payload.transfer_id,
            key=payload.encode(),
            rank=link.rank,
        )

    def _lost(self, link: Link, payload: PayloadId) -> ProducerFailed:
        return ProducerFailed(
            f"shm: source rank {link.rank} (pid {link.credentials.pid}) closed its connection before "
            f"{payload.encode()} came",
            request_id=payload.transfer_id,
            key=payload.encode(),
            rank=link.rank,
        )
