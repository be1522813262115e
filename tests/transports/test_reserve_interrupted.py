"""A reservation that ends in the middle leaves the identity free and holds no room."""

import pytest

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import PutRejected
from omnikv.transports.base import Endpoint
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
