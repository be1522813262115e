"""The transport within one process: threads hand payloads over through memory that they share anyway.

Theory of operation. All endpoints of one edge meet in one exchange, a table of the open sources and targets under one
lock. A payload is a block of memory in its source's ledger; a lease is a view of that same block, so
nothing is copied. Every change (a publication, a failure, an acknowledgement, an endpoint that opens or closes) wakes
the waiting threads, which look again: nothing polls. This is the reference that the conformance suite is written
against, and the transport of tests and of stages that live in one process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import (
    ConfigError,
    ConnectError,
    LocalProtocolError,
    OmniKVError,
    ProducerFailed,
    PutRejected,
    TransportError,
)
from omnikv.transports.base import Capabilities, Endpoint, Lease, Slot, Transport
from omnikv.transports.bell import Bell
from omnikv.transports.ledger import Entry, Ledger
from omnikv.transports.pairing import describe, fact_differences, require_payload, require_size

ALIGN_NBYTES = 64


class _Exchange:
    """Where the endpoints of one edge meet; `lock` guards everything in it, ledgers included."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = Bell(self.lock)
        self.endpoints: dict[tuple[str, int], MemoryTransport] = {}


_exchanges: dict[Edge, _Exchange] = {}
_exchanges_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """A child shares no memory with its parent's endpoints, and may find the lock held by a thread that it has not."""
    global _exchanges_lock
    _exchanges_lock = threading.Lock()
    _exchanges.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _aligned_block(nbytes: int) -> memoryview:
    raw = bytearray(nbytes + ALIGN_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    start = -address % ALIGN_NBYTES
    return memoryview(raw)[start : start + nbytes]


class MemorySlot(Slot):
    """Room for one payload in this process's memory."""

    def __init__(self, source: MemoryTransport, entry: Entry[memoryview], block: memoryview) -> None:
        self._source = source
        self._entry = entry
        self._block = block

    @property
    def buffer(self) -> memoryview:
        """The writable bytes of the payload."""
        return self._block

    def publish(self) -> None:
        """Hand the payload over and wake whoever waits for it."""
        self._source.publish(self._entry)

    def drop(self) -> None:
        """Give the room back unless the payload was published."""
        self._source.drop(self._entry)


class MemoryLease(Lease):
    """The slot's own memory, to be read."""

    def __init__(self, target: MemoryTransport, source: MemoryTransport, entry: Entry[memoryview]) -> None:
        assert entry.room is not None
        self._target = target
        self._source = source
        self._number = entry.lease
        self._block: memoryview | None = entry.room

    @property
    def buffer(self) -> memoryview:
        """The payload's bytes, valid until acknowledged or released.

        Raises:
            LocalProtocolError: it was acknowledged or released.
        """
        if self._block is None:
            raise LocalProtocolError("memory: this lease has ended, its bytes are the sender's again; get it once more")
        return self._block

    def acknowledge(self) -> None:
        """End the payload's life."""
        if self._block is not None:
            self._block = None
            self._source.end_lease(self._number, self._target, used=True)

    def release(self) -> None:
        """Give the payload back unread."""
        if self._block is not None:
            self._block = None
            self._source.end_lease(self._number, self._target, used=False)


class MemoryTransport(Transport):
    """Moves payloads between threads of one process.

    `pool_nbytes` bounds what a source holds at once; None means no bound.

    Raises:
        ConfigError: the rank is already served in this process, or `pool_nbytes` is negative.
    """

    name: ClassVar[str] = "memory"
    capabilities: ClassVar[Capabilities] = Capabilities(
        cross_process=False, cross_host=False, shared_memory=True, notices_peer_death=True
    )

    def __init__(self, endpoint: Endpoint, *, pool_nbytes: int | None = None) -> None:
        if pool_nbytes is not None:
            require_size(self.name, "pool_nbytes", pool_nbytes, at_least=0)
        self._endpoint = endpoint
        self._pool_nbytes = pool_nbytes
        self._used_nbytes = 0
        self._closed = False
        self._ledger: Ledger[memoryview] = Ledger(self.name, self._free)
        with _exchanges_lock:
            self._exchange = _exchanges.setdefault(endpoint.edge, _Exchange())
            with self._exchange.lock:
                place = (endpoint.side, endpoint.rank)
                if place in self._exchange.endpoints:
                    raise ConfigError(f"memory: {describe(endpoint)} is already open in this process; close it first")
                self._exchange.endpoints[place] = self
                self._exchange.changed.ring()

    def reserve(self, payload: PayloadId, nbytes: int) -> MemorySlot:
        """Room for a payload of `nbytes`, to be written in place and published.

        Raises:
            PutRejected: no room, or `payload` is already live here.
            ConfigError: the payload is not this source's, or `nbytes` is negative.
            TransportError: this transport is closed.
        """
        require_payload(self.name, self._endpoint, payload, "source")
        require_size(self.name, "a payload's size", nbytes, at_least=0)
        with self._exchange.lock:
            self._require_open()
            entry = self._ledger.reserve(payload, nbytes)
            with ExitStack() as on_failure:
                on_failure.callback(self._ledger.drop, entry)
                block = self._allocate(payload, nbytes)
                on_failure.pop_all()
            entry.room = block
            self._used_nbytes += nbytes
            return MemorySlot(self, entry, block)

    def get(self, payload: PayloadId, *, deadline: float) -> MemoryLease | None:
        """A lease on the payload as soon as it is ready, or None when it is still absent at `deadline`.

        Raises:
            ProducerFailed: the sender failed it, or closed while this call waited.
            ConnectError: the source states other facts, or does not deal with this target.
            ConfigError: the payload is not this target's.
            TransportError: this transport is closed.
        """
        _, outcome = next(self.get_as_ready([payload], deadline=deadline), (payload, None))
        if isinstance(outcome, OmniKVError):
            raise outcome
        return outcome

    def get_as_ready(
        self, payloads: Sequence[PayloadId], *, deadline: float
    ) -> Generator[tuple[PayloadId, MemoryLease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not.

        Raises:
            ConfigError: a payload is not this target's.
            TransportError: this transport is closed.
        """
        for payload in payloads:
            require_payload(self.name, self._endpoint, payload, "target")
        waiting: dict[PayloadId, MemoryTransport | None] = dict.fromkeys(payloads)
        leased: list[MemoryLease] = []
        try:
            while waiting:
                known = self._exchange.changed.wait_for(partial(self._known, waiting, leased), deadline)
                if known is None:
                    return
                del waiting[known[0]]
                # The last thing before it is handed on: until then an interruption gives it back.
                leased = []
                yield known
        finally:
            for lease in leased:
                lease.release()

    def _known(
        self, waiting: dict[PayloadId, MemoryTransport | None], leased: list[MemoryLease]
    ) -> tuple[PayloadId, MemoryLease | OmniKVError] | None:
        """The first of the payloads that something is known of; `waiting` maps each to the source that was asked.

        A lease stands in `leased` too, before this returns.
        """
        self._require_open()
        for payload, asked in waiting.items():
            source = self._exchange.endpoints.get(("source", payload.source_rank))
            if asked is not None and source is not asked:
                return payload, ProducerFailed(
                    f"memory: source rank {payload.source_rank} closed before {payload.encode()} came",
                    request_id=payload.transfer_id,
                    key=payload.encode(),
                    rank=payload.source_rank,
                )
            if source is not None:
                waiting[payload] = source
                try:
                    self._require_alike(source)
                    entry = source._ledger.lease(payload, self)
                except OmniKVError as error:
                    return payload, error
                if entry is not None:
                    leased.append(MemoryLease(self, source, entry))
                    return payload, leased[-1]
        return None

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that this payload will not come, with the cause in words; idempotent.

        Raises:
            ConfigError: the payload is not this source's.
            TransportError: this transport is closed.
        """
        require_payload(self.name, self._endpoint, payload, "source")
        with self._exchange.lock:
            self._require_open()
            self._ledger.fail(payload, cause)
            self._exchange.changed.ring()

    def drain(self, *, deadline: float) -> int:
        """How many published payloads are still not acknowledged once all are, or `deadline` passes."""
        self._exchange.changed.wait_for(lambda: self._ledger.unacknowledged == 0 or None, deadline)
        return self._ledger.unacknowledged

    def close(self) -> None:
        """Leave the exchange; a source's payloads are lost, a target's leases go back. Idempotent."""
        with _exchanges_lock, self._exchange.lock:
            if self._closed:
                return
            self._closed = True
            del self._exchange.endpoints[self._endpoint.side, self._endpoint.rank]
            self._ledger.clear()
            for other in self._exchange.endpoints.values():
                other._ledger.leave(self)
            if not self._exchange.endpoints and _exchanges.get(self._endpoint.edge) is self._exchange:
                del _exchanges[self._endpoint.edge]
            self._exchange.changed.ring()

    def publish(self, entry: Entry[memoryview]) -> None:
        """Nothing; for this transport's slots."""
        with self._exchange.lock:
            self._require_open()
            self._ledger.publish(entry)
            self._exchange.changed.ring()

    def drop(self, entry: Entry[memoryview]) -> None:
        """Nothing; for this transport's slots."""
        with self._exchange.lock:
            self._ledger.drop(entry)

    def end_lease(self, number: int, holder: MemoryTransport, *, used: bool) -> None:
        """Nothing; for the leases of this source's payloads."""
        with self._exchange.lock:
            if used:
                self._ledger.acknowledge(number, holder)
            else:
                self._ledger.give_back(number, holder)
            self._exchange.changed.ring()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"memory: {describe(self._endpoint)} is closed", transport=self.name)

    def _require_alike(self, source: MemoryTransport) -> None:
        differences = fact_differences(self._endpoint.facts, source._endpoint.facts)
        if self._endpoint.rank not in source._endpoint.peer_ranks:
            served = list(source._endpoint.peer_ranks)
            differences.append(f"the source deals with targets {served}, not with rank {self._endpoint.rank}")
        if differences:
            raise ConnectError(
                f"memory: source rank {source._endpoint.rank} and {describe(self._endpoint)} do not fit: "
                f"{'; '.join(differences)}",
                transport=self.name,
                rank=source._endpoint.rank,
            )

    def _allocate(self, payload: PayloadId, nbytes: int) -> memoryview:
        limit = self._pool_nbytes
        if limit is not None and self._used_nbytes + nbytes > limit:
            why = f"{self._used_nbytes} of pool_nbytes={limit} are in use"
            raise _no_room(payload, nbytes, why, retryable=nbytes <= limit)
        try:
            return _aligned_block(nbytes)
        except MemoryError as error:
            raise _no_room(payload, nbytes, "the system gives no more memory", retryable=True) from error

    def _free(self, block: memoryview) -> None:
        self._used_nbytes -= block.nbytes


def _no_room(payload: PayloadId, nbytes: int, why: str, *, retryable: bool) -> PutRejected:
    return PutRejected(
        f"memory: no room for {nbytes} bytes: {why}; wait for acknowledgements or raise pool_nbytes",
        retryable=retryable,
        transport="memory",
        request_id=payload.transfer_id,
        key=payload.encode(),
        rank=payload.source_rank,
    )
