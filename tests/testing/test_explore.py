"""The shipped steps of the vote keep their promises in every order of events, by exhaustion."""

from __future__ import annotations

import pytest

from omnikv.core.messages import Ballot, RoleBallot, spell_facts
from omnikv.testing.explore import ALPHABETS, SCOPES, Scope, check_rulings, explore, main
from omnikv.testing.explore_ballots import is_sound_to_keep, right_decision
from omnikv.testing.mutants import MUTANTS


def have(role, content="A", *, required=True):
    return RoleBallot(role, "have", required, facts=spell_facts({"content": content}))


def missing(role, *, required=True):
    return RoleBallot(role, "missing", required, cause="nothing yet")


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_every_invariant_holds_in_every_order_of_events(scope):
    found = explore(scope)
    assert (found.violation, found.path) == ("", ())
    assert found.transitions > found.states > 10_000


@pytest.mark.parametrize(("ranks", "alphabet"), [(2, "full"), (3, "full"), (4, "words")])
def test_the_ruling_on_every_set_of_ballots_is_the_right_one(ranks, alphabet):
    count, wrong = check_rulings(ranks, alphabet)
    assert wrong == []
    assert count > 1000


def test_crashes_deadlines_and_a_second_request_each_add_states():
    sizes = [
        explore(Scope(ranks=2, alphabet="tiny", requests=requests, crashes=crashes)).states
        for requests, crashes in [(1, 0), (1, 1), (1, 2), (2, 2)]
    ]
    assert sizes == sorted(set(sizes))


def test_followers_that_differ_in_name_alone_are_one_state():
    one_more_follower = [explore(Scope(ranks=ranks, alphabet="tiny", crashes=0, rounds=1)).states for ranks in (2, 3)]
    # Without it a second follower would square what one can be in; interchangeable ones make about half of that.
    assert one_more_follower[1] < one_more_follower[0] ** 2 / 2


def test_after_a_refetch_a_rank_keeps_what_it_had():
    held = Ballot(0, True, (missing("cfg_text", required=False), have("primary", "B")))
    following = ALPHABETS["full"].following(held, 1, is_last_round=False)
    assert {ballot.roles[1] for ballot in following} == {have("primary", "B")}
    assert {ballot.roles[0].standing for ballot in following} == {"have", "missing", "failed"}
    assert {ballot.round for ballot in following} == {1}


def test_in_the_last_round_no_rank_has_time_for_another():
    assert not any(ballot.can_refetch for ballot in ALPHABETS["full"].first(is_last_round=True))


def test_the_oracle_drops_what_lacks_a_required_role_on_every_rank():
    ballots = [Ballot(0, False, (missing("primary"),))] * 2
    assert right_decision(ballots)[0] == "drop"


@pytest.mark.parametrize(
    "ballots",
    [
        [Ballot(0, True, (have("primary"),)), None],
        [Ballot(0, True, (have("primary"),)), Ballot(0, True, (have("primary", "B"),))],
        [Ballot(0, True, (missing("primary"),))] * 2,
    ],
    ids=["a ballot is missing", "contents differ", "a required role is missing"],
)
def test_the_oracle_finds_these_ballots_unsound_to_keep(ballots):
    assert not is_sound_to_keep(ballots, ("primary",))


def test_a_ruling_that_leaves_a_required_role_out_is_unsound():
    assert not is_sound_to_keep([Ballot(0, True, (have("primary"),))] * 2, ())


def test_the_command_prints_states_and_transitions(capsys):
    assert main(["--ranks", "2", "--crashes", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, alphabet 'tiny', requests 1, rounds 2, crashes 1: " in out
    assert "every invariant holds" in out


def test_the_command_prints_the_shortest_way_to_what_breaks(capsys):
    assert main(["--ranks", "2", "--mutant", "timeout-means-drop"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN: rank 0 ends request 0 with keep primary, another rank with drop" in out
    assert "reaches its deadline" in out


def test_a_path_names_each_rank_alike_from_beginning_to_end():
    # All three ranks must vote before this one shows: rank 0 answers one of two followers, and the other waits.
    found = explore(Scope(ranks=3, alphabet="tiny", crashes=0), MUTANTS["first-mismatch-return"])
    by_rank = {rank: [line for line in found.path if line.startswith(f"rank {rank} ")] for rank in range(3)}
    assert sum(map(len, by_rank.values())) == len(found.path)
    for rank in (1, 2):
        cast = next(line for line in by_rank[rank] if " casts " in line).split(" casts ")[1]
        assert f"rank 0 hears rank {rank}'s ballot of {cast}" in found.path
    waiting = found.violation.split(" waits")[0]
    assert waiting in {"rank 0", "rank 1", "rank 2"}
