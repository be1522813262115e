"""Background fetches: delivered once, never doubled, and none survives its owner."""

from __future__ import annotations

import os
import threading
import time

import pytest

from omnikv.errors import PayloadLost, ReceiveTimeout
from omnikv.handoff.prefetcher import Prefetcher

SOON_S = 20.0


class Brought:
    """What a fetch came to; it counts how often it was given back."""

    def __init__(self, *, is_consumed=True):
        self.is_consumed, self.given_back = is_consumed, 0

    def give_back(self):
        self.given_back += 1
        return not self.is_consumed


PAYLOAD = Brought()


def take(prefetcher, request_id, within_s=SOON_S):
    return prefetcher.take(request_id, deadline=time.monotonic() + within_s)


@pytest.fixture
def prefetcher():
    subject = Prefetcher()
    yield subject
    subject.close()


class Gate:
    """A fetch that tells when it begins and ends when it is let go."""

    def __init__(self, outcome=PAYLOAD):
        self.outcome, self.began, self.go, self.runs = outcome, threading.Event(), threading.Event(), 0

    def __call__(self):
        self.runs += 1
        self.began.set()
        assert self.go.wait(20)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_what_was_fetched_is_taken_once(prefetcher):
    assert prefetcher.submit("r", lambda: PAYLOAD)
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "r") == PAYLOAD
    assert take(prefetcher, "r") is None


def test_a_fetch_that_runs_is_waited_for(prefetcher):
    gate = Gate()
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    threading.Timer(0, gate.go.set).start()
    assert take(prefetcher, "r") == PAYLOAD


def test_the_same_request_is_fetched_once(prefetcher):
    gate = Gate()
    prefetcher.submit("r", gate)
    prefetcher.submit("r", gate)
    gate.go.set()
    assert prefetcher.wait_idle(20)
    prefetcher.submit("r", gate)
    assert take(prefetcher, "r") == PAYLOAD
    assert gate.runs == 1


def test_a_request_that_nobody_submitted_is_a_miss(prefetcher):
    assert take(prefetcher, "r") is None


def test_a_fetch_that_found_nothing_is_a_miss(prefetcher):
    prefetcher.submit("r", lambda: None)
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "r") is None


def test_a_fetch_that_failed_is_a_miss_and_is_logged(prefetcher, caplog):
    gate = Gate(ValueError("odd"))
    gate.go.set()
    prefetcher.submit("r", gate)
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "r") is None
    assert "ValueError: odd" in caplog.text


def test_a_fetch_that_still_runs_at_the_deadline_may_be_taken_later(prefetcher):
    gate = Gate()
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    with pytest.raises(ReceiveTimeout, match="still being prefetched"):
        take(prefetcher, "r", within_s=0.0)
    assert "r" in prefetcher
    gate.go.set()
    assert take(prefetcher, "r") is PAYLOAD


@pytest.mark.parametrize("moment", ["ready", "running", "closing"])
def test_what_is_discarded_goes_back_to_its_sender_and_is_not_lost(moment):
    prefetcher, gate = Prefetcher(), Gate(Brought(is_consumed=False))
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    if moment != "running":
        gate.go.set()
        assert prefetcher.wait_idle(20)
    if moment != "closing":
        assert take(prefetcher, "other") is None
    gate.go.set()
    prefetcher.close()
    assert gate.outcome.given_back == 1
    assert take(prefetcher, "r") is None


def test_moving_on_discards_what_was_left_over_and_says_so_if_it_is_asked_for(prefetcher):
    prefetcher.submit("old", lambda: PAYLOAD)
    assert prefetcher.wait_idle(20)
    prefetcher.submit("new", lambda: PAYLOAD)
    assert "old" not in prefetcher
    with pytest.raises(PayloadLost, match="discarded"):
        take(prefetcher, "old")


def test_a_fetch_that_was_discarded_while_it_ran_can_be_adopted_back(prefetcher):
    gate = Gate()
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    take(prefetcher, "other")
    prefetcher.submit("r", gate)
    gate.go.set()
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "r") == PAYLOAD
    assert gate.runs == 1


def test_a_fetch_still_queued_behind_another_is_left_to_its_taker(prefetcher):
    gate, never = Gate(), Gate()
    prefetcher.submit("first", gate)
    assert gate.began.wait(20)
    prefetcher.submit("second", never)
    assert take(prefetcher, "second") is None
    gate.go.set()
    assert prefetcher.wait_idle(20)
    assert never.runs == 0


def test_waiting_says_whether_anything_still_runs(prefetcher):
    gate = Gate()
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    assert not prefetcher.wait_idle(0)
    gate.go.set()
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "r") == PAYLOAD


def test_closing_joins_the_thread_and_takes_nothing_more():
    prefetcher, gate = Prefetcher(), Gate()
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    gate.go.set()
    prefetcher.close()
    prefetcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "omnikv-kv-prefetch"]
    assert not prefetcher.submit("r", gate)


def test_nothing_runs_before_the_first_request():
    before = threading.active_count()
    Prefetcher().close()
    assert threading.active_count() == before


def test_taking_one_request_discards_the_others(prefetcher):
    prefetcher.submit("old", lambda: PAYLOAD)
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "current") is None
    assert "old" not in prefetcher


def test_a_fetch_that_asks_to_exit_is_a_miss_and_the_next_one_works(prefetcher, caplog):
    def leave():
        raise SystemExit(3)

    prefetcher.submit("r", leave)
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "r") is None
    assert "SystemExit: 3" in caplog.text
    prefetcher.submit("s", lambda: PAYLOAD)
    assert prefetcher.wait_idle(20)
    assert take(prefetcher, "s") is PAYLOAD


@pytest.mark.parametrize("endless", [float("inf"), 1e300])
def test_a_wait_may_be_as_long_as_one_likes(prefetcher, endless):
    gates = [Gate(), Gate()]
    waits = [lambda: prefetcher.wait_idle(endless), lambda: prefetcher.take("1", deadline=endless) is PAYLOAD]
    for number, (gate, wait) in enumerate(zip(gates, waits, strict=True)):
        prefetcher.submit(str(number), gate)
        assert gate.began.wait(20)
        threading.Timer(0.05, gate.go.set).start()
        assert wait()


def test_a_time_that_is_no_number_is_no_time(prefetcher):
    gate = Gate()
    prefetcher.submit("r", gate)
    assert gate.began.wait(20)
    assert not prefetcher.wait_idle(float("nan"))
    with pytest.raises(ReceiveTimeout):
        prefetcher.take("r", deadline=float("nan"))
    gate.go.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_fetches_for_itself_what_ran_and_what_was_queued_in_its_parent(prefetcher):
    gate = Gate()
    prefetcher.submit("runs", gate)
    assert gate.began.wait(20)
    child = os.fork()
    if child == 0:
        missed = take(prefetcher, "runs") is None
        again = prefetcher.submit("runs", lambda: PAYLOAD) and prefetcher.wait_idle(20)
        os._exit(0 if missed and again and take(prefetcher, "runs") is PAYLOAD else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.go.set()
    assert take(prefetcher, "runs") is PAYLOAD
