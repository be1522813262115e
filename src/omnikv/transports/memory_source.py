"""The sending end of the in-process transport: its payloads are blocks of memory in a table."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from omnikv.core.keys import PayloadId
from omnikv.core.lease import End
from omnikv.errors import ConfigError, PutRejected, TransportError
from omnikv.transports.base import Endpoint, PutRequest, Slot
from omnikv.transports.ledger import Grant, Ledger, Ticket
from omnikv.transports.memory_exchange import Exchange, entering, leaving
from omnikv.transports.memory_target import MemoryTarget
from omnikv.transports.pairing import describe
from omnikv.transports.waiting_room import WaitingRoom

ALIGN_NBYTES = 64


class MemorySlot(Slot):
    """Room for one payload in this process's memory."""

    def __init__(self, source: MemorySource, ticket: Ticket[memoryview], block: memoryview) -> None:
        self._source = source
        self._ticket = ticket
        self._block = block

    @property
    def buffer(self) -> memoryview:
        """The writable bytes of the payload."""
        return self._block

    def publish(self) -> None:
        """Hand the payload over and wake whoever waits for it."""
        self._source.publish(self._ticket)

    def drop(self) -> None:
        """Give the room back unless the payload was published."""
        self._source.drop(self._ticket)


class MemorySource:
    """What one source rank offers. `ask` and what follows it are for targets, which call them with the lock.

    Raises:
        ConfigError: the rank is already served in this process.
    """

    def __init__(self, endpoint: Endpoint, pool_nbytes: int | None) -> None:
        self.endpoint = endpoint
        self._pool_nbytes = pool_nbytes
        self._used_nbytes = 0
        self._closed = False
        with entering(endpoint.edge) as exchange:
            self._exchange: Exchange = exchange
            self._ledger: Ledger[memoryview] = Ledger(
                "memory", ttl_s=endpoint.payload_ttl_s, free=self._free, look_again=self._ring
            )
            self._waiting_room = WaitingRoom("memory", exchange.lock)
            if endpoint.seat in exchange.sources:
                raise ConfigError(f"memory: {describe(endpoint)} is already open in this process; close it first")
            exchange.sources[endpoint.seat] = self
            for target in exchange.targets.values():
                target.met(self)
            exchange.changed.ring()

    def reserve_all(self, requests: Sequence[PutRequest], deadline: float) -> list[Slot]:
        """Room for all payloads or for none, waited for until `deadline`."""
        tickets: list[Ticket[memoryview]] = []
        with ExitStack() as on_failure:
            # Twice, since Ctrl-C may come while the first of them waits for the lock.
            for _ in range(2):
                on_failure.callback(self._drop_all, tickets)
            with self._exchange.lock:
                self._require_open()
                for wanted in requests:
                    readers = wanted.num_readers or self.endpoint.num_readers
                    tickets.append(self._ledger.reserve(wanted.payload, readers, time.monotonic()))
            allocate = partial(self._allocate_all, requests, tickets)
            slots = self._waiting_room.admit(allocate, deadline, self._while_waiting)
            on_failure.pop_all()
        return slots

    def publish(self, ticket: Ticket[memoryview]) -> None:
        """Nothing; for this source's slots."""
        with self._exchange.lock:
            self._require_open()
            self._ledger.publish(ticket, time.monotonic())

    def drop(self, ticket: Ticket[memoryview]) -> None:
        """Nothing; for this source's slots."""
        with self._exchange.lock:
            self._ledger.drop(ticket, time.monotonic())

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell who waits, and remember it for those who ask later."""
        with self._exchange.lock:
            self._require_open()
            self._ledger.fail(payload, cause, time.monotonic())

    def abort(self, payload: PayloadId, cause: str) -> None:
        """As `fail`, for a payload that nobody needs any more."""
        with self._exchange.lock:
            self._require_open()
            self._ledger.abort(payload, cause, time.monotonic())

    def drain(self, deadline: float) -> int:
        """How many published payloads still have their room once none has, or `deadline` passes."""
        self._wait_for(lambda: self._ledger.held == 0, deadline)
        with self._exchange.lock:
            return self._ledger.held

    def wait_until_free(self, payload: PayloadId, deadline: float) -> bool:
        """Whether the payload has ended and nobody writes or reads it, once that is so or `deadline` passes."""
        return self._wait_for(lambda: not self._ledger.holds(payload), deadline)

    def census(self) -> dict[str, int]:
        """How many payloads stand where, and how many lives have ended in which way."""
        with self._exchange.lock:
            self._expire()
            return self._ledger.census()

    def close(self) -> None:
        """Leave the exchange; payloads that are not acknowledged are lost. Idempotent."""
        with leaving(self._exchange):
            if self._closed:
                return
            self._closed = True
            now = time.monotonic()
            del self._exchange.sources[self.endpoint.seat]
            self._ledger.clear(now)
            for target in self._exchange.targets.values():
                target.lost(self.endpoint.seat, now)
            self._exchange.changed.ring()
            self._waiting_room.look_again()

    def ask(
        self, payload: PayloadId, target: MemoryTarget, show: Callable[[Grant[memoryview]], None]
    ) -> Grant[memoryview] | End | None:
        """A lease for `target`, shown before it is entered; or how the payload's life ended, or None: not yet."""
        return self._ledger.ask(payload, target.endpoint.reader, target, time.monotonic(), show)

    def others_ready(self, payload: PayloadId) -> tuple[str, ...]:
        """The transfer ids that are ready for the same target, most alike first."""
        return self._ledger.others_ready(payload)

    def interest(self, payload: PayloadId, who: object) -> None:
        """Nothing; `who` waits for the payload, or has announced that it will come."""
        self._ledger.interest(payload, who, time.monotonic())

    def no_interest(self, payload: PayloadId, who: object) -> None:
        """Nothing; not any more."""
        self._ledger.no_interest(payload, who, time.monotonic())
        self._look_at_expiry()

    def end_lease(self, lease: int, holder: MemoryTarget, *, used: bool) -> None:
        """Nothing; the payload was used, or goes back."""
        end = self._ledger.acknowledge if used else self._ledger.give_back
        end(lease, holder, time.monotonic())
        self._exchange.changed.ring()

    def leave(self, target: MemoryTarget) -> None:
        """Nothing; everything that `target` had leased goes back."""
        self._ledger.leave(target, time.monotonic())

    def _ring(self, _payload: PayloadId) -> None:
        self._exchange.changed.ring()
        self._look_at_expiry()

    def _look_at_expiry(self) -> None:
        """Nothing; whoever waits for room learns when the next payload expires, since no thread here looks for it."""
        if self._ledger.next_expiry is not None:
            self._waiting_room.look_again()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"memory: {describe(self.endpoint)} is closed", transport="memory")

    def _while_waiting(self) -> float:
        self._require_open()
        return self._expire()

    def _wait_for(self, is_so: Callable[[], bool], deadline: float) -> bool:
        """Whether it is so by `deadline`; what expires meanwhile is seen to."""
        while True:
            with self._exchange.lock:
                until = min(deadline, self._expire())
            if self._exchange.changed.wait_for(lambda: is_so() or None, until):
                return True
            if time.monotonic() >= deadline:
                with self._exchange.lock:
                    self._expire()
                    return is_so()

    def _expire(self) -> float:
        """When the next payload expires; those that are due have, by then."""
        self._ledger.expire(time.monotonic())
        due_at = self._ledger.next_expiry
        return math.inf if due_at is None else due_at

    def _drop_all(self, tickets: Sequence[Ticket[memoryview]]) -> None:
        for ticket in tickets:
            self.drop(ticket)

    def _allocate_all(self, requests: Sequence[PutRequest], tickets: Sequence[Ticket[memoryview]]) -> list[Slot]:
        nbytes = sum(wanted.nbytes for wanted in requests)
        with self._exchange.lock:
            self._require_open()
            limit = self._pool_nbytes
            if limit is not None and self._used_nbytes + nbytes > limit:
                why = f"{self._used_nbytes} of pool_nbytes={limit} are in use"
                raise _no_room(requests[0].payload, nbytes, why, retryable=nbytes <= limit)
            try:
                blocks = [_aligned_block(wanted.nbytes) for wanted in requests]
            except MemoryError as error:
                why = "the system gives no more memory"
                raise _no_room(requests[0].payload, nbytes, why, retryable=True) from error
            for ticket, block in zip(tickets, blocks, strict=True):
                if self._ledger.furnish(ticket, block):
                    self._used_nbytes += block.nbytes
        return [MemorySlot(self, ticket, block) for ticket, block in zip(tickets, blocks, strict=True)]

    def _free(self, block: memoryview) -> None:
        self._used_nbytes -= block.nbytes
        self._waiting_room.freed()


def _aligned_block(nbytes: int) -> memoryview:
    raw = bytearray(nbytes + ALIGN_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    start = -address % ALIGN_NBYTES
    return memoryview(raw)[start : start + nbytes]


def _no_room(payload: PayloadId, nbytes: int, why: str, *, retryable: bool) -> PutRejected:
    return PutRejected(
        f"memory: no room for {nbytes} bytes: {why}; wait for acknowledgements or raise pool_nbytes",
        retryable=retryable,
        transport="memory",
        request_id=payload.transfer_id,
        key=payload.encode(),
        rank=payload.source_rank,
    )
