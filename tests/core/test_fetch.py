"""What a receiver asks for next, and when it stops."""

from __future__ import annotations

import pytest

from omnikv.core.fetch import Arrived, Complete, GiveUp, Pause, RoundEnded, Shard, begin, step
from omnikv.errors import LocalProtocolError

A, B = Shard("a", 0), Shard("b", 1)


def run(state, *events):
    effects = ()
    for event in events:
        state, effects = step(state, event)
    return state, effects


def test_it_is_complete_once_every_shard_came():
    state, effects = run(begin((A, B), deadline_s=10), Arrived("b"), Arrived("a"), RoundEnded(0))
    assert effects == (Complete(),)
    assert state.missing == ()


def test_only_what_is_missing_is_asked_for_again():
    state, _ = run(begin((A, B), deadline_s=10), Arrived("a"), RoundEnded(0))
    assert state.missing == (B,)


def test_pauses_double_up_to_their_longest_while_nothing_comes():
    state, pauses = begin((A,), deadline_s=1000), []
    for now in range(8):
        state, (effect,) = step(state, RoundEnded(now))
        pauses.append(effect.seconds)
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]


def test_a_round_that_brought_something_makes_the_next_pause_short_again():
    state, _ = run(begin((A, B), deadline_s=1000), *(RoundEnded(0) for _ in range(6)))
    _, effects = run(state, Arrived("a"), RoundEnded(0))
    assert effects == (Pause(0.001),)


def test_a_pause_ends_at_the_deadline_and_one_more_round_follows():
    state, effects = run(begin((A,), deadline_s=1.0, first_pause_s=5, longest_pause_s=5), RoundEnded(0.25))
    assert effects == (Pause(0.75),)
    _, effects = run(state, RoundEnded(1.0))
    assert effects == (GiveUp((A,)),)


def test_a_deadline_that_has_passed_still_allows_one_round():
    _, effects = run(begin((A,), deadline_s=1.0), Arrived("a"), RoundEnded(99))
    assert effects == (Complete(),)


def test_giving_up_names_what_is_missing():
    _, effects = run(begin((A, B), deadline_s=1.0), Arrived("a"), RoundEnded(1.5))
    assert effects == (GiveUp((B,)),)


@pytest.mark.parametrize("events", [[Arrived("c")], [Arrived("a"), Arrived("a")]])
def test_an_arrival_that_nobody_waits_for_is_a_misuse_with_its_history(events):
    with pytest.raises(LocalProtocolError, match="not missing") as caught:
        run(begin((A,), deadline_s=1), *events)
    assert len(caught.value.history) == len(events)


@pytest.mark.parametrize("wanted", [(), (A, Shard("a", 1))])
def test_shards_that_cannot_be_told_apart_are_refused(wanted):
    with pytest.raises(LocalProtocolError, match="a key of its own"):
        begin(wanted, deadline_s=1)


def test_a_deadline_that_is_no_number_has_passed():
    _, effects = run(begin((A,), deadline_s=float("nan")), RoundEnded(0))
    assert effects == (GiveUp((A,)),)
