"""Each mistake that a vote can make is caught by the exploration; the shipped steps, in the same scopes, make none."""

from __future__ import annotations

import pytest

from omnikv.testing.explore import Scope, explore
from omnikv.testing.mutants import MUTANTS

SCOPES = [
    Scope(ranks=2, alphabet="one role", requests=2, rounds=2, crashes=0),
    Scope(ranks=3, alphabet="small", crashes=1),
]

HARM = {
    "timeout-means-drop": "ends request 0 with keep primary, another rank with drop",
    "no-deadline-at-leader": "its deadline does not end its waiting",
    "no-deadline-at-follower": "its deadline does not end its waiting",
    "early-keep": "keep without every rank's ballot",
    "names-compared-alone": "keep without every rank's ballot, equal in contents",
    "first-mismatch-return": "waits although nothing more comes",
    "vote-skipped-on-error": "",
    "late-ballot-counts-for-next": "a ballot on request 0 counts for 1",
    "owed-ballot-forgotten": "a ballot on request 0 counts for 1",
    "old-ruling-for-next": "a ruling on request 1 is taken for 0's",
    "refetch-in-same-round": "round 1 of a request is numbered 0",
    "refetch-with-old-ballots": "the step refuses",
}


def test_every_mutant_is_tested():
    assert set(HARM) == set(MUTANTS)


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_the_shipped_steps_pass_where_mutants_are_caught(scope):
    assert explore(scope).violation == ""


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_exploration_catches(name):
    found = explore(SCOPES[0], MUTANTS[name])
    assert found.violation
    assert HARM[name] in found.violation
    assert found.path


@pytest.mark.parametrize(
    "name", sorted(set(MUTANTS) - {"late-ballot-counts-for-next", "owed-ballot-forgotten", "old-ruling-for-next"})
)
def test_the_exploration_catches_among_three_ranks_and_in_a_single_request(name):
    assert explore(SCOPES[1], MUTANTS[name]).violation


def test_a_rank_that_does_not_vote_on_an_error_leaves_the_others_waiting():
    found = explore(Scope(ranks=2, alphabet="small", crashes=0), MUTANTS["vote-skipped-on-error"])
    assert found.violation == "rank 0 waits although nothing more comes"
