"""No check of the conformance suite is one that cannot fail: for each there is a transport that breaks its rule."""

import contextlib
import time

import pytest
from tests.testing.test_transport_checks import CAUGHT_BY, Credulous, PairOf, UsedUp

from omnikv.core import lease as core
from omnikv.errors import ConfigError, OmniKVError, ProducerFailed, PutRejected
from omnikv.testing.conformance import transport_scenarios
from omnikv.transports.memory import MemoryTransport


class GivesUpEarly(MemoryTransport):
    def get(self, payload, *, deadline):
        return super().get(payload, deadline=min(deadline, time.monotonic() + 0.01))


class ForgetsEnds(MemoryTransport):
    """Says nothing of what was used: who asks again waits."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._source is not None:
            ask = self._source._ledger.ask
            self._source._ledger.ask = lambda *what: (
                None if isinstance(told := ask(*what), core.End) and told.how == "released" else told
            )


class LeasesToAll(MemoryTransport):
    """Each get gets a copy, whoever reads it already."""

    def get(self, payload, *, deadline):
        lease = super().get(payload, deadline=deadline)
        if lease is not None:
            copy = UsedUp.__new__(UsedUp)
            copy._data = bytearray(lease.buffer)
            lease.release()
            return copy
        return None


class PublishesTwice(MemoryTransport):
    def reserve(self, payload, nbytes, **readers):
        slot = super().reserve(payload, nbytes, **readers)
        publish = slot.publish

        def again():
            with contextlib.suppress(OmniKVError):
                publish()

        slot.publish = again
        return slot


class KeepsDropped(MemoryTransport):
    def reserve(self, payload, nbytes, **readers):
        slot = super().reserve(payload, nbytes, **readers)
        slot.drop = lambda: None
        return slot


class FailsInWords(MemoryTransport):
    """A failure is told, but the payload stays."""

    def fail(self, payload, cause):
        record = self._source._ledger._records.get(payload)
        if record is None or not record.life.has_room:
            super().fail(payload, cause)


class NeverSaysNever(MemoryTransport):
    def reserve_all(self, requests, *, deadline):
        try:
            return super().reserve_all(requests, deadline=deadline)
        except PutRejected as error:
            raise PutRejected(str(error), retryable=True) from error


class Overlaps(MemoryTransport):
    """All payloads of one size lie in one place."""

    places: dict = {}  # noqa: RUF012

    def reserve(self, payload, nbytes, **readers):
        slot = super().reserve(payload, nbytes, **readers)
        place = self.places.setdefault(nbytes // 32768, bytearray(max(nbytes, 32768 * 2)))
        slot._block = slot._ticket.record.room = memoryview(place)[:nbytes]
        return slot


class RefusesNothing(MemoryTransport):
    """Has no payload without a byte."""

    def reserve(self, payload, nbytes, **readers):
        if nbytes == 0:
            raise PutRejected("an empty payload")
        return super().reserve(payload, nbytes, **readers)


class AllAreReaders(MemoryTransport):
    def reserve_all(self, requests, *, deadline):
        return super().reserve_all([one._replace(num_readers=None) for one in requests], deadline=deadline)


class ForgetsToAnnounceLater(MemoryTransport):
    """A source that comes later hears of no announcement."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._target is not None:
            self._target.met = lambda source: None


class DropsLateEnds(MemoryTransport):
    """Once a payload was aborted, nobody's acknowledgement counts."""

    def abort(self, payload, cause):
        super().abort(payload, cause)
        self._source.end_lease = lambda *what, **how: None


class LetsWritersGoOn(MemoryTransport):
    def reserve(self, payload, nbytes, **readers):
        slot = super().reserve(payload, nbytes, **readers)
        publish = slot.publish

        def anyway():
            life = slot._ticket.record.life
            if life.phase is core.Phase.ABORTED:
                slot._ticket.record.life = life._replace(phase=core.Phase.ANNOUNCED)
            publish()

        slot.publish = anyway
        return slot


class ClosesInSilence(MemoryTransport):
    """Whoever waits for room is not told that it closes."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._source is not None:
            self._source._waiting_room.look_again = lambda: None
            self._source._while_waiting = lambda: float("inf")
            self._source._require_open = lambda: None


class ExpiresWhenAsked(MemoryTransport):
    """What is due is freed by calls alone, not for those who wait."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._source is not None:
            self._source._while_waiting = lambda: float("inf")


class Uncounting(MemoryTransport):
    def census(self):
        return {**super().census(), "aborted": 0}


class MustComeFirst(MemoryTransport):
    """A target waits for the sources that were there when it opened, and for no others."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        self._came_first = not self._end._exchange.sources

    def get(self, payload, *, deadline):
        return super().get(payload, deadline=0.0 if self._came_first else deadline)


class OneForAll(MemoryTransport):
    """A payload is found by its request, whoever it is for."""

    places: dict = {}  # noqa: RUF012

    def reserve(self, payload, nbytes, **readers):
        slot = super().reserve(payload, nbytes, **readers)
        slot._block = slot._ticket.record.room = self.places.setdefault(payload.transfer_id, slot._block)
        return slot


class TakesAnything(MemoryTransport):
    def reserve(self, payload, nbytes, **readers):
        with contextlib.suppress(ConfigError):
            return super().reserve(payload, nbytes, **readers)


class SharesRanks(MemoryTransport):
    def __init__(self, endpoint, **options):
        try:
            super().__init__(endpoint, **options)
        except ConfigError:
            self._end = contextlib.nullcontext()
            self._end.close = lambda: None


class NeverCloses(MemoryTransport):
    def close(self):
        pass


class ClosesUnheard(MemoryTransport):
    """Whoever waits for a source that closes goes on waiting."""

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        if self._target is not None:
            look = self._target._outcome
            self._target._outcome = lambda *what: None if isinstance(told := look(*what), ProducerFailed) else told


class KnowsTheFirstLife(MemoryTransport):
    """A target goes on with the source that it met first."""

    def get(self, payload, *, deadline):
        sources = self._target._exchange.sources
        first = self.__dict__.setdefault("first", next(iter(sources.values()), None))
        if first is not None and first not in sources.values():
            raise ProducerFailed("its first life is over")
        return super().get(payload, deadline=deadline)


class SwapsThreads(MemoryTransport):
    """Two that get at once may get each other's."""

    latest = None

    def get(self, payload, *, deadline):
        lease = super().get(payload, deadline=deadline)
        if lease is not None:
            lease._block, self.latest = self.latest or lease._block, lease._block
        return lease


class OneAtATime(MemoryTransport):
    """Waits for the first of several before it looks at the next."""

    def get_as_ready(self, payloads, *, deadline, preview=None):
        for payload in payloads:
            given = list(super().get_as_ready([payload], deadline=deadline))
            if not given:
                return
            yield from given


class BelievesHeads(MemoryTransport):
    """Takes how something will begin for the thing itself."""

    def reserve_all(self, requests, *, deadline):
        slots = super().reserve_all(requests, deadline=deadline)
        for wanted, slot in zip(requests, slots, strict=True):
            if wanted.head:
                slot.publish()
        return slots


class FreeAtOnce(MemoryTransport):
    """Nothing is waited for before memory is reused."""

    def wait_until_free(self, payloads, *, deadline):
        return True


class NeverFree(MemoryTransport):
    def wait_until_free(self, payloads, *, deadline):
        return False


class FreeWhileWritten(MemoryTransport):
    """Counts what is published alone."""

    def wait_until_free(self, payloads, *, deadline):
        return self.drain(deadline=deadline) == 0


class FreeWhileRead(MemoryTransport):
    """Knows of no reader."""

    def wait_until_free(self, payloads, *, deadline):
        return super().wait_until_free(payloads, deadline=deadline) or self.census()["leased"] > 0


class FreeByTheFirst(MemoryTransport):
    """Looks at one of several payloads."""

    def wait_until_free(self, payloads, *, deadline):
        return super().wait_until_free(payloads[:1], deadline=deadline)


class LooksOnce(MemoryTransport):
    """Does not wait until what is there expires."""

    def wait_until_free(self, payloads, *, deadline):
        return super().wait_until_free(payloads, deadline=0.0)


ALSO_CAUGHT_BY = {
    FreeAtOnce: "free_once_nobody_writes_or_reads",
    NeverFree: "free_once_nobody_writes_or_reads",
    FreeWhileWritten: "free_once_nobody_writes_or_reads",
    FreeWhileRead: "free_once_nobody_writes_or_reads",
    FreeByTheFirst: "free_once_nobody_writes_or_reads",
    LooksOnce: "what_expired_is_free",
    BelievesHeads: "what_is_told_ahead_is_no_payload",
    GivesUpEarly: "absent_at_the_deadline",
    ForgetsEnds: "acknowledged_is_gone",
    LeasesToAll: "leased_is_not_leased_twice",
    PublishesTwice: "publish_is_once",
    KeepsDropped: "dropped_room_comes_back",
    FailsInWords: "failed_room_comes_back",
    NeverSaysNever: "no_room_is_said",
    Overlaps: "live_payloads_do_not_overlap",
    RefusesNothing: "any_size_works",
    AllAreReaders: "a_payload_may_have_fewer_readers",
    ForgetsToAnnounceLater: "announced_before_it_is_there",
    DropsLateEnds: "ends_come_in_any_order",
    LetsWritersGoOn: "an_abort_stops_a_writer",
    ClosesInSilence: "closing_ends_waiting_for_room",
    ExpiresWhenAsked: "expiry_makes_room",
    Uncounting: "the_census_counts",
    MustComeFirst: "either_end_opens_first",
    OneForAll: "every_pair_has_its_own",
    TakesAnything: "foreign_payloads_are_misuse",
    SharesRanks: "one_end_a_rank",
    Credulous: "unlisted_peers_are_refused",
    NeverCloses: "closed_ends_say_so",
    ClosesUnheard: "closing_source_wakes",
    KnowsTheFirstLife: "restarted_source_is_found",
    SwapsThreads: "threads_share_an_end",
    OneAtATime: "several_are_given_as_known",
}


@pytest.mark.parametrize("kind", ALSO_CAUGHT_BY, ids=lambda kind: kind.__name__)
def test_a_transport_that_breaks_a_rule_is_caught_by_its_check(kind):
    check = dict(transport_scenarios())[ALSO_CAUGHT_BY[kind]]
    with contextlib.ExitStack() as stack, pytest.raises((AssertionError, OmniKVError)):
        check(PairOf(kind=kind, stack=stack))


@pytest.mark.parametrize("name", sorted(set(ALSO_CAUGHT_BY.values())))
def test_the_same_check_passes_without_the_fault(name):
    with contextlib.ExitStack() as stack:
        dict(transport_scenarios())[name](PairOf(kind=MemoryTransport, stack=stack, patience_s=30.0))


def test_every_check_is_known_to_be_able_to_fail():
    assert {*CAUGHT_BY.values(), *ALSO_CAUGHT_BY.values()} == {name for name, _ in transport_scenarios()}
