"""Rounds end one slice after another, until the deadline; however patient a request is, they come to an end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.rounds import round_end
from omnikv.core.verdict import MAX_ROUNDS


def ends(timeout_s, slice_s):
    """Every round's end of a request that starts at 100."""
    found = []
    for number in range(MAX_ROUNDS):
        end_s, is_followed = round_end(100.0, 100.0 + timeout_s, slice_s, number)
        found.append(end_s)
        if not is_followed:
            return found
    raise AssertionError("the rounds do not end")


def test_slices_are_equal_and_the_last_round_ends_at_the_deadline():
    assert ends(2.0, 0.5) == [100.5, 101.0, 101.5, 102.0]


def test_a_slice_that_would_leave_next_to_nothing_is_the_last():
    assert ends(1.01, 0.5) == [100.5, 101.01]


def test_a_request_shorter_than_a_slice_has_one_round():
    assert ends(0.1, 0.5) == [100.1]


def test_a_request_of_endless_patience_still_hears_of_failures_early_on():
    found = ends(1e9, 0.5)
    assert found[0] == 100.5
    assert found[99] == pytest.approx(150.0)
    assert found[-1] == 100.0 + 1e9


@given(st.floats(0.001, 1e9), st.floats(0.001, 1e6))
def test_rounds_go_forward_and_end_at_the_deadline(timeout_s, slice_s):
    found = ends(timeout_s, slice_s)
    assert found == sorted(found)
    assert found[-1] == 100.0 + timeout_s
