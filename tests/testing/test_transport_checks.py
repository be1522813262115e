"""The conformance suite bites: transports that break one rule each are caught by the check of that rule."""

import contextlib
import math
import threading
from dataclasses import dataclass, field, replace

import pytest

from omnikv.core.admission import Row
from omnikv.core.keys import Edge
from omnikv.errors import OmniKVError, PutRejected
from omnikv.testing.conformance import NamedPair, transport_scenarios
from omnikv.transports.base import Endpoint, Lease
from omnikv.transports.memory import MemoryTransport


class Consuming(MemoryTransport):
    """Reading uses up, as released engines do."""

    def get(self, payload, *, deadline):
        lease = super().get(payload, deadline=deadline)
        return lease and UsedUp(lease)


class UsedUp(Lease):
    def __init__(self, lease):
        self._lease = lease
        self._data = bytearray(lease.buffer)
        lease.acknowledge()

    @property
    def buffer(self):
        return memoryview(self._data)

    def acknowledge(self):
        pass

    def release(self):
        pass


class Deaf(MemoryTransport):
    """Looks once and never waits."""

    def get(self, payload, *, deadline):
        return super().get(payload, deadline=0.0)


class Overwriting(MemoryTransport):
    """The second put wins, silently."""

    def reserve(self, payload, nbytes, **readers):
        try:
            return super().reserve(payload, nbytes)
        except PutRejected:
            self.fail(payload, "overwritten")
            return super().reserve(payload, nbytes)


class Leaking(MemoryTransport):
    """Room does not come back."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._source is not None:
            self._source._ledger._free = lambda block: None


class Silent(MemoryTransport):
    """A failure is told to nobody."""

    def fail(self, payload, cause):
        pass


class Credulous(MemoryTransport):
    """Deals with anybody."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._target is not None:
            self._target._require_alike = lambda source: None


class Garbling(MemoryTransport):
    """Loses the last byte."""

    def get(self, payload, *, deadline):
        lease = super().get(payload, deadline=deadline)
        if lease is not None and len(lease.buffer):
            lease.buffer[-1] ^= 0xFF
        return lease


class Hasty(MemoryTransport):
    """What is reserved can be read at once."""

    def reserve(self, payload, nbytes):
        slot = super().reserve(payload, nbytes)
        slot.publish()
        slot.publish = lambda: None
        return slot


class Forgetful(MemoryTransport):
    """Leases of a receiver that went are never given back."""

    def close(self):
        for source in self._end._exchange.sources.values():
            source.leave = lambda target: None
        super().close()


class Miscounting(MemoryTransport):
    """Says that everything was taken."""

    def drain(self, *, deadline):
        return 0


class Confusing(MemoryTransport):
    """Knows payloads by their request alone, cut at the first odd character."""

    def reserve(self, payload, nbytes):
        return super().reserve(shortened(payload), nbytes)

    def get(self, payload, *, deadline):
        return super().get(shortened(payload), deadline=deadline)


def shortened(payload):
    return type(payload)(
        edge=payload.edge,
        transfer_id=payload.transfer_id.split("/")[0][:200],
        source_rank=payload.source_rank,
        target_rank=payload.target_rank,
    )


class Dying(MemoryTransport):
    """Takes the bytes with it when it closes."""

    def get(self, payload, *, deadline):
        lease = super().get(payload, deadline=deadline)
        return lease and MortalLease(lease)


class MortalLease(Lease):
    def __init__(self, lease):
        self._lease = lease

    @property
    def buffer(self):
        if self._lease._source._closed:
            raise OmniKVError("gone with its sender")
        return self._lease.buffer

    def acknowledge(self):
        self._lease.acknowledge()

    def release(self):
        self._lease.release()


class Immortal(MemoryTransport):
    """Nothing expires."""

    def __init__(self, endpoint, **options):
        super().__init__(replace(endpoint, payload_ttl_s=math.inf), **options)


class Forgetting(MemoryTransport):
    """Announcements are not heard."""

    def announce(self, payloads):
        pass


class Miserly(MemoryTransport):
    """The first reader uses the payload up for all."""

    def reserve_all(self, requests, *, deadline):
        return super().reserve_all([request._replace(num_readers=1) for request in requests], deadline=deadline)


class Stubborn(MemoryTransport):
    """An abort is not heard."""

    def abort(self, payload, cause):
        pass


class Confident(MemoryTransport):
    """Waits for the dead."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._target is not None:
            self._target.lost = lambda seat, now: None


class Pushing(MemoryTransport):
    """Whoever finds room takes it."""

    def reserve(self, payload, nbytes, **readers):
        self._source._waiting_room._row = Row()
        return super().reserve(payload, nbytes, **readers)


class Hoarding(MemoryTransport):
    """Keeps the part that fitted of a request that did not."""

    def reserve_all(self, requests, *, deadline):
        return [slot for one in requests for slot in super(Hoarding, self).reserve_all([one], deadline=deadline)]


class Drowsy(MemoryTransport):
    """A withdrawal wakes nobody."""

    def withdraw(self, payloads):
        pass


CAUGHT_BY = {
    Immortal: "what_nobody_comes_for_expires",
    Forgetting: "interest_keeps_it",
    Miserly: "every_reader_gets_it",
    Stubborn: "abort_is_told_and_frees",
    Confident: "a_dead_source_is_not_waited_for",
    Pushing: "room_is_waited_for_in_turn",
    Hoarding: "a_request_is_let_in_whole_or_not_at_all",
    Drowsy: "withdrawing_ends_a_wait",
    Consuming: "released_is_found_again",
    Deaf: "get_then_put",
    Overwriting: "live_identity_is_refused",
    Leaking: "room_is_never_lost",
    Silent: "failure_is_told",
    Credulous: "unlike_facts_are_refused",
    Garbling: "put_then_get",
    Hasty: "reserved_is_not_readable",
    Forgetful: "closing_target_gives_back",
    Miscounting: "drain_counts",
    Confusing: "strange_ids_work",
    Dying: "late_calls_after_close_do_nothing",
}


@dataclass(frozen=True, kw_only=True)
class PairOf:
    """Pairs of a transport class that is in no registry, as a stranger's; closes what a check left open."""

    kind: type
    stack: contextlib.ExitStack
    pool_nbytes: int = 1 << 20
    patience_s: float = 0.5
    edge: Edge = field(default_factory=lambda: NamedPair(transport="memory").edge)

    def open_source(self, rank, targets, facts, **terms):
        return self._open("source", rank, targets, facts, terms)

    def open_target(self, rank, sources, facts, **terms):
        return self._open("target", rank, sources, facts, terms)

    def _open(self, side, rank, peers, facts, terms):
        endpoint = Endpoint(edge=self.edge, side=side, rank=rank, peer_ranks=peers, facts=facts, **terms)
        transport = self.kind(endpoint, pool_nbytes=self.pool_nbytes)
        self.stack.callback(transport.close)
        return transport


class Unwaiting(MemoryTransport):
    """Breaks no rule: waits for no room, as strangers need not, and hears late that a reader is done."""

    def reserve_all(self, requests, *, deadline):
        return super().reserve_all(requests, deadline=0.0)

    def get(self, payload, *, deadline):
        lease = super().get(payload, deadline=deadline)
        return lease and HeardLate(lease)


class HeardLate(Lease):
    def __init__(self, lease):
        self._lease = lease

    @property
    def buffer(self):
        return self._lease.buffer

    def acknowledge(self):
        threading.Timer(0.05, self._lease.acknowledge).start()

    def release(self):
        threading.Timer(0.05, self._lease.release).start()


@pytest.mark.parametrize("name", ["abort_is_told_and_frees", "ends_come_in_any_order", "every_reader_gets_it"])
def test_a_source_that_does_not_wait_for_room_and_hears_late_of_its_readers_passes(name):
    with contextlib.ExitStack() as stack:
        dict(transport_scenarios())[name](PairOf(kind=Unwaiting, stack=stack, patience_s=30.0))


@pytest.mark.parametrize("kind", CAUGHT_BY, ids=lambda kind: kind.__name__)
def test_a_transport_that_breaks_a_rule_is_caught_by_its_check(kind):
    check = dict(transport_scenarios())[CAUGHT_BY[kind]]
    with contextlib.ExitStack() as stack, pytest.raises((AssertionError, OmniKVError)):
        check(PairOf(kind=kind, stack=stack))


@pytest.mark.parametrize("name", sorted(set(CAUGHT_BY.values())))
def test_the_same_check_passes_without_the_fault(name):
    with contextlib.ExitStack() as stack:
        dict(transport_scenarios())[name](PairOf(kind=MemoryTransport, stack=stack, patience_s=30.0))


def test_every_check_has_its_own_name_and_says_what_it_is_about():
    scenarios = transport_scenarios()
    assert len({name for name, _ in scenarios}) == len(scenarios) >= 25
    assert all(check.__doc__ for _, check in scenarios)
