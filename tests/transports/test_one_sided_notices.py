"""Engines that notify each other: a read that went well says so at its source by itself, and proves that it is one."""

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from one_sided_ends import PATIENCE_S, CopyingEngine, copying_world, put, soon, take, until

from omnikv.errors import TransportError
from omnikv.transports.one_sided_messages import Drawn, Sound


@pytest.fixture
def world():
    with copying_world() as opened:
        yield opened


@pytest.fixture
def notified(world):
    """A source and a target whose engines notify each other, and what was told to the source's and not heard yet."""
    notices = deque()
    source = world.source(engine=CopyingEngine(needs_serving=True, notices=notices))
    return source, world.target(engine=CopyingEngine(notices=notices)), notices


def said_drawn(source):
    """The leases of which a target says over its link that it reads nothing more."""
    said, handle = [], source._shelf.handle

    def hear(link, message):
        said.append(message.lease)
        handle(link, message)

    source._shelf.handle = hear
    return said


def test_a_read_that_went_well_ends_by_the_engines_notice_and_by_no_other_word(world, notified):
    source, target, notices = notified
    said = said_drawn(source)
    for number in range(5):
        put(source, world.payload(f"r{number}"))
        assert take(target, world.payload(f"r{number}")) == b"payload"
    assert said == []
    assert source.drain(deadline=soon()) == 0
    assert not source._shelf._noticed
    assert not notices


def test_a_read_that_went_badly_ends_by_the_link(world, notified):
    source, target, _ = notified
    said = said_drawn(source)
    put(source, world.payload("r"))
    target.engine.endings.extend(["broken"] * 3)
    with pytest.raises(TransportError, match="the engine says broken"):
        target.get(world.payload("r"), deadline=soon())
    until(lambda: len(said) == 1)
    until(lambda: not source._shelf._noticed)
    assert take(target, world.payload("r")) == b"payload"


def test_a_notice_that_is_lost_costs_time_and_nothing_else(world, notified):
    source, target, _ = notified
    target.engine.notices = deque()
    said = said_drawn(source)
    put(source, world.payload("r"))
    assert take(target, world.payload("r")) == b"payload"
    assert len(said) == 1
    assert source.drain(deadline=soon()) == 0


def test_a_word_of_the_link_that_crossed_the_answer_to_its_notice_does_no_harm(world, notified):
    source, target, _ = notified
    put(source, world.payload("r"))
    lease = target.get(world.payload("r"), deadline=soon())
    (link,) = target._loop._ready
    with target._lock:
        link.send(Drawn(lease.arrival.lease))
    lease.acknowledge()
    assert source.drain(deadline=soon()) == 0
    assert source.counters == {}


def test_a_notice_that_proves_nothing_ends_no_read_and_is_counted(world, notified):
    source, target, notices = notified
    put(source, world.payload("r"))
    target.engine.may_end.clear()
    outcomes = target.get_as_ready([world.payload("r")], deadline=soon())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(next, outcomes)
        assert target.engine.started.acquire(timeout=PATIENCE_S)
        notices.extend([b"", b"x" * 16, bytes(16), b"longer than any that is given out"])
        until(lambda: source.counters.get("foreign_notices") == 4)
        assert [len(shown) for shown in source._shelf._read.values()] == [1]
        target.engine.may_end.set()
        _, lease = answer.result()
    lease.acknowledge()
    assert source.drain(deadline=soon()) == 0


def test_a_notice_is_told_to_one_target_for_one_lease_and_stale_once_that_is_over(world, notified):
    source, target, notices = notified
    seen = []
    put(source, world.payload("r"))
    start = target.engine.start
    target.engine.start = lambda where, local, places, notice: (
        seen.append(notice),
        start(where, local, places, notice),
    )[1]
    target.get(world.payload("r"), deadline=soon()).release()
    assert take(target, world.payload("r")) == b"payload"
    assert len({*seen}) == 2
    assert {len(notice) for notice in seen} == {16}
    target.engine.may_end.clear()
    put(source, world.payload("next"))
    assert target.get(world.payload("next"), deadline=time.monotonic() + 0.1) is None
    notices.extend(seen[:2])
    until(lambda: source.counters == {"late_notices": 2})
    target.engine.may_end.set()
    assert take(target, world.payload("next")) == b"payload"


def test_the_answer_to_a_notice_may_come_before_the_target_has_looked_at_its_engine(world, notified):
    source, target, _ = notified
    put(source, world.payload("r"))
    looked_at = threading.Event()
    done = target._window._done

    def look_late(transfer, *how):
        until(lambda: transfer.is_sound)
        looked_at.set()
        done(transfer, *how)

    until(lambda: target._window._pullers)
    (puller,) = target._window._pullers.values()
    puller._done = look_late
    assert take(target, world.payload("r")) == b"payload"
    assert looked_at.is_set()


def test_an_answer_to_nothing_frees_no_room_that_the_engine_still_fills(world):
    source, target = world.source(), world.target()
    put(source, world.payload("r"))
    target.engine.may_end.clear()
    assert target.get(world.payload("r"), deadline=time.monotonic() + 0.1) is None
    (link,) = source._loop._ready
    with source._lock:
        ((lease, _),) = source._shelf._read[link].items()
        link.send(Sound(lease))
    (transfers,) = target._window._transfers.values()
    until(lambda: transfers[lease].is_sound)
    assert target.pool.used_nbytes
    target.engine.may_end.set()
    until(lambda: not target.pool.used_nbytes)


def test_an_answer_to_what_still_waits_for_room_harms_nobody_who_gives_up(world):
    source, target = world.source(), world.target(landing_nbytes=1 << 20)
    for name in ("first", "second"):
        put(source, world.payload(name), bytes(1 << 20))
    held = target.get(world.payload("first"), deadline=soon())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(target.get, world.payload("second"), deadline=time.monotonic() + 1.0)
        until(lambda: target._window._waiting)
        (transfer,) = target._window._waiting
        (link,) = source._loop._ready
        with source._lock:
            link.send(Sound(transfer.lease))
        until(lambda: transfer.is_sound)
        assert waiting.result(timeout=PATIENCE_S) is None
    held.acknowledge()
    assert take(target, world.payload("second")) == bytes(1 << 20)
