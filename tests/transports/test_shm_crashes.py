"""Payloads of the shm transport between processes that abort, die, fail or are slow: nothing is torn, nothing stays."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnikv.errors import AlreadyConsumed, ProducerFailed
from omnikv.transports.shm_address import rank_address

SOON_S = 60.0


def lease_from(target, payload):
    lease = target.get(payload, deadline=time.monotonic() + SOON_S)
    assert lease is not None
    return lease


def test_d14_a_thousand_puts_of_which_half_are_aborted_leave_what_was_there_before(world):
    source, target = world.spawn("source"), world.open("target")
    before, resident = None, 0
    for batch in range(0, 1200, 40):
        if batch == 200:
            assert source.call("drain") == 0
            before, resident = source.call("held"), source.call("resident_nbytes")
        source.call("put_and_abort", batch, 40, 64 << 10)
        for number in range(batch, batch + 40, 2):
            lease_from(target, world.payload(f"r{number}")).acknowledge()
    assert source.call("drain") == 0
    assert source.call("held") == before
    assert before["used"] == before["leases"] == sum(before["live"]) == 0
    assert source.call("resident_nbytes") - resident < 8 << 20, "500 aborted payloads were 32 MiB"
    assert not [name for name in os.listdir("/dev/shm") if "omnikv" in name]


def kill_and_restart(world, rounds, seed):
    """Rounds in which either process, or both, are killed at any moment; what came through before is whole."""
    chance = random.Random(seed)
    ends = {side: world.spawn(side) for side in ("source", "target")}
    received = 0
    for number in range(rounds):
        ends["source"].call("stream", f"round-{number}")
        ends["target"].call("drink", f"round-{number}")
        time.sleep(chance.uniform(0.0, 0.08))
        killed = chance.choice([("source",), ("target",), ("source", "target")])
        for side in killed:
            ends[side].kill()
        if "target" not in killed:
            result = ends["target"].call("stop")
            assert result["torn"] == 0
            assert result["ended_by"] in ("ProducerFailed", "")
            received += result["done"]
        if "source" not in killed:
            ends["source"].call("stop")
            ends["source"].call("drain")
            held = ends["source"].call("held")
            assert held["used"] == held["leases"] == sum(held["live"]) == 0
        for side in killed:
            ends[side] = world.spawn(side)
    return ends, received


def assert_works(ends):
    ends["source"].call("put", "last", "payload")
    assert ends["target"].call("lease", "last") == "payload"
    ends["target"].call("acknowledge", "last")
    assert ends["source"].call("drain") == 0


def assert_nothing_is_left(world, ends):
    for end in ends.values():
        end.kill()
    listening = Path("/proc/net/unix").read_text()
    for side in ("source", "target"):
        assert rank_address(world.edge, side, 0)[1:].decode() not in listening
    assert not [name for name in os.listdir("/dev/shm") if "omnikv" in name]


def test_d15_processes_that_are_killed_at_any_moment_tear_nothing_and_leave_nothing(world):
    ends, received = kill_and_restart(world, rounds=6, seed=11)
    assert_works(ends)
    assert received > 0
    assert_nothing_is_left(world, ends)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_d15_fifty_rounds_of_kills_at_any_moment_tear_nothing_and_leave_nothing(world, seed):
    ends, received = kill_and_restart(world, rounds=50, seed=seed)
    assert_works(ends)
    assert received > 100
    assert_nothing_is_left(world, ends)


def test_d08_three_reading_processes_each_get_the_payload_and_a_fourth_is_told_at_once(world):
    source = world.open("source", num_readers=3)
    readers = [world.spawn("target", reader=number) for number in range(3)]
    readers[2].begin("lease", "r1")
    with source.reserve(world.payload("r1"), 7) as slot:
        slot.buffer[:] = b"payload"
        slot.publish()
    assert readers[2].finish() == "payload"
    assert readers[0].call("lease", "r1") == "payload"
    readers[0].call("acknowledge", "r1")
    fourth = world.open("target", reader=3)
    with pytest.raises(AlreadyConsumed, match="reader 3 is not one of its 3"):
        lease_from(fourth, world.payload("r1"))
    readers[2].call("acknowledge", "r1")
    assert source.drain(deadline=0.0) == 1
    assert source.pool.used_nbytes > 0
    assert readers[1].call("lease", "r1") == "payload"
    readers[1].kill()
    successor = world.spawn("target", reader=1)
    assert successor.call("lease", "r1") == "payload"
    successor.call("acknowledge", "r1")
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0
    assert source.pool.used_nbytes == 0


@pytest.mark.parametrize("what", ["dies", "fails", "is slow"])
def test_d10_a_producer_that_dies_or_fails_is_heard_of_and_one_that_is_slow_is_waited_for(world, what):
    source, target = world.spawn("source"), world.open("target")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease_from, target, world.payload("r1"))
        source.call("until_waited_for", "r1")
        if what == "dies":
            source.kill()
        elif what == "fails":
            source.call("fail", "r1", "out of memory")
        else:
            source.call("put", "r1", "late")
            assert bytes(waiting.result().buffer) == b"late"
            return
        words = "closed its connection" if what == "dies" else "out of memory"
        with pytest.raises(ProducerFailed, match=words):
            waiting.result(timeout=SOON_S / 2)


def test_d10_one_who_asks_for_a_dead_producer_does_not_wait_for_its_deadline(world):
    source, target = world.spawn("source"), world.open("target")
    source.call("put", "r1", "x")
    lease_from(target, world.payload("r1")).acknowledge()
    source.kill()
    with pytest.raises(ProducerFailed, match=rf"pid {source.pid}"):
        lease_from(target, world.payload("r2"))
    with pytest.raises(ProducerFailed, match=rf"pid {source.pid}\) closed its connection .* ago and has not come back"):
        lease_from(target, world.payload("r2"))
    successor = world.spawn("source")
    successor.call("put", "r2", "again")
    assert bytes(lease_from(target, world.payload("r2")).buffer) == b"again"


def test_sixty_four_waiting_receivers_take_no_processor_time(world):
    world.open("source", peers=tuple(range(64)))
    target = world.spawn("target")
    assert target.call("wait_with_many", 64, 1.0) < 0.2
