"""Calls on a group that may block: answered, refused, or given up with the group."""

from __future__ import annotations

import threading
import time

import pytest

from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.handoff import bounded_calls
from omnikv.handoff.bounded_calls import BoundedCalls


def make(calls, run, within_s=20.0):
    return calls.make("the verdict", run, deadline=time.monotonic() + within_s, request_id="r1")


def test_calls_that_are_answered_may_be_followed_by_others():
    calls = BoundedCalls()
    assert [make(calls, lambda: 1), make(calls, lambda: 2)] == [1, 2]


def test_an_error_of_ours_leaves_the_group_in_use():
    calls = BoundedCalls()

    def refuse():
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        make(calls, refuse)
    assert make(calls, lambda: 1) == 1


@pytest.mark.parametrize("error", [VerdictInDoubt("lost"), RuntimeError("closed"), SystemExit(3)])
def test_calls_that_failed_leave_the_group_unusable(error):
    calls = BoundedCalls()

    def fail():
        raise error

    with pytest.raises(VerdictInDoubt, match="the verdict"):
        make(calls, fail)
    with pytest.raises(VerdictInDoubt, match="failed before"):
        make(calls, lambda: 1)


def test_calls_that_are_late_leave_the_group_unusable():
    calls, go = BoundedCalls(), threading.Event()
    with pytest.raises(VerdictInDoubt, match="deadline"):
        make(calls, go.wait, within_s=0.0)
    go.set()
    with pytest.raises(VerdictInDoubt, match="did not answer"):
        make(calls, lambda: 1)


def test_a_caller_that_is_interrupted_leaves_the_group_unusable(monkeypatch):
    # Its thread still waits inside the group, and would take the next exchange's answer for its own.
    calls = BoundedCalls()

    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(bounded_calls, "run_until", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(calls, lambda: 1)
    monkeypatch.undo()
    with pytest.raises(VerdictInDoubt, match="interrupted"):
        make(calls, lambda: 1)
