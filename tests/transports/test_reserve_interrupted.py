"""A reservation that ends in the middle leaves the identity free and holds no room."""

import contextlib
import time

import pytest

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import PutRejected
from omnikv.transports.base import Endpoint, PutRequest
from omnikv.transports.memory import MemoryTransport


@pytest.fixture
def memory(tmp_path):
    edge = Edge(from_stage="a", to_stage="b", namespace=f"reserve-{tmp_path.name}")
    payload = PayloadId(edge=edge, transfer_id="r1", source_rank=0, target_rank=0)
    with MemoryTransport(Endpoint(edge=edge, side="source", rank=0, peer_ranks=(0,)), pool_nbytes=100) as source:
        yield source, payload


def test_memory_that_the_system_does_not_give_is_no_room_and_may_come_back(memory, monkeypatch):
    def refuse(nbytes):
        raise MemoryError

    source, payload = memory
    with monkeypatch.context() as patched:
        patched.setattr("omnikv.transports.memory_source._aligned_block", refuse)
        with pytest.raises(PutRejected, match="gives no more memory") as caught:
            source.reserve(payload, 100)
    assert caught.value.retryable
    assert caught.value.request_id == "r1"
    source.reserve(payload, 100).drop()


def test_an_interrupted_reservation_in_shared_memory_leaves_the_identity_free(world, monkeypatch):
    def interrupt(sizes):
        raise KeyboardInterrupt

    source = world.open("source")
    with monkeypatch.context() as patched:
        patched.setattr(source.pool, "take_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            source.reserve(world.payload("r1"), 100)
    source.reserve(world.payload("r1"), 100).drop()
    assert source.pool.used_nbytes == 0


class Interrupting:
    """A lock at which Ctrl-C comes when it is waited for the `number`-th time."""

    def __init__(self, lock, number):
        self._lock = lock
        self._left = number

    def __enter__(self):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


@pytest.fixture
def interrupted_at(world, monkeypatch):
    """A source whose calls are interrupted wherever they wait for its lock, one place after the other."""
    source = world.open("source", pool_nbytes=1 << 20)
    offers = source._source

    @contextlib.contextmanager
    def at(number):
        lock = Interrupting(offers._lock, number)
        with monkeypatch.context() as patched:
            for holder in (offers, offers._waiting_room, offers._settled):
                patched.setattr(holder, "_lock", lock)
            yield

    return source, at


@pytest.mark.parametrize("number", range(1, 4))
def test_a_reservation_that_is_interrupted_anywhere_leaves_all_room(world, interrupted_at, number):
    source, at = interrupted_at
    with at(number), pytest.raises(KeyboardInterrupt):
        source.reserve(world.payload("r1"), 100)
    assert source.pool.used_nbytes == 0
    assert source.census()["announced"] == 0
    source.reserve(world.payload("r1"), 1 << 20).drop()


@pytest.mark.parametrize("number", range(1, 12))
def test_one_that_waits_for_room_and_is_interrupted_anywhere_keeps_nobody_out(world, interrupted_at, number):
    source, at = interrupted_at
    kept = source.reserve(world.payload("kept"), 1 << 20)
    with at(number), pytest.raises((KeyboardInterrupt, PutRejected)):
        source.reserve_all([PutRequest(world.payload("r1"), 100)], deadline=time.monotonic() + 0.02)
    kept.drop()
    source.reserve(world.payload("r1"), 1 << 20).drop()
