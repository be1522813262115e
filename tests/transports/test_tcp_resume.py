"""What a tcp transport does when its connections break, stall or take their time: it goes on where it stopped."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tcp_ends import TcpWorld
from tcp_proxy import Proxy

from omnikv.errors import ProducerFailed, RemoteProtocolError
from omnikv.transports.base import PutRequest
from omnikv.transports.tcp_messages import Pull
from omnikv.transports.tcp_pull import Transfer

SOON_S = 60.0
MIB = 1 << 20


@pytest.fixture
def world():
    with contextlib.ExitStack() as stack:
        yield TcpWorld(stack)


@pytest.fixture
def between(world):
    """Opens a source, a proxy before it with these settings, and a target behind the proxy."""

    def open_all(lanes=2, dead_after_s=10.0, **settings):
        source = world.source(dead_after_s=dead_after_s, pool_nbytes=64 * MIB)
        proxy = Proxy(source.address, **settings)
        world.stack.callback(proxy.close)
        peers = {0: proxy.address}
        return source, proxy, world.target(peers=peers, lanes=lanes, dead_after_s=dead_after_s)

    return open_all


def content_of(name, nbytes):
    return random.Random(name).randbytes(nbytes)


def put(world, source, name, nbytes):
    with source.reserve(world.payload(name), nbytes) as slot:
        slot.buffer[:] = content_of(name, nbytes)
        slot.publish()


def get(world, target, name, nbytes, timeout_s=SOON_S):
    with target.get(world.payload(name), deadline=time.monotonic() + timeout_s) as lease:
        assert bytes(lease.buffer) == content_of(name, nbytes)
        lease.acknowledge()


def standing_lanes(world, source, target):
    """The lanes of a target of one source, by number, once both stand: a small payload needs only the first."""
    put(world, source, "warm", 10)
    get(world, target, "warm", 10)
    (lanes,) = target._window._lanes.values()
    deadline = time.monotonic() + SOON_S
    while len(lanes) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return lanes


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_payload_goes_on_where_its_lane_broke(world, between, lanes):
    source, proxy, target = between(lanes=lanes, lane_nbytes=3 * MIB + 12345)
    put(world, source, "large", 20 * MIB)
    get(world, target, "large", 20 * MIB)
    assert proxy.lanes_cut >= 6
    # What was under way when a lane was cut came twice, and nothing else.
    assert proxy.forwarded_nbytes < 40 * MIB
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0


def test_several_payloads_go_on_after_the_same_lane_broke(world, between):
    source, proxy, target = between(lanes=2, lane_nbytes=2 * MIB + 777)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        put(world, source, name, 3 * MIB)
    wanted = {world.payload(name): name for name in names}
    for payload, lease in target.get_as_ready(list(wanted), deadline=time.monotonic() + SOON_S):
        assert bytes(lease.buffer) == content_of(wanted[payload], 3 * MIB)
        lease.acknowledge()
        del wanted[payload]
    assert not wanted
    assert proxy.lanes_cut


def test_bytes_that_travel_ahead_go_on_too_and_mean_nothing_before_the_publication(world, between):
    source, proxy, target = between(lane_nbytes=2 * MIB + 99)
    content = content_of("early", 8 * MIB)
    assert target.get(world.payload("early"), deadline=time.monotonic() + 0.2) is None
    waiting = target.get_as_ready([world.payload("early")], deadline=time.monotonic() + SOON_S)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        outcome = pool.submit(lambda: next(waiting))
        while world.payload("early") not in source._source._waiting:
            time.sleep(0.001)
        slot = stack.enter_context(source.reserve(world.payload("early"), len(content)))
        for begin in range(MIB, 8 * MIB, MIB):
            slot.buffer[begin : begin + MIB] = content[begin : begin + MIB]
            slot.written(begin, begin + MIB)
        deadline = time.monotonic() + SOON_S
        while proxy.forwarded_nbytes < 7 * MIB:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not outcome.done()
        slot.buffer[:MIB] = content[:MIB]
        slot.publish()
        _, lease = outcome.result()
    assert bytes(lease.buffer) == content
    lease.acknowledge()
    assert proxy.lanes_cut


def test_what_was_promised_and_dropped_is_forgotten_and_sent_anew(world, between):
    source, _, target = between()
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(get, world, target, "again", 2 * MIB)
        while world.payload("again") not in source._source._waiting:
            time.sleep(0.001)
        for _ in range(5):
            with source.reserve(world.payload("again"), 2 * MIB) as slot:
                slot.buffer[:MIB] = bytes(MIB)
                slot.written(0, MIB)
        put(world, source, "again", 2 * MIB)
        outcome.result()
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0
    deadline = time.monotonic() + SOON_S
    while source.pool.used_nbytes or target.pool.used_nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_get_that_gives_up_in_mid_payload_leaves_the_payload_to_the_next(world, between):
    """D26, D27: the room of the one that gave up is free again, and is not written to by what was under way."""
    source, proxy, target = between()
    put(world, source, "large", 20 * MIB)
    put(world, source, "small", 10)
    get(world, target, "small", 10)
    proxy.is_holding = True
    assert target.get(world.payload("large"), deadline=time.monotonic() + 0.3) is None
    proxy.is_holding = False
    get(world, target, "large", 20 * MIB)
    deadline = time.monotonic() + SOON_S
    while target.pool.used_nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_far_peer_is_as_good_as_a_near_one(world, between):
    source, _, target = between(delay_s=0.01)
    for number in range(3):
        put(world, source, f"r{number}", MIB)
        get(world, target, f"r{number}", MIB)


def test_a_cut_of_everything_is_told_at_once_and_the_next_requests_work(world, between):
    source, proxy, target = between()
    failures = 0
    for number in range(20):
        put(world, source, f"r{number}", 2 * MIB)
        if number % 5 == 2:
            proxy.cut_all()
        try:
            get(world, target, f"r{number}", 2 * MIB)
        except ProducerFailed:
            failures += 1
            get(world, target, f"r{number}", 2 * MIB)
    assert failures <= 4
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0


def test_a_lane_that_stands_still_is_given_up_and_its_payload_pulled_over_another(world, between):
    source, proxy, target = between(dead_after_s=1.0, lane_nbytes=3 * MIB, stalls=1)
    put(world, source, "large", 8 * MIB)
    get(world, target, "large", 8 * MIB)
    assert proxy.lanes_cut >= 2
    assert source.counters.get("stalled_lanes", 0) + target.counters.get("stalled_lanes", 0) >= 1


def test_a_lane_that_was_idle_for_long_is_not_taken_for_one_that_stands_still(world, between):
    source, _, target = between(dead_after_s=1.0)
    for number in range(3):
        put(world, source, f"r{number}", 2 * MIB)
        get(world, target, f"r{number}", 2 * MIB)
        for lane in [*target._lanes._lanes, *source._lanes._lanes]:
            lane.moved_at -= 100.0
    assert source.counters == target.counters == {}


def test_a_small_payload_does_not_wait_for_large_ones(world, between):
    """With a lane that stands still under a large payload, a small one comes through: it has a lane of its own."""
    source, _, target = between(dead_after_s=30.0, lane_nbytes=MIB, stalls=1)
    put(world, source, "large", 8 * MIB)
    put(world, source, "small", 1000)
    wanted = [world.payload("large"), world.payload("small")]
    payload, lease = next(target.get_as_ready(wanted, deadline=time.monotonic() + SOON_S))
    assert payload.transfer_id == "small"
    lease.acknowledge()


def test_a_payload_is_asked_for_once_although_it_was_queued_before_its_lane_stood(world, between):
    """Asked for twice on one lane it came twice, and its first half counted for the whole."""
    source, _, target = between()
    lanes = standing_lanes(world, source, target)
    said = []
    lanes[1]._say = said.append
    transfer = Transfer(99, lanes[1].call.link, 99, 99, 4 * MIB, 99)
    lanes[1].pull(transfer)
    lanes[1].pull(transfer)
    assert said == [Pull(99, 99, 0)]


def test_a_source_that_sends_a_piece_twice_is_not_believed(world, between):
    source, _, target = between()
    lanes = standing_lanes(world, source, target)
    lanes[1]._say = lambda message: None
    transfer = Transfer(99, lanes[1].call.link, 99, 99, 4 * MIB, 99)
    transfer.room = target.pool.take(4 * MIB)
    lanes[1].pull(transfer)
    transfer.received.add(0, MIB)
    with pytest.raises(RemoteProtocolError, match="0 to 1048576 have come already"):
        lanes[1]._begin_piece(99, MIB // 2, MIB)
    with pytest.raises(RemoteProtocolError, match="bytes 4194303 to 4194305 of 4194304"):
        lanes[1]._begin_piece(99, 4 * MIB - 1, 2)
    with pytest.raises(RemoteProtocolError, match="a piece of 4194305 bytes, at most 4194304 are taken"):
        lanes[1]._begin_piece(99, MIB, 4 * MIB + 1)


def test_a_payload_that_can_never_be_received_says_what_to_raise(world):
    source = world.source(pool_nbytes=8 * MIB)
    target = world.target(landing_nbytes=MIB)
    put(world, source, "large", 2 * MIB)
    with pytest.raises(Exception, match="landing_nbytes is 1048576; raise it at this target"):
        target.get(world.payload("large"), deadline=time.monotonic() + SOON_S)
    put(world, source, "fits", MIB // 2)
    get(world, target, "fits", MIB // 2)


def test_room_that_a_lane_still_read_when_its_payload_ended_lets_the_next_in(world):
    """Given back while a lane still read it, it came back later, and whoever waited for it was not told."""
    source, target = world.source(pool_nbytes=4 * MIB), world.target()
    put(world, source, "first", 3 * MIB)
    lease = target.get(world.payload("first"), deadline=time.monotonic() + SOON_S)
    shelf = source._shelf
    ((link, shown),) = shelf._shown.items()
    (token,) = shown
    read_still = shelf.pin(link, token)
    lease.acknowledge()
    until = time.monotonic() + SOON_S
    while source.census()["released"] == 0 and time.monotonic() < until:
        source.drain(deadline=time.monotonic() + 0.001)
    # Whoever drains waits for the room as those do who want it.
    assert source.drain(deadline=0.0) == 1
    with ThreadPoolExecutor(2) as pool:
        draining = pool.submit(source.drain, deadline=time.monotonic() + SOON_S)
        wanted = [PutRequest(world.payload("next"), 3 * MIB)]
        waiting = pool.submit(source.reserve_all, wanted, deadline=time.monotonic() + SOON_S)
        while not source._source._waiting_room._row.waiting:
            assert not waiting.done()
            time.sleep(0.001)
        shelf.release(read_still)
        assert draining.result() == 0
        (slot,) = waiting.result()
        slot.drop()


def test_payloads_wait_for_room_at_the_target_in_turn(world):
    source = world.source(pool_nbytes=16 * MIB)
    target = world.target(landing_nbytes=2 * MIB)
    for number in range(6):
        put(world, source, f"r{number}", MIB + 1)
    held = target.get(world.payload("r0"), deadline=time.monotonic() + SOON_S)
    assert target.get(world.payload("r1"), deadline=time.monotonic() + 0.2) is None
    held.acknowledge()
    for number in range(1, 6):
        get(world, target, f"r{number}", MIB + 1)
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0
