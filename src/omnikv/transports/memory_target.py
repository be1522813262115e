"""The receiving end of the in-process transport: whoever waits looks again whenever something changed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from omnikv.core.keys import PayloadId
from omnikv.core.lease import End, error_of
from omnikv.errors import ConfigError, ConnectError, LocalProtocolError, OmniKVError, TransportError
from omnikv.transports.base import MAX_ASKS, Endpoint, Lease, Preview, Seat
from omnikv.transports.ledger import Grant
from omnikv.transports.memory_exchange import Exchange, entering, leaving
from omnikv.transports.pairing import (
    RETURN_S,
    dead_source,
    describe,
    fact_differences,
    lost_source,
    stranger_at,
    withdrawn,
)

if TYPE_CHECKING:
    from omnikv.transports.memory_source import MemorySource


class MemoryLease(Lease):
    """The slot's own memory, to be read."""

    def __init__(
        self, target: MemoryTarget, source: MemorySource, payload: PayloadId, grant: Grant[memoryview]
    ) -> None:
        self._target = target
        self._source = source
        self._payload = payload
        self._number = grant.lease
        self._block: memoryview | None = grant.room

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
        self._end(used=True)

    def release(self) -> None:
        """Give the payload back unread."""
        self._end(used=False)

    def _end(self, *, used: bool) -> None:
        if self._block is not None:
            # Forgotten after it was said, which may be interrupted; said twice, it is heard once.
            self._target.end_lease(self._source, self._payload, self._number, used=used)
            self._block = None


class _Wait:
    """One call that waits: for what, which source was asked for each, and what was withdrawn meanwhile."""

    def __init__(self, payloads: Sequence[PayloadId]) -> None:
        self.asked: dict[PayloadId, MemorySource | None] = dict.fromkeys(payloads)
        self.withdrawn: set[PayloadId] = set()
        # Leases that are not handed on yet, by whose they are: an interruption gives them back.
        self.granted: dict[tuple[MemorySource, PayloadId], list[Grant[memoryview]]] = {}

    def settle(self, payload: PayloadId) -> None:
        """Nothing; `payload` is waited for no more."""
        source = self.asked[payload]
        if source is not None:
            source.no_interest(payload, self)
        # Last, so that one who is interrupted before says it again.
        del self.asked[payload]


class MemoryTarget:
    """What one reader of a target rank asks for. `met` and `lost` are for sources, which call them with the lock.

    Raises:
        ConfigError: the rank is already served in this process.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._closed = False
        # In the order in which they began: of several that wait for one payload, the first gets it, so that of several
        # payloads no two waits ever hold a part each.
        self._waits: dict[_Wait, None] = {}
        self._announced: dict[PayloadId, None] = {}
        # When sources closed that this end had met.
        self._deaths: dict[Seat, float] = {}
        with entering(endpoint.edge) as exchange:
            self._exchange: Exchange = exchange
            if endpoint.seat in exchange.targets:
                raise ConfigError(f"memory: {describe(endpoint)} is already open in this process; close it first")
            exchange.targets[endpoint.seat] = self
            exchange.changed.ring()

    def get_as_ready(
        self, payloads: Sequence[PayloadId], deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, MemoryLease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not.

        Nothing is seen early here: no process sleeps that a word would wake.
        """
        wait = _Wait(payloads)
        # Twice, since Ctrl-C may come while the first waits for the lock, or anywhere else in it.
        try:
            try:
                while wait.asked:
                    known = self._wait_for_one(wait, deadline)
                    if known is None:
                        return
                    # The last thing before it is handed on.
                    wait.granted = {}
                    yield known
            finally:
                self._give_up(wait)
        finally:
            self._give_up(wait)

    def others_ready(self, payload: PayloadId, deadline: float) -> tuple[str, ...]:
        """What the source has ready instead of `payload`."""
        with self._exchange.lock:
            self._require_open()
            source = self._exchange.sources.get(Seat(payload.source_rank))
            return () if source is None else source.others_ready(payload)

    def announce(self, payloads: Sequence[PayloadId]) -> None:
        """Tell the sources, now or when they come, that this target will come for the payloads."""
        with self._exchange.lock:
            self._require_open()
            if len({*self._announced, *payloads}) > MAX_ASKS:
                raise ConfigError(f"memory: more than {MAX_ASKS} payloads would be announced; take some back")
            self._announced.update(dict.fromkeys(payloads))
            for source in self._exchange.sources.values():
                self._say_announced(source, payloads)

    def withdraw(self, payloads: Sequence[PayloadId]) -> None:
        """Take announcements back; whoever waits for one of the payloads here is told."""
        with self._exchange.lock:
            for payload in payloads:
                self._forget_announced(payload)
                for wait in self._waits:
                    if payload in wait.asked:
                        wait.withdrawn.add(payload)
            self._exchange.changed.ring()

    def end_lease(self, source: MemorySource, payload: PayloadId, lease: int, *, used: bool) -> None:
        """Nothing; for this target's leases."""
        with self._exchange.lock:
            if used:
                self._announced.pop(payload, None)
            source.end_lease(lease, self, used=used)

    def close(self) -> None:
        """Leave the exchange; leases go back. Idempotent."""
        with leaving(self._exchange):
            if self._closed:
                return
            self._closed = True
            del self._exchange.targets[self.endpoint.seat]
            for payload in list(self._announced):
                self._forget_announced(payload)
            for source in self._exchange.sources.values():
                source.leave(self)
            self._exchange.changed.ring()

    def met(self, source: MemorySource) -> None:
        """Nothing; a source has opened."""
        self._deaths.pop(source.endpoint.seat, None)
        self._say_announced(source, list(self._announced))

    def lost(self, seat: Seat, now: float) -> None:
        """Nothing; a source has closed."""
        self._deaths[seat] = now

    def _say_announced(self, source: MemorySource, payloads: Sequence[PayloadId]) -> None:
        for payload in payloads:
            if payload.source_rank == source.endpoint.rank:
                source.interest(payload, self)

    def _forget_announced(self, payload: PayloadId) -> None:
        source = self._exchange.sources.get(Seat(payload.source_rank))
        if self._announced.pop(payload, payload) is None and source is not None:
            source.no_interest(payload, self)

    def _give_up(self, wait: _Wait) -> None:
        """Nothing; nothing is waited for any more, and a lease that was not handed on goes back. Idempotent."""
        with self._exchange.lock:
            self._waits.pop(wait, None)
            for payload in list(wait.asked):
                wait.settle(payload)
            if self._waits:
                self._exchange.changed.ring()
        for (source, payload), grants in wait.granted.items():
            for grant in grants:
                MemoryLease(self, source, payload, grant).release()

    def _wait_for_one(self, wait: _Wait, deadline: float) -> tuple[PayloadId, MemoryLease | OmniKVError] | None:
        while True:
            with self._exchange.lock:
                self._waits.setdefault(wait)
                returns = [self._deaths[seat] + RETURN_S for seat in self._missed(wait)]
            until = min([deadline, *(at for at in returns if at > time.monotonic())])
            known = self._exchange.changed.wait_for(partial(self._known, wait), until)
            if known is not None or time.monotonic() >= deadline:
                return known

    def _missed(self, wait: _Wait) -> list[Seat]:
        """The sources that are waited for although they have closed, since they may come back."""
        return [seat for seat in self._deaths if any(payload.source_rank == seat.rank for payload in wait.asked)]

    def _known(self, wait: _Wait) -> tuple[PayloadId, MemoryLease | OmniKVError] | None:
        """The first of the payloads that something is known of, which is then waited for no more.

        A lease stands in `wait` too, before it is entered.
        """
        self._require_open()
        for payload, asked in wait.asked.items():
            if self._is_earlier_ones(wait, payload):
                continue
            outcome = self._outcome(wait, payload, asked)
            if outcome is not None:
                wait.settle(payload)
                if len(self._waits) > 1:
                    self._exchange.changed.ring()
                return payload, outcome
        return None

    def _is_earlier_ones(self, wait: _Wait, payload: PayloadId) -> bool:
        earlier = itertools.takewhile(lambda other: other is not wait, self._waits)
        return any(payload in other.asked for other in earlier)

    def _outcome(self, wait: _Wait, payload: PayloadId, asked: MemorySource | None) -> MemoryLease | OmniKVError | None:
        seat = Seat(payload.source_rank)
        source = self._exchange.sources.get(seat)
        if payload in wait.withdrawn:
            return withdrawn("memory", payload)
        if asked is not None and source is not asked:
            return lost_source("memory", f"source {seat}", payload)
        if source is None:
            since_s = time.monotonic() - self._deaths.get(seat, math.inf)
            return dead_source("memory", f"source {seat}", payload, since_s=since_s) if since_s >= RETURN_S else None
        try:
            self._require_alike(source)
        except ConnectError as error:
            return error
        # Nothing comes between the grant and its place there, which is no Python.
        told = source.ask(payload, self, wait.granted.setdefault((source, payload), []).append)
        if isinstance(told, End):
            return error_of(payload, told)
        if told is None and asked is None:
            wait.asked[payload] = source
            source.interest(payload, wait)
        return None if told is None else MemoryLease(self, source, payload, told)

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"memory: {describe(self.endpoint)} is closed", transport="memory")

    def _require_alike(self, source: MemorySource) -> None:
        here, there = self.endpoint, source.endpoint
        differences = fact_differences(here.side, here.facts, there.facts)
        if not there.deals_with(here.seat):
            differences.append(stranger_at(there, here.seat))
        if differences:
            raise ConnectError(
                f"memory: source rank {there.rank} and {describe(here)} do not fit: {'; '.join(differences)}",
                transport="memory",
                rank=there.rank,
            )
