"""A prefetch slot's life, and every event that it cannot take."""

from __future__ import annotations

import itertools

import pytest

from omnikv.core.prefetch import Effect, Event, Kind, Phase, Table, step
from omnikv.errors import LocalProtocolError


def after(*kinds, table=None, consumed=True):
    table = table if table is not None else Table()
    effects = ()
    for kind in kinds:
        table, effects = step(table, Event(kind, "r", consumed))
    return table, effects


def test_a_fetch_that_ends_before_it_is_asked_for_is_delivered_once():
    table, effects = after(Kind.SUBMIT, Kind.START, Kind.FINISH, Kind.TAKE)
    assert effects == (Effect.DELIVER,)
    assert table.phase("r") is None
    assert after(Kind.TAKE, table=table)[1] == (Effect.REPORT_MISS,)


def test_a_running_fetch_is_waited_for():
    table, effects = after(Kind.SUBMIT, Kind.START, Kind.TAKE)
    assert effects == (Effect.AWAIT,)
    assert after(Kind.FINISH, Kind.TAKE, table=table)[1] == (Effect.DELIVER,)


def test_a_fetch_that_has_not_begun_is_taken_back_and_counts_as_a_miss():
    table, effects = after(Kind.SUBMIT, Kind.TAKE)
    assert effects == (Effect.UNQUEUE, Effect.REPORT_MISS)
    assert table.phase("r") is None


def test_submitting_twice_enqueues_once():
    _, effects = after(Kind.SUBMIT, Kind.SUBMIT)
    assert effects == ()


def test_discarding_what_has_not_begun_leaves_nothing():
    table, effects = after(Kind.SUBMIT, Kind.DISCARD)
    assert effects == (Effect.UNQUEUE,)
    assert table.phase("r") is None


def test_a_discarded_payload_is_remembered_as_lost_and_reported_once():
    table, effects = after(Kind.SUBMIT, Kind.START, Kind.FINISH, Kind.DISCARD)
    assert effects == (Effect.DROP,)
    assert table.phase("r") is Phase.LOST
    table, effects = after(Kind.TAKE, table=table)
    assert effects == (Effect.REPORT_LOSS,)
    assert table.phase("r") is None


def test_a_discarded_miss_leaves_nothing():
    table, effects = after(Kind.SUBMIT, Kind.START, Kind.FINISH, Kind.DISCARD, consumed=False)
    assert effects == (Effect.DROP,)
    assert table.phase("r") is None


@pytest.mark.parametrize(("consumed", "phase"), [(True, Phase.LOST), (False, None)])
def test_what_an_orphan_brings_is_dropped(consumed, phase):
    table, effects = after(Kind.SUBMIT, Kind.START, Kind.DISCARD, Kind.FINISH, consumed=consumed)
    assert effects == (Effect.DROP,)
    assert table.phase("r") is phase


@pytest.mark.parametrize("again", [Kind.SUBMIT, Kind.TAKE])
def test_an_orphan_that_is_asked_for_again_in_time_is_adopted_back(again):
    table, _ = after(Kind.SUBMIT, Kind.START, Kind.DISCARD, again)
    assert table.phase("r") is Phase.RUNNING
    assert after(Kind.FINISH, Kind.TAKE, table=table)[1] == (Effect.DELIVER,)


def test_a_lost_request_that_is_sent_again_starts_afresh():
    table, effects = after(Kind.SUBMIT, Kind.START, Kind.FINISH, Kind.DISCARD, Kind.SUBMIT)
    assert effects == (Effect.ENQUEUE,)
    assert table.phase("r") is Phase.QUEUED


def test_requests_do_not_touch_each_other():
    table, _ = step(Table(), Event(Kind.SUBMIT, "a"))
    table, _ = step(table, Event(Kind.SUBMIT, "b"))
    table, _ = step(table, Event(Kind.START, "a"))
    assert table.having(Phase.QUEUED, Phase.RUNNING) == ("a", "b")
    assert table.phase("b") is Phase.QUEUED


def test_only_so_many_losses_are_remembered():
    table = Table()
    for number in range(100):
        for kind in (Kind.SUBMIT, Kind.START, Kind.FINISH, Kind.DISCARD):
            table, _ = step(table, Event(kind, str(number), consumed=True))
    assert len(table.slots) == 64
    assert table.phase("99") is Phase.LOST


REACH = {
    None: [],
    Phase.QUEUED: [Kind.SUBMIT],
    Phase.RUNNING: [Kind.SUBMIT, Kind.START],
    Phase.READY: [Kind.SUBMIT, Kind.START, Kind.FINISH],
    Phase.ORPHANED: [Kind.SUBMIT, Kind.START, Kind.DISCARD],
    Phase.LOST: [Kind.SUBMIT, Kind.START, Kind.FINISH, Kind.DISCARD],
}
WORKER_MAY = {(Phase.QUEUED, Kind.START), (Phase.RUNNING, Kind.FINISH), (Phase.ORPHANED, Kind.FINISH)}


@pytest.mark.parametrize(("phase", "kind"), list(itertools.product(REACH, Kind)))
def test_every_phase_takes_the_owners_events_and_only_the_fitting_ones_of_the_worker(phase, kind):
    table, _ = after(*REACH[phase])
    assert table.phase("r") is phase
    if kind in (Kind.SUBMIT, Kind.TAKE, Kind.DISCARD) or (phase, kind) in WORKER_MAY:
        assert after(kind, table=table)[0].history[-1].startswith(kind.value)
        return
    with pytest.raises(LocalProtocolError, match="cannot take") as caught:
        after(kind, table=table)
    assert len(caught.value.history) == len(REACH[phase]) + 1
