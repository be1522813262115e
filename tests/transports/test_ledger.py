"""A sender's table of payloads: any events in any order, against a second, naive account of what must be true."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from omnikv.core.keys import Edge, PayloadId
from omnikv.core.lease import End
from omnikv.errors import LocalProtocolError, PutRejected
from omnikv.transports import ledger as ledger_module
from omnikv.transports.ledger import Grant, Ledger

EDGE = Edge(from_stage="prefill", to_stage="decode")
TTL_S = 10.0


def payload_of(name):
    return PayloadId(edge=EDGE, transfer_id=name, source_rank=0, target_rank=0)


class Naive:
    """One life, told in the plainest way."""

    def __init__(self, ticket, num_readers, room):
        self.ticket, self.num_readers, self.room = ticket, num_readers, room
        self.written, self.published, self.end = True, False, None
        self.used, self.leases, self.unheard = set(), {}, {}

    @property
    def holds_room(self):
        return self.written or bool(self.leases) or (self.published and self.end is None)


class AnyOrder(RuleBasedStateMachine):
    """Take, cancel, expire, fail, abort, die, and everything of it twice, late, and by the wrong holder."""

    tickets = Bundle("tickets")
    leases = Bundle("leases")
    names = st.sampled_from(["a", "b"])
    readers = st.integers(0, 2)
    holders = st.sampled_from(["first", "second"])
    names_of_holders = st.sampled_from(["first", "second", "first, back", "second, back"])

    def __init__(self):
        super().__init__()
        self.rooms_out = set()
        self.given_out = 0
        self.now = 100.0
        self.lives = {}
        self.interest = {"a": set(), "b": set()}
        self.idle_since = {}
        self.ledger = Ledger("test", ttl_s=TTL_S, free=self.rooms_out.remove, look_again=lambda payload: None)

    def renew(self, name):
        """After what may have ended the last interest: the clock starts anew where nobody is interested."""
        life = self.lives.get(name)
        if life is None or not life.published or life.end is not None or life.leases or self.interest[name]:
            self.idle_since.pop(name, None)
        else:
            self.idle_since.setdefault(name, self.now)

    def end(self, name, how):
        life = self.lives.get(name)
        if life is not None and life.end is None:
            life.end = how
            life.unheard.clear()
            self.interest[name].clear()
        self.renew(name)

    @rule(target=tickets, name=names, num_readers=st.integers(1, 2))
    def reserve(self, name, num_readers):
        life = self.lives.get(name)
        if life is not None and life.holds_room:
            with pytest.raises(PutRejected, match="already live"):
                self.ledger.reserve(payload_of(name), num_readers, self.now)
            return multiple()
        ticket = self.ledger.reserve(payload_of(name), num_readers, self.now)
        self.given_out += 1
        self.rooms_out.add(self.given_out)
        assert self.ledger.furnish(ticket, self.given_out)
        self.lives[name] = Naive(ticket, num_readers, self.given_out)
        self.renew(name)
        return ticket

    @rule(ticket=tickets)
    def publish(self, ticket):
        name = ticket.payload.transfer_id
        life = self.lives[name]
        if life.ticket == ticket and life.written and life.end is None:
            self.ledger.publish(ticket, self.now)
            life.written, life.published = False, True
            self.renew(name)
            return
        with pytest.raises(LocalProtocolError, match="cannot be published"):
            self.ledger.publish(ticket, self.now)
        if life.ticket == ticket:
            life.written = False

    @rule(ticket=tickets)
    def drop(self, ticket):
        life = self.lives[ticket.payload.transfer_id]
        self.ledger.drop(ticket, self.now)
        if life.ticket == ticket and life.written:
            life.written = False
            life.end = life.end or "dropped"

    @rule(name=names, aborts=st.booleans())
    def end_it(self, name, aborts):
        (self.ledger.abort if aborts else self.ledger.fail)(payload_of(name), "cause", self.now)
        how = "aborted" if aborts else "failed"
        life = self.lives.get(name)
        if life is None or life.end == "dropped":
            # Nothing was there: whoever asks is told all the same.
            self.lives[name] = life = Naive(None, 1, None)
            life.written, life.end = False, how
            self.interest[name].clear()
        self.end(name, how)

    @rule(target=leases, name=names, reader=readers, holder=holders)
    def take(self, name, reader, holder):
        told = self.ledger.ask(payload_of(name), reader, holder, self.now)
        life = self.lives.get(name)
        if life is None or life.end == "dropped":
            assert told is None
        elif life.end is not None:
            assert isinstance(told, End)
            assert told.how == life.end
        elif reader in life.used or reader >= life.num_readers:
            assert isinstance(told, End)
            assert told.how == "released"
        elif not life.published or reader in {of for of, _ in life.leases.values()}:
            assert told is None
        else:
            assert isinstance(told, Grant)
            assert told.room == life.room
            assert told.lease not in life.leases
            life.leases[told.lease] = (reader, holder)
            life.unheard = {number: held for number, held in life.unheard.items() if held[0] != reader}
            self.renew(name)
            return name, told.lease
        return multiple()

    @rule(lease=leases, holder=names_of_holders, used=st.booleans())
    def end_lease(self, lease, holder, used):
        name, number = lease
        (self.ledger.acknowledge if used else self.ledger.give_back)(number, holder, self.now)
        life = self.lives[name]
        held = {**life.leases, **life.unheard} if used else life.leases
        reader, owner = held.get(number, (None, None))
        if owner == holder:
            life.leases.pop(number, None)
            life.unheard.pop(number, None)
            if used:
                life.used.add(reader)
                self.interest[name].discard(holder)
                if life.end is None and len(life.used) == life.num_readers:
                    self.end(name, "released")
        self.renew(name)

    @rule(holder=holders)
    def die(self, holder):
        self.ledger.leave(holder, self.now)
        for name, life in self.lives.items():
            life.leases = {number: held for number, held in life.leases.items() if held[1] != holder}
            self.renew(name)

    @rule(holder=holders)
    def vanish(self, holder):
        self.ledger.lapse(holder, f"{holder}, back", self.now)
        for name, life in self.lives.items():
            lost = {number: (reader, f"{of}, back") for number, (reader, of) in life.leases.items() if of == holder}
            life.leases = {number: held for number, held in life.leases.items() if held[1] != holder}
            life.unheard.update(lost if life.end is None else {})
            self.renew(name)

    @rule(name=names, who=holders, is_given=st.booleans())
    def announce(self, name, who, is_given):
        if is_given:
            self.ledger.interest(payload_of(name), who, self.now)
            self.interest[name].add(who)
        else:
            self.ledger.no_interest(payload_of(name), who, self.now)
            self.interest[name].discard(who)
        self.renew(name)

    @rule(seconds=st.sampled_from([0.0, TTL_S / 2, TTL_S]))
    def wait(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        for name, since in list(self.idle_since.items()):
            if self.now >= since + TTL_S:
                self.end(name, "expired")

    @invariant()
    def rooms_out_are_those_that_somebody_may_touch(self):
        assert self.rooms_out == {life.room for life in self.lives.values() if life.holds_room}

    @invariant()
    def the_counts_are_right(self):
        lives = self.lives.values()
        census = self.ledger.census()
        live = [life for life in lives if life.end is None]
        assert census["ready"] == sum(life.published for life in live)
        assert self.ledger.held == sum(life.holds_room and not life.written for life in lives)
        assert census["announced"] == sum(life.written for life in live)
        assert census["leased"] == sum(bool(life.leases) for life in lives)
        assert set(self.ledger._leases) == {number for life in lives for number in (*life.leases, *life.unheard)}
        assert self.ledger.next_expiry == min((at + TTL_S for at in self.idle_since.values()), default=None)

    def teardown(self):
        for holder in ("first", "second"):
            self.ledger.leave(holder, self.now)
        assert set(self.ledger._leases) == {number for life in self.lives.values() for number in life.unheard}
        assert self.ledger.census()["leased"] == 0
        self.ledger.clear(self.now)
        assert not self.ledger._leases
        assert not self.rooms_out
        assert self.ledger.held == 0
        assert self.ledger.next_expiry is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def quiet_ledger():
    return Ledger("test", ttl_s=TTL_S, free=lambda room: None, look_again=lambda payload: None)


def put(ledger, payload, now=0.0):
    ticket = ledger.reserve(payload, 1, now)
    ledger.furnish(ticket, "room")
    ledger.publish(ticket, now)
    return ticket


def test_a_lease_number_is_never_used_twice():
    ledger, payload = quiet_ledger(), payload_of("a")
    put(ledger, payload)
    numbers = []
    for _ in range(3):
        numbers.append(ledger.ask(payload, 0, "holder", 0.0).lease)
        ledger.give_back(numbers[-1], "holder", 0.0)
    assert len(set(numbers)) == 3
    ledger.acknowledge(numbers[0], "holder", 0.0)
    assert ledger.held == 1


def test_a_lease_is_entered_though_it_is_interrupted_as_it_is_passed_on():
    ledger, payload, shown = quiet_ledger(), payload_of("a"), []
    put(ledger, payload)

    def interrupted(grant):
        shown.append(grant)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.ask(payload, 0, "holder", 0.0, interrupted)
    assert ledger.census()["leased"] == 1
    assert ledger.acknowledge(shown[0].lease, "holder", 1.0)
    assert ledger.held == 0


def test_only_the_latest_ends_are_remembered(monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_ENDS", 3)
    ledger = quiet_ledger()
    for number in range(5):
        ledger.fail(payload_of(f"r{number}"), "cause", 0.0)
    told = [ledger.ask(payload_of(f"r{number}"), 0, "holder", 0.0) for number in range(5)]
    assert told[:2] == [None, None]
    assert [end.how for end in told[2:]] == ["failed"] * 3
    assert len(ledger._records) == 3


def test_an_identity_that_nobody_waits_for_any_more_is_forgotten():
    ledger = quiet_ledger()
    for number in range(100):
        ledger.interest(payload_of(f"r{number}"), "somebody", 0.0)
        ledger.no_interest(payload_of(f"r{number}"), "somebody", 0.0)
    assert not ledger._records


def test_the_error_of_a_second_publish_tells_the_history():
    ledger = quiet_ledger()
    ticket = put(ledger, payload_of("a"))
    with pytest.raises(LocalProtocolError, match="was published or dropped before; reserve it again") as caught:
        ledger.publish(ticket, 0.0)
    assert caught.value.history == ("Reserve", "Publish")


def test_d22_the_room_of_an_expired_payload_may_be_another_ones_and_is_never_shown_for_it():
    rooms = ["the room"]
    ledger = Ledger("test", ttl_s=TTL_S, free=rooms.append, look_again=lambda payload: None)
    first, second = payload_of("a"), payload_of("b")
    ticket = ledger.reserve(first, 1, 0.0)
    ledger.furnish(ticket, rooms.pop())
    ledger.publish(ticket, 0.0)
    ledger.expire(TTL_S)
    other = ledger.reserve(second, 1, TTL_S)
    ledger.furnish(other, rooms.pop())
    ledger.publish(other, TTL_S)
    told = ledger.ask(first, 0, "holder", TTL_S)
    assert (told.how, told.generation) == ("expired", ticket.generation)


def test_d22_what_is_due_cannot_be_read_although_nobody_looked_at_the_time():
    ledger = quiet_ledger()
    put(ledger, payload_of("a"))
    assert ledger.ask(payload_of("a"), 0, "holder", TTL_S).how == "expired"
