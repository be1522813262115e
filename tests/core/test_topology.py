"""The published rank maps, for every pair of sizes and every rank, and the ranks that no map has."""

from __future__ import annotations

import pytest

from omnikv.core.topology import (
    KVTPTopology,
    get_kv_source_ranks,
    get_kv_target_ranks,
    kv_rank_port,
    kv_zmq_port,
    validate_kv_tp_topology,
)
from omnikv.errors import ConfigError, TopologyError

DIVISIBLE = [(1, 1), (1, 4), (2, 2), (2, 8), (3, 3), (6, 3), (8, 2), (4, 1)]


@pytest.mark.parametrize(("source", "target"), DIVISIBLE)
def test_sender_and_receiver_name_the_same_pairs(source, target):
    sent = {
        (rank, peer)
        for rank in range(source)
        for peer in get_kv_target_ranks(KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=rank))
    }
    received = {
        (peer, rank)
        for rank in range(target)
        for peer in get_kv_source_ranks(KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=rank))
    }
    assert sent == received
    assert len(sent) == max(source, target)


@pytest.mark.parametrize(("source", "target"), [(3, 2), (2, 3), (6, 4), (8, 3)])
def test_sizes_that_do_not_divide_are_refused_with_the_way_out(source, target):
    topo = KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=0)
    for ask in (get_kv_source_ranks, get_kv_target_ranks, validate_kv_tp_topology):
        with pytest.raises(TopologyError, match=r"divisible.*explicit head ids"):
            ask(topo)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (-1, 2)])
def test_a_size_must_be_positive(source, target):
    with pytest.raises(ValueError, match="must be positive"):
        KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=0)


def test_a_rank_must_not_be_negative():
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        KVTPTopology(source_tp_size=2, target_tp_size=2, local_rank=-1)


def test_x09_a_rank_outside_its_stage_is_an_error_on_either_side():
    topo = KVTPTopology(source_tp_size=2, target_tp_size=2, local_rank=7)
    with pytest.raises(TopologyError, match="rank 7 is outside its stage: the sender has 2 ranks"):
        get_kv_target_ranks(topo)
    with pytest.raises(TopologyError, match="rank 7 is outside its stage: the receiver has 2 ranks"):
        get_kv_source_ranks(topo)


def test_x09_a_rank_may_be_inside_one_stage_only():
    topo = KVTPTopology(source_tp_size=2, target_tp_size=4, local_rank=3)
    assert get_kv_source_ranks(topo) == [1]
    with pytest.raises(TopologyError, match="outside its stage"):
        get_kv_target_ranks(topo)


def test_ratio_and_heterogeneity_are_symmetric():
    for source, target in DIVISIBLE:
        one = KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=0)
        other = KVTPTopology(source_tp_size=target, target_tp_size=source, local_rank=0)
        assert one.ratio == other.ratio >= 1
        assert one.is_heterogeneous == other.is_heterogeneous == (source != target)


def test_ports_of_stages_ranks_and_replicas_on_one_host_never_meet():
    ports = [
        kv_zmq_port(50051, stage, rank, replica) for stage in range(16) for rank in range(8) for replica in range(4)
    ]
    assert len(set(ports)) == len(ports)
    assert kv_zmq_port(50051, 0) == 50151
    assert kv_rank_port(50151, 2) == kv_zmq_port(50051, 0, local_rank=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((50051, 16), "from_stage must be in"),
        ((50051, -1), "from_stage must be in"),
        ((50051, 0, -1), "at least 0"),
        ((50051, 0, 0, -2), "at least 0"),
        ((65500, 0, 0, 0), "outside 1 to 65535; choose a lower zmq_port"),
    ],
)
def test_a_port_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(TopologyError, match=message):
        kv_zmq_port(*arguments)
