"""The ledgers: holding a call whole comes to what the steps come to, in every order of arrival."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_lanes import LedgerLane

from omnikv.core.messages import Ballot, Kept, RoleBallot, Rulings, Votes, spell_facts
from omnikv.core.verdict import rule
from omnikv.errors import ConfigError, RemoteProtocolError
from omnikv.groups import channel_ledger
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_follower import FollowerLedger
from omnikv.groups.channel_leader import LeaderLedger

SIZE = 3
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Votes | Kept | Rulings).decode
STANDINGS = st.sampled_from(["have", "have", "have", "missing", "failed"])


def a_ballot(standing="have", tokens="7", number=0):
    facts = spell_facts({"tokens": tokens}) if standing == "have" else ""
    return Ballot(number, True, (RoleBallot("primary", standing, True, "", facts),))


def ignore(message):
    """Nothing; a line whose other end does not matter."""


class Star:
    """The ledgers of all ranks with a first-in first-out line between each follower and the leader."""

    def __init__(self, *, has_lanes=False):
        self.to_leader = {rank: [] for rank in range(1, SIZE)}
        self.to_follower = {rank: [] for rank in range(1, SIZE)}
        self.sent = []
        followers = {rank: self.line(self.to_follower[rank]) for rank in range(1, SIZE)}
        leaders = {rank: {0: self.line(self.to_leader[rank])} for rank in range(1, SIZE)}
        self.ledgers = [
            LeaderLedger(SIZE, followers),
            *(FollowerLedger(rank, leaders[rank], shares_clock=True) for rank in range(1, SIZE)),
        ]

        self.lanes = [
            LedgerLane(ledger, range(1, SIZE) if rank == 0 else [0], is_open=has_lanes)
            for rank, ledger in enumerate(self.ledgers)
        ]

    def cast(self, rank, votes):
        call = Call(votes, math.inf if rank == 0 else 1e6)
        self.lanes[rank].cast(call)
        return call

    def line(self, messages):
        def send(message):
            messages.append(bytes(message))
            self.sent.append(type(decode(message)))

        return send

    def deliver(self, rank, *, up):
        """One message between `rank` and the leader, if one is under way."""
        line = (self.to_leader if up else self.to_follower)[rank]
        if line:
            receiver = 0 if up else rank
            self.lanes[receiver].hear(rank if up else 0, line.pop(0))

    def settle(self):
        while any(self.to_leader.values()) or any(self.to_follower.values()):
            for rank in range(1, SIZE):
                self.deliver(rank, up=True)
                self.deliver(rank, up=False)

    @property
    def is_empty(self):
        is_open = any(ledger._whole or ledger._requests or ledger.open_calls() for ledger in self.ledgers)
        return not is_open and all(lane.call is None for lane in self.lanes)


@pytest.mark.parametrize("has_lanes", [True, False])
@given(data=st.data())
def test_any_grouping_and_order_of_votes_comes_to_the_rule_on_each_request(data, has_lanes):
    star = Star(has_lanes=has_lanes)
    keys = [f"r{at}" for at in range(data.draw(st.integers(1, 5)))]
    ballots = {key: [a_ballot(data.draw(STANDINGS)) for _ in range(SIZE)] for key in keys}
    calls = []
    for rank in data.draw(st.permutations(range(SIZE))):
        mine = data.draw(st.permutations(keys))
        cut = data.draw(st.integers(0, len(mine)))
        for part in (mine[:cut], mine[cut:]):
            if part:
                calls.append((rank, part, star.cast(rank, [(key, ballots[key][rank]) for key in part])))
            for _ in range(data.draw(st.integers(0, 3))):
                star.deliver(data.draw(st.integers(1, SIZE - 1)), up=data.draw(st.booleans()))
    star.settle()
    for rank, part, call in calls:
        assert call.outcome(rank) == [rule(ballots[key]) for key in part]
    if all(rule(votes).kind != "refetch" for votes in ballots.values()):
        assert star.is_empty


ROLES = st.lists(
    st.tuples(st.sampled_from(["cfg_img", "cfg_text", "primary"]), STANDINGS, st.booleans(), st.sampled_from("ab")),
    max_size=3,
    unique_by=lambda role: role[0],
).map(
    lambda roles: tuple(
        RoleBallot(name, standing, required, "", spell_facts({"tokens": fact}))
        for name, standing, required, fact in roles
    )
)
BALLOTS = st.builds(Ballot, st.sampled_from([0, 0, 0, 1]), st.booleans(), ROLES)


@given(data=st.data())
def test_a_call_ends_in_the_lane_exactly_when_all_cast_it_and_as_the_rule_says(data):
    star = Star(has_lanes=True)
    keys = [f"r{at}" for at in range(data.draw(st.integers(1, 3)))]
    mine = [(key, data.draw(BALLOTS)) for key in keys]
    # Most of the others cast the very same; a lane must see where one of them does not.
    theirs = [data.draw(st.just(mine) | st.permutations(mine) | st.just([(keys[0], mine[0][1])])) for _ in range(2)]
    theirs = [[(key, data.draw(st.just(ballot) | BALLOTS)) for key, ballot in votes] for votes in theirs]
    ballots = {key: [dict(votes).get(key) for votes in (mine, *theirs)] for key in keys}
    if any(ballot is not None and ballot.round for votes in ballots.values() for ballot in votes):
        assert not all(Call(votes, 1.0).foresee() for votes in (mine, *theirs))
        return
    calls = [star.cast(rank, votes) for rank, votes in enumerate((mine, *theirs))]
    star.settle()
    ends_in_lane = calls[0].foresee() and all(votes == mine for votes in theirs)
    assert star.lanes[0].kept == ends_in_lane
    if ends_in_lane:
        assert [lane.kept for lane in star.lanes] == [1] * SIZE
        assert star.is_empty
    for key, votes in ballots.items():
        if None not in votes:
            for call, cast in zip(calls, (mine, *theirs), strict=True):
                if not call.left:
                    assert call.outcome(0)[[name for name, _ in cast].index(key)] == rule(votes)


def test_votes_that_are_alike_are_kept_by_one_short_message_a_follower():
    star = Star()
    votes = [(f"r{at}", a_ballot()) for at in range(64)]
    calls = [star.cast(rank, votes) for rank in range(SIZE)]
    star.settle()
    assert star.sent == [Votes, Votes, Kept, Kept]
    assert [call.outcome(rank) for rank, call in enumerate(calls)] == [[rule([a_ballot()])] * 64] * SIZE
    assert star.is_empty


def test_votes_that_are_alike_but_not_kept_get_their_rulings():
    star = Star()
    votes = [("r", a_ballot("missing")), ("s", a_ballot())]
    calls = [star.cast(rank, votes) for rank in range(SIZE)]
    star.settle()
    assert star.sent == [Votes, Votes, Rulings, Rulings]
    assert {tuple(ruling.kind for ruling in call.outcome(0)) for call in calls} == {("refetch", "keep")}


@pytest.mark.parametrize("has_lanes", [True, False])
@given(lost_after=st.integers(0, 4), deliveries=st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=6))
def test_losing_a_follower_at_any_moment_gives_the_others_one_ruling(lost_after, deliveries, has_lanes):
    star = Star(has_lanes=has_lanes)
    votes = [("r", a_ballot()), ("s", a_ballot())]
    calls = []
    for step, (rank, up) in enumerate([*deliveries, (1, True)]):
        if step < SIZE:
            calls.append((step, star.cast(step, votes)))
        if step == lost_after:
            star.lanes[0].lose(2, "killed")
            star.to_leader[2].clear()
        elif rank == 1 or step < lost_after:
            star.deliver(rank, up=up)
    if lost_after <= len(deliveries):
        # Nothing of a lost rank is read any more.
        star.to_leader[2].clear()
    star.settle()
    known = {rank: call.outcome(rank) for rank, call in calls if rank < 2 and not call.left}
    if 0 in known and 1 in known:
        assert known[0] == known[1]


def test_a_due_of_one_request_ends_the_waiting_for_that_one_alone():
    leader = LeaderLedger(SIZE, {1: ignore, 2: ignore})
    call = Call([("r", a_ballot()), ("s", a_ballot())], 100.0)
    leader.cast(call)
    leader.hear(1, encode(Votes(5.0, [("r", a_ballot())])))
    assert call.due == 5.0
    leader.expire(call, 6.0)
    assert call.due == 100.0
    leader.expire(call, 101.0)
    assert [ruling.kind for ruling in call.outcome(0)] == ["drop", "drop"]
    assert call.outcome(0)[0].causes == ((2, "", "did not vote by the deadline"),)


def test_a_peer_far_ahead_of_everybody_is_refused(monkeypatch):
    monkeypatch.setattr(channel_ledger, "MAX_OPEN_REQUESTS", 3)
    votes = [encode(Votes(math.inf, [(f"r{at}", a_ballot())])) for at in range(4)]
    leader = LeaderLedger(SIZE, {1: ignore, 2: ignore})
    for message in votes[:3]:
        leader.hear(1, message)
    with pytest.raises(RemoteProtocolError, match="more than 3 requests ahead"):
        leader.hear(1, votes[3])


def test_a_due_counts_that_comes_with_the_very_same_ballots():
    leader = LeaderLedger(SIZE, {1: ignore, 2: ignore})
    votes = [("r", a_ballot()), ("s", a_ballot())]
    call = Call(votes, 100.0)
    leader.cast(call)
    leader.hear(1, encode(Votes(5.0, votes)))
    assert call.due == 5.0


def test_calls_whose_ballots_begin_alike_are_told_apart():
    # A key of four bytes a character is longer than what a leader looks up.
    keys = ["\U0001f600" * 1023 + last for last in "ab"]
    star = Star()
    calls = [[star.cast(rank, [(key, a_ballot(tokens=key[-1]))]) for rank in range(SIZE)] for key in keys]
    star.settle()
    for key, of_key in zip(keys, calls, strict=True):
        assert {call.outcome(0)[0] for call in of_key} == {rule([a_ballot(tokens=key[-1])])}
    assert star.is_empty


def test_ballots_too_long_for_one_message_are_refused_and_leave_nothing():
    star = Star()
    long = Ballot(0, True, (RoleBallot("primary", "failed", True, "x" * 4096),))
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="cast fewer at once"):
            star.cast(rank, [(f"r{at}", long) for at in range(4100)])
    assert star.is_empty
    calls = [star.cast(rank, [("r0", a_ballot())]) for rank in range(SIZE)]
    star.settle()
    assert {call.outcome(0)[0].kind for call in calls} == {"keep"}


def test_a_call_holds_no_reference_to_itself():
    # Votes are made by the thousand; each must be gone when its caller lets go of it, not when the collector comes.
    call = Call([("r", a_ballot())], 1.0)
    assert not any(call is value for value in call.keys.values())
