"""What a shm transport holds while open, and that it holds nothing afterwards."""

import contextlib
import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from omnikv.errors import ConfigError, LocalProtocolError, ProducerFailed, PutRejected, TransportError
from omnikv.tensors.borrow import borrowed
from omnikv.transports import shm_pool
from omnikv.transports.memory_left import MemoryBound, memory_bounds
from omnikv.transports.shm_pool import MAX_SEGMENTS, PAGE_NBYTES, POISON, Pool

SOON_S = 60.0
MIB = 1 << 20


def held():
    """The open descriptors, threads and mapped pools of this process, without what other tests' tracebacks kept."""
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("omnikv"))
    mappings = Path("/proc/self/maps").read_text().count("memfd:omnikv")
    return sorted(os.listdir("/proc/self/fd"), key=int), threads, mappings


def put(source, payload, data):
    with source.reserve(payload, len(data)) as slot:
        slot.buffer[:] = data
        slot.publish()


def lease_from(target, payload):
    lease = target.get(payload, deadline=time.monotonic() + SOON_S)
    assert lease is not None
    return lease


def test_everything_is_given_back_at_close(world):
    before = held()
    for life in range(5):
        source, target = world.open("source", peers=(0, 1)), world.open("target", peers=(0, 1))
        put(source, world.payload("r1"), b"payload")
        put(source, world.payload("r2"), b"payload")
        lease_from(target, world.payload("r1")).acknowledge()
        lease = lease_from(target, world.payload("r2"))
        slot = source.reserve(world.payload("r3"), 10)
        if life % 2:
            source.close()
            target.close()
        else:
            target.close()
            source.close()
        del lease, slot
        assert held() == before


def test_one_thread_and_few_descriptors_serve_an_open_end(world):
    _, threads_before, mappings_before = held()
    source, target = world.open("source"), world.open("target")
    put(source, world.payload("r1"), b"x")
    lease_from(target, world.payload("r1")).acknowledge()
    _, threads, mappings = held()
    assert sorted(set(threads) - set(threads_before)) == ["omnikv-shm-source-0", "omnikv-shm-target-0"]
    assert mappings - mappings_before == 2
    for number in range(100):
        put(source, world.payload(f"r{number}"), b"x")
        lease_from(target, world.payload(f"r{number}")).acknowledge()
    assert held()[1:] == (threads, mappings)


def test_the_receiver_reads_in_place_and_a_tensor_keeps_the_memory(world):
    source, target = world.open("source"), world.open("target")
    put(source, world.payload("r1"), torch.arange(1000, dtype=torch.int64).numpy().tobytes())
    lease = lease_from(target, world.payload("r1"))
    tensor = borrowed(lease.buffer).view(torch.int64)
    assert tensor.data_ptr() % PAGE_NBYTES == 0
    lease.acknowledge()
    source.close()
    target.close()
    with pytest.raises(LocalProtocolError, match="lease has ended"):
        _ = lease.buffer
    del lease
    assert torch.equal(tensor, torch.arange(1000))


def test_the_pool_is_reused_and_not_grown_by_traffic(world):
    source, target = world.open("source", segment_nbytes=MIB), world.open("target")
    for number in range(50):
        put(source, world.payload(f"r{number}"), bytes(MIB // 2))
        lease_from(target, world.payload(f"r{number}")).acknowledge()
        assert source.drain(deadline=time.monotonic() + SOON_S) == 0
    assert source.pool.mapped_nbytes == MIB
    assert source.pool.used_nbytes == 0


def test_a_retired_segment_is_unmapped_by_its_readers(world):
    _, _, mappings_before = held()
    source, target = world.open("source", segment_nbytes=MIB, pool_nbytes=2 * MIB), world.open("target")
    for name in ("a", "b"):
        put(source, world.payload(name), bytes(MIB))
    for name in ("a", "b"):
        lease_from(target, world.payload(name)).acknowledge()
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0
    put(source, world.payload("large"), bytes(2 * MIB))
    lease = lease_from(target, world.payload("large"))
    assert source.pool.mapped_nbytes == 2 * MIB
    assert held()[2] - mappings_before == 2  # One segment, mapped by both ends.
    lease.acknowledge()


def test_a_pool_grows_by_segments_up_to_its_limit():
    pool = Pool(3 * MIB, MIB)
    rooms = [pool.take(MIB) for _ in range(3)]
    assert pool.mapped_nbytes == pool.used_nbytes == 3 * MIB
    with pytest.raises(PutRejected, match=f"pool_nbytes={3 * MIB}") as caught:
        pool.take(1)
    assert caught.value.retryable
    pool.give(rooms[1])
    assert pool.take(MIB).segment is rooms[1].segment
    pool.close()


def test_a_request_larger_than_a_segment_gets_one_of_its_size():
    pool = Pool(4 * MIB, MIB)
    room = pool.take(2 * MIB + 1)
    assert room.segment.nbytes == 2 * MIB + PAGE_NBYTES
    assert len(room.view) == 2 * MIB + 1
    pool.close()


def test_idle_segments_make_way_for_a_large_request_and_busy_ones_do_not():
    pool = Pool(4 * MIB, MIB)
    rooms = [pool.take(MIB) for _ in range(4)]
    for room in rooms[1:]:
        pool.give(room)
    large = pool.take(3 * MIB)
    assert sorted(pool.pop_retired()) == [1, 2, 3]
    assert pool.pop_retired() == []
    assert (large.segment.number, pool.mapped_nbytes) == (4, 4 * MIB)
    with pytest.raises(PutRejected):
        pool.take(3 * MIB)
    pool.close()


def test_a_pool_larger_than_memory_is_an_error_at_start(world):
    too_much = max(bound.limit_nbytes for bound in memory_bounds()) + 1
    with pytest.raises(ConfigError, match=f"pool_nbytes={too_much} is more than this process may take: .* left of"):
        world.open("source", pool_nbytes=too_much)


def test_a_target_takes_no_memory_and_asks_for_none(world):
    target = world.open("target", pool_nbytes=1 << 60, prefault_nbytes=1 << 60)
    assert target.pool.mapped_nbytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {"pool_nbytes": 0},
        {"segment_nbytes": 0},
        {"pool_nbytes": -1},
        {"pool_nbytes": 1e9},
        {"segment_nbytes": "64 MiB"},
    ],
)
def test_sizes_must_be_positive_whole_numbers(world, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be a whole number of bytes, at least 1"):
        world.open("source", **options)


def test_a_pool_of_small_segments_stays_within_what_a_reader_maps():
    pool = Pool(64 * MIB, PAGE_NBYTES)
    rooms = []
    with contextlib.closing(pool), contextlib.suppress(PutRejected):
        while True:
            rooms.append(pool.take(PAGE_NBYTES))
    assert len(rooms) == 64 * MIB // PAGE_NBYTES
    assert len({room.segment.number for room in rooms}) < MAX_SEGMENTS / 2


def test_a_system_without_descriptors_is_an_error_that_names_it(world, monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("omnikv.transports.shm_address.open_socket", refuse)
    with pytest.raises(TransportError, match=r"cannot listen \(Too many open files\): raise the limit"):
        world.open("source")


def test_a_system_without_memory_is_an_error_and_not_a_fault(monkeypatch):
    pool = Pool(MIB, MIB)
    monkeypatch.setattr(shm_pool, "tightest_bound", lambda: MemoryBound("the group of this test", 2000, 1000))
    with pytest.raises(PutRejected, match="1000 of 2000 bytes are left of the group of this test") as caught:
        pool.take(1)
    assert caught.value.retryable
    pool.close()


def test_a_segment_is_no_larger_than_what_is_left(monkeypatch):
    left = MemoryBound("the group of this test", 8 * MIB, 2 * MIB + 1)
    monkeypatch.setattr(shm_pool, "tightest_bound", lambda: left)
    pool = Pool(None, 64 * MIB)
    assert pool.take(MIB).segment.nbytes == 2 * MIB
    pool.close()


def test_what_is_prefaulted_is_there_before_the_first_payload(world):
    source = world.open("source", segment_nbytes=MIB, prefault_nbytes=3 * MIB)
    assert (source.pool.mapped_nbytes, source.pool.used_nbytes) == (3 * MIB, 0)
    put(source, world.payload("r1"), bytes(3 * MIB))
    assert source.pool.mapped_nbytes == 3 * MIB


def test_what_cannot_be_prefaulted_is_an_error_at_start(world):
    with pytest.raises(ConfigError, match=f"prefault_nbytes={2 * MIB} cannot be had: .* raise pool_nbytes"):
        world.open("source", pool_nbytes=MIB, prefault_nbytes=2 * MIB)


def given_back(world, **options):
    """A tensor that a reader still holds after it acknowledged its payload."""
    source, target = world.open("source", **options), world.open("target")
    put(source, world.payload("r1"), bytes(1000))
    lease = lease_from(target, world.payload("r1"))
    stale = borrowed(lease.buffer)
    lease.acknowledge()
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0
    return stale


def test_a_stale_read_shows_in_debug_mode(world, monkeypatch):
    monkeypatch.delenv("OMNIKV_DEBUG", raising=False)
    stale = given_back(world, debug=True)
    assert bool((stale == POISON).all())
    assert bool(stale.view(torch.float32).isnan().all())
    assert bool(stale.view(torch.bfloat16).isnan().all())


def test_what_is_leased_stays_readable_in_debug_mode_when_its_sender_closes(world):
    source, target = world.open("source", debug=True), world.open("target")
    put(source, world.payload("r1"), b"payload")
    with lease_from(target, world.payload("r1")) as lease:
        source.close()
        assert bytes(lease.buffer) == b"payload"


@pytest.mark.parametrize(("value", "shows"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_environment_turns_debug_mode_on(world, monkeypatch, value, shows):
    monkeypatch.setenv("OMNIKV_DEBUG", value)
    assert bool((given_back(world) == POISON).all()) is shows


def test_a_large_payload_is_poisoned_whole():
    pool = Pool(4 * MIB, MIB, poison=True)
    room = pool.take(2 * MIB + 5)
    view = room.view
    pool.give(room)
    assert bytes(view) == bytes([POISON]) * (2 * MIB + 5)
    pool.close()


def test_facts_that_do_not_fit_a_greeting_are_an_error_at_start(world):
    with pytest.raises(ConfigError, match="state a digest"):
        world.open("source", facts={"route": "x" * 70_000})


def test_a_get_that_fails_leaves_no_garbage_behind(world):
    source, target = world.open("source"), world.open("target")
    source.fail(world.payload("r1"), "cause")
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ProducerFailed):
            target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)
        assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "_Ask"]
    finally:
        gc.enable()
