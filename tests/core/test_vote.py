"""The steps of a vote at the leader and at a follower: what each event leads to, and which it cannot take."""

from __future__ import annotations

import pytest

from omnikv.core.messages import Ballot, RoleBallot, Ruling, decode_vote, encode_vote, spell_facts
from omnikv.core.vote import (
    Announce,
    Cast,
    Conclude,
    Doubt,
    Expired,
    FollowerState,
    Heard,
    LeaderState,
    Lost,
    Report,
    Ruled,
    step_follower,
    step_leader,
)
from omnikv.errors import LocalProtocolError, RemoteProtocolError

HAVE = RoleBallot("primary", "have", True, facts=spell_facts({"tokens": "3"}))
MISSING = RoleBallot("primary", "missing", True, cause="nothing came")


def ballot(entry=HAVE, number=0, can_refetch=True):
    return Ballot(number, can_refetch, (entry,))


def lead(size, *events):
    """The leader's state and all effects after these events."""
    state, effects = LeaderState(size=size), []
    for event in events:
        state, more = step_leader(state, event)
        effects += more
    return state, effects


def follow(*events):
    """A follower's state and all effects after these events."""
    state, effects = FollowerState(rank=1), []
    for event in events:
        state, more = step_follower(state, event)
        effects += more
    return state, effects


def test_the_leader_rules_when_the_last_ballot_is_in_whatever_their_order():
    keep = Ruling("keep", 0, usable=("primary",))
    for events in (
        [Cast(ballot()), Heard(1, ballot()), Heard(2, ballot())],
        [Heard(2, ballot()), Heard(1, ballot()), Cast(ballot())],
    ):
        assert lead(3, *events[:2])[1] == []
        state, effects = lead(3, *events)
        assert effects == [Announce((1, 2), keep), Conclude(keep)]
        assert state.is_over


def test_a_refetch_opens_a_new_round_for_everyone():
    state, effects = lead(2, Heard(1, ballot(MISSING)), Cast(ballot()))
    assert [type(effect) for effect in effects] == [Announce, Conclude]
    assert effects[1].ruling.kind == "refetch"
    assert (state.round, state.is_over) == (1, False)
    state, effects = step_leader(state, Heard(1, ballot(number=1)))
    state, effects = step_leader(state, Cast(ballot(number=1)))
    assert effects[1].ruling == Ruling("keep", 1, usable=("primary",))


def test_a_ballot_of_an_earlier_round_is_not_counted_in_a_later_one():
    state, _ = lead(2, Heard(1, ballot(MISSING)), Cast(ballot()))
    with pytest.raises(LocalProtocolError, match="round 1 cannot take this now: heard rank 1 round 0"):
        step_leader(state, Heard(1, ballot(number=0)))


def test_at_its_deadline_the_leader_drops_and_names_who_did_not_vote():
    state, effects = lead(3, Cast(ballot()), Heard(1, ballot(MISSING)), Expired())
    ruling = effects[-1].ruling
    assert ruling.kind == "drop"
    assert ruling.causes == ((1, "primary", "nothing came"), (2, "", "did not vote by the deadline"))
    assert effects[0].ranks == (1, 2)
    assert not state.is_over


def test_a_late_ballot_after_a_drop_closes_the_books_and_changes_nothing():
    state, _ = lead(2, Cast(ballot()), Expired())
    assert state.expects(1)
    state, effects = step_leader(state, Heard(1, ballot()))
    assert effects == ()
    assert state.is_over
    assert not state.expects(1)


def test_a_lost_rank_drops_the_request_as_soon_as_the_leader_has_voted():
    state, effects = lead(3, Lost(2, "connection closed"))
    assert effects == []
    state, effects = step_leader(state, Cast(ballot()))
    assert effects[1].ruling.kind == "drop"
    assert effects[0].ranks == (1,)
    assert (2, "", "gone (connection closed)") in effects[1].ruling.causes
    state, _ = step_leader(state, Heard(1, ballot()))
    assert state.is_over


def test_a_rank_that_voted_before_it_was_lost_still_counts():
    _, effects = lead(2, Heard(1, ballot()), Lost(1, "died"), Cast(ballot()))
    assert effects[-1] == Conclude(Ruling("keep", 0, usable=("primary",)))


def test_losing_a_rank_after_the_end_changes_nothing():
    state, _ = lead(2, Cast(ballot()), Heard(1, ballot()))
    assert step_leader(state, Lost(1, "closed"))[1] == ()


@pytest.mark.parametrize(
    "events",
    [
        [Cast(ballot()), Cast(ballot())],
        [Heard(1, ballot()), Heard(1, ballot())],
        [Heard(0, ballot())],
        [Heard(5, ballot())],
        [Expired()],
        [Ruled(Ruling("keep", 0))],
        [Cast(ballot()), Heard(1, ballot()), Expired()],
    ],
)
def test_the_leader_refuses_what_cannot_happen_and_shows_the_history(events):
    with pytest.raises(LocalProtocolError, match="cannot take this now") as caught:
        lead(2, *events)
    assert len(caught.value.history) == len(events)


def test_a_follower_reports_and_concludes_what_the_leader_rules():
    keep = Ruling("keep", 0, usable=("primary",))
    state, effects = follow(Cast(ballot()), Ruled(keep))
    assert effects == [Report(ballot()), Conclude(keep)]
    assert state.is_over


def test_a_follower_votes_again_in_the_round_that_a_refetch_opens():
    again, keep = Ruling("refetch", 0, missing=((1, "primary"),)), Ruling("keep", 1, usable=("primary",))
    _, effects = follow(Cast(ballot(MISSING)), Ruled(again), Cast(ballot(number=1)), Ruled(keep))
    assert effects == [Report(ballot(MISSING)), Conclude(again), Report(ballot(number=1)), Conclude(keep)]


def test_a_followers_deadline_never_means_drop():
    state, effects = follow(Cast(ballot()), Expired())
    assert effects[-1] == Doubt("no ruling came by the deadline")
    assert step_follower(state, Ruled(Ruling("keep", 0)))[1] == ()


@pytest.mark.parametrize("events", [[Cast(ballot()), Lost(0, "killed")], [Lost(0, "killed"), Cast(ballot())]])
def test_a_follower_without_its_leader_is_in_doubt(events):
    assert follow(*events)[1][-1] == Doubt("the leader is gone (killed)")


def test_a_drop_may_come_before_the_ballot_which_is_cast_all_the_same():
    drop = Ruling("drop", 0, causes=((2, "", "gone"),))
    state, effects = follow(Ruled(drop), Cast(ballot()))
    assert effects == [Report(ballot()), Conclude(drop)]
    assert state.is_over


@pytest.mark.parametrize(
    "events",
    [
        [Ruled(Ruling("keep", 0))],
        [Ruled(Ruling("refetch", 0))],
        [Cast(ballot(number=1))],
        [Cast(ballot()), Ruled(Ruling("keep", 1))],
        [Cast(ballot()), Cast(ballot())],
        [Expired()],
        [Heard(1, ballot())],
    ],
)
def test_a_follower_refuses_what_cannot_happen(events):
    with pytest.raises(LocalProtocolError, match="cannot take this now"):
        follow(*events)


def test_a_vote_survives_its_encoding():
    vote = decode_vote(encode_vote("r/1", "f", ballot(MISSING)))
    assert (vote.key, vote.facts, vote.ballot) == ("r/1", "f", ballot(MISSING))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x93\xa4vote\xa1k", bytes(200)])
def test_bytes_that_are_no_vote_are_refused(data):
    with pytest.raises(RemoteProtocolError, match="vote cannot be read"):
        decode_vote(data)
