"""Rank maps, connector keys and ports under their published names."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def utils():
    from vllm_omni.distributed.omni_connectors.utils import kv_utils

    return kv_utils


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8), (6, 3)])
def test_senders_and_receivers_agree_on_who_serves_whom(utils, source, target):
    topo = utils.KVTPTopology
    served = {(s, t) for s in range(source) for t in utils.get_kv_target_ranks(topo(source, target, s))}
    needed = {(s, t) for t in range(target) for s in utils.get_kv_source_ranks(topo(source, target, t))}
    assert served == needed


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 2), (4, 2), (2, 4)])
def test_every_key_that_is_asked_for_is_put_by_exactly_one_sender(utils, source, target):
    topo = utils.KVTPTopology
    put = [k for s in range(source) for k in utils.build_rank_aware_send_keys("r", "0", "1", topo(source, target, s))]
    asked = [
        key
        for t in range(target)
        for key, _ in utils.build_rank_aware_recv_keys("r", "0", "1", topo(source, target, t))
    ]
    assert sorted(put) == sorted(asked)
    assert len(set(put)) == len(put)


def test_sizes_that_do_not_divide_are_an_error(utils):
    with pytest.raises(ValueError, match="divisible"):
        utils.get_kv_target_ranks(utils.KVTPTopology(3, 2, 0))


def test_x09_a_rank_outside_its_stage_is_an_error(utils):
    with pytest.raises(ValueError, match="outside its stage"):
        utils.get_kv_source_ranks(utils.KVTPTopology(2, 2, 7))


def test_the_key_of_ranks_is_the_published_one(utils):
    assert utils.get_kv_connector_key("id", 3, 0, 1, 2) == "id_3_0_1_2"


def test_d04_both_sides_use_the_plain_key_exactly_when_neither_has_ranks(utils):
    alone = utils.KVTPTopology(1, 1, 0)
    (sent,) = utils.build_rank_aware_send_keys("r", "0", "1", alone)
    ((asked, rank),) = utils.build_rank_aware_recv_keys("r", "0", "1", alone)
    assert sent == asked
    assert rank is None


def test_d13_a_hooks_plain_keys_get_their_ranks_from_the_topology(utils):
    topo = utils.KVTPTopology(4, 2, 1)
    assert utils.build_rank_aware_recv_keys("r", "0", "1", topo, hook=lambda *_: ["a", "b"]) == [("a", 2), ("b", 3)]
    with pytest.raises(ValueError, match="3 plain keys"):
        utils.build_rank_aware_recv_keys("r", "0", "1", topo, hook=lambda *_: ["a", "b", "c"])


def test_d34_keys_are_the_same_whatever_the_hash_seed():
    program = (
        "from omnikv.core.keys import build_rank_aware_send_keys as keys\n"
        "from omnikv.core.topology import KVTPTopology\n"
        "print(keys('r', '0', '1', KVTPTopology(2, 4, 1)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert said == {"['r_0_0_1_2', 'r_0_0_1_3']\n"}


def test_ports_of_ranks_lie_one_stride_apart(utils):
    from vllm_omni.distributed.omni_connectors.utils.initialization import KV_RANK_PORT_STRIDE

    assert utils.kv_zmq_port(50051, 2, 3, replica_id=0) - utils.kv_zmq_port(50051, 2, 2, replica_id=0) == (
        KV_RANK_PORT_STRIDE
    )
