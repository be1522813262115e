"""A sender's table of payloads: every state takes exactly the events it should, and room is freed once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import LocalProtocolError, ProducerFailed, PutRejected
from omnikv.transports import ledger as ledger_module
from omnikv.transports.ledger import Ledger, PayloadState

EDGE = Edge(from_stage="prefill", to_stage="decode")


def payload_of(name):
    return PayloadId(edge=EDGE, transfer_id=name, source_rank=0, target_rank=0)


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, doubled, late and by the wrong holder; a second, naive account says what must be true."""

    entries = Bundle("entries")
    leases = Bundle("leases")
    names = st.sampled_from(["a", "b", "c"])
    holders = st.sampled_from(["first", "second"])

    def __init__(self):
        super().__init__()
        self.rooms_out = set()
        self.given_out = 0
        self.ledger = Ledger("test", self.rooms_out.remove)

    @rule(target=entries, name=names)
    def reserve(self, name):
        try:
            entry = self.ledger.reserve(payload_of(name), 1)
        except PutRejected:
            return multiple()
        self.given_out += 1
        entry.room = self.given_out
        self.rooms_out.add(entry.room)
        return entry

    @rule(entry=entries)
    def publish(self, entry):
        may = entry.state is PayloadState.RESERVED and self.ledger.failure(entry.payload) is None
        if may:
            self.ledger.publish(entry)
            assert entry.state is PayloadState.READY
        else:
            with pytest.raises(LocalProtocolError):
                self.ledger.publish(entry)

    @rule(entry=entries)
    def drop(self, entry):
        state = entry.state
        self.ledger.drop(entry)
        assert entry.state is (PayloadState.GONE if state is PayloadState.RESERVED else state)

    @rule(name=names)
    def fail(self, name):
        self.ledger.fail(payload_of(name), "cause")
        assert self.ledger.failure(payload_of(name)) == "cause"

    @rule(target=leases, name=names, holder=holders)
    def lease(self, name, holder):
        payload = payload_of(name)
        if self.ledger.failure(payload):
            with pytest.raises(ProducerFailed, match="cause"):
                self.ledger.lease(payload, holder)
            return multiple()
        entry = self.ledger.lease(payload, holder)
        return multiple() if entry is None else (entry, entry.lease, holder)

    @rule(lease=leases, holder=holders, used=st.booleans())
    def end_lease(self, lease, holder, used):
        entry, number, owner = lease
        is_held = entry.state is PayloadState.LEASED and entry.lease == number and owner == holder
        end = self.ledger.acknowledge if used else self.ledger.give_back
        has_failed = self.ledger.failure(entry.payload) is not None
        result = end(number, holder)
        if not is_held:
            assert result is None
        elif used or has_failed:
            assert entry.state is PayloadState.GONE
        else:
            assert (entry.state, result) == (PayloadState.READY, entry.payload)

    @rule(holder=holders)
    def leave(self, holder):
        self.ledger.leave(holder)
        assert all(entry.holder != holder for entry in self.ledger._live.values())

    @invariant()
    def rooms_out_are_those_of_live_payloads(self):
        assert {entry.room for entry in self.ledger._live.values()} == self.rooms_out

    @invariant()
    def leases_out_are_those_of_leased_payloads(self):
        leased = {entry.lease for entry in self.ledger._live.values() if entry.state is PayloadState.LEASED}
        assert set(self.ledger._leased) == leased

    @invariant()
    def the_count_is_of_those_published(self):
        states = [entry.state for entry in self.ledger._live.values()]
        assert self.ledger.unacknowledged == len(states) - states.count(PayloadState.RESERVED)

    @invariant()
    def histories_stay_short(self):
        assert all(len(entry.history) <= 5 for entry in self.ledger._live.values())

    def teardown(self):
        self.ledger.clear()
        assert not self.rooms_out
        assert self.ledger.unacknowledged == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_lease_number_is_never_used_twice():
    ledger = Ledger("test", lambda room: None)
    ledger.publish(ledger.reserve(payload_of("a"), 1))
    numbers = []
    for _ in range(3):
        numbers.append(ledger.lease(payload_of("a"), "holder").lease)
        ledger.give_back(numbers[-1], "holder")
    assert len(set(numbers)) == 3
    assert ledger.acknowledge(numbers[0], "holder") is None


def test_only_the_latest_failures_are_remembered(monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_FAILURES", 3)
    ledger = Ledger("test", lambda room: None)
    for number in range(5):
        ledger.fail(payload_of(f"r{number}"), "cause")
    assert [ledger.failure(payload_of(f"r{number}")) for number in range(5)] == [None, None, "cause", "cause", "cause"]


def test_the_error_of_a_second_publish_tells_the_history():
    ledger = Ledger("test", lambda room: None)
    entry = ledger.reserve(payload_of("a"), 1)
    ledger.publish(entry)
    with pytest.raises(LocalProtocolError, match="went through reserve, publish; reserve it again") as caught:
        ledger.publish(entry)
    assert caught.value.history == ("reserve", "publish")
