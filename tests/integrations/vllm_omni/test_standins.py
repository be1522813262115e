"""Stand-ins for the modules of an absent engine: its groups, its requests, its ports and rank functions."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from omnikv.errors import ConfigError, LocalProtocolError, TopologyError
from omnikv.integrations.vllm_omni import diffusion_parallel_state, initialization, kv_utils, vllm_parallel_state
from omnikv.integrations.vllm_omni.request import DUMMY_DIFFUSION_REQUEST_ID, OmniDiffusionRequest

VLLM_PATH = "vllm.distributed.parallel_state"


def group(size: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(world_size=size, rank_in_group=rank)


@pytest.fixture(autouse=True)
def no_groups_afterwards():
    yield
    diffusion_parallel_state.set_groups()
    vllm_parallel_state.set_groups()


@pytest.fixture(autouse=True)
def no_ranks_from_the_environment(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("VLLM_OMNI_REPLICA_ID", raising=False)
    monkeypatch.delitem(sys.modules, VLLM_PATH, raising=False)


GETTERS = [
    *(
        (diffusion_parallel_state, name)
        for name in (
            "get_world_group",
            "get_cfg_group",
            "get_classifier_free_guidance_world_size",
            "get_classifier_free_guidance_rank",
            "get_sp_group",
            "get_sequence_parallel_world_size",
            "get_sequence_parallel_rank",
        )
    ),
    *(
        (vllm_parallel_state, name)
        for name in (
            "get_world_group",
            "get_tp_group",
            "get_tensor_model_parallel_world_size",
            "get_tensor_model_parallel_rank",
        )
    ),
]


@pytest.mark.parametrize(("module", "getter"), GETTERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_group_that_nobody_set_is_not_initialized_and_the_error_says_how_to_set_it(module, getter):
    with pytest.raises(LocalProtocolError, match=r"not initialized.*set_groups\("):
        getattr(module, getter)()


def test_groups_that_are_set_answer_with_their_sizes_and_ranks():
    world, cfg, sp, tp = group(8, 5), group(2, 1), group(4, 3), group(3, 2)
    diffusion_parallel_state.set_groups(world=world, cfg=cfg, sp=sp)
    vllm_parallel_state.set_groups(tp=tp)
    assert diffusion_parallel_state.get_world_group() is world
    assert diffusion_parallel_state.get_cfg_group() is cfg
    assert diffusion_parallel_state.is_cfg_group_initialized()
    assert diffusion_parallel_state.get_classifier_free_guidance_world_size() == 2
    assert diffusion_parallel_state.get_classifier_free_guidance_rank() == 1
    assert diffusion_parallel_state.get_sp_group() is sp
    assert diffusion_parallel_state.get_sequence_parallel_world_size() == 4
    assert diffusion_parallel_state.get_sequence_parallel_rank() == 3
    assert vllm_parallel_state.get_tp_group() is tp
    assert vllm_parallel_state.get_tensor_model_parallel_world_size() == 3
    assert vllm_parallel_state.get_tensor_model_parallel_rank() == 2


def test_the_two_modules_hold_their_own_world_groups():
    diffusion_parallel_state.set_groups(world=group(2, 0))
    with pytest.raises(LocalProtocolError, match="world group"):
        vllm_parallel_state.get_world_group()


def test_a_group_left_out_when_setting_is_not_initialized_again():
    diffusion_parallel_state.set_groups(world=group(2, 0), cfg=group(2, 0))
    diffusion_parallel_state.set_groups(world=group(2, 0))
    assert not diffusion_parallel_state.is_cfg_group_initialized()
    with pytest.raises(LocalProtocolError, match="cfg group"):
        diffusion_parallel_state.get_cfg_group()


def test_an_object_that_is_no_group_is_refused_and_changes_nothing():
    tp = group(2, 1)
    vllm_parallel_state.set_groups(tp=tp)
    with pytest.raises(ConfigError, match="world_size"):
        vllm_parallel_state.set_groups(tp=object())
    assert vllm_parallel_state.get_tp_group() is tp


def test_the_tp_rank_comes_from_the_group_then_from_the_environment_then_is_zero(monkeypatch):
    assert (kv_utils.get_local_tp_rank(), kv_utils.get_tp_world_size()) == (0, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (kv_utils.get_local_tp_rank(), kv_utils.get_tp_world_size()) == (3, 1)
    vllm_parallel_state.set_groups(tp=group(4, 2))
    assert (kv_utils.get_local_tp_rank(), kv_utils.get_tp_world_size()) == (2, 4)


def not_yet() -> int:
    raise AssertionError("tensor model parallel group is not initialized")


def test_a_vllm_that_is_loaded_is_asked_before_the_stand_in(monkeypatch):
    vllm_parallel_state.set_groups(tp=group(4, 2))
    real = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1, get_tensor_model_parallel_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, VLLM_PATH, real)
    assert (kv_utils.get_local_tp_rank(), kv_utils.get_tp_world_size()) == (1, 2)


def test_a_loaded_vllm_without_groups_falls_back_to_the_environment(monkeypatch):
    real = SimpleNamespace(get_tensor_model_parallel_rank=not_yet, get_tensor_model_parallel_world_size=not_yet)
    monkeypatch.setitem(sys.modules, VLLM_PATH, real)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert (kv_utils.get_local_tp_rank(), kv_utils.get_tp_world_size()) == (5, 1)


@pytest.mark.parametrize("text", ["", "one", "-2"])
@pytest.mark.parametrize(
    ("name", "read"), [("LOCAL_RANK", "get_local_tp_rank"), ("VLLM_OMNI_REPLICA_ID", "get_omni_replica_id")]
)
def test_a_malformed_rank_in_the_environment_reads_as_zero_and_is_said_aloud(monkeypatch, caplog, name, read, text):
    monkeypatch.setenv(name, text)
    with caplog.at_level(logging.WARNING, logger="omnikv"):
        assert getattr(kv_utils, read)() == 0
    assert f"{name}={text!r}" in caplog.text


def test_every_sender_worker_of_a_host_gets_its_own_port(monkeypatch):
    ports = {
        kv_utils.kv_zmq_port(50051, stage, rank, replica)
        for stage in range(4)
        for rank in range(8)
        for replica in range(3)
    }
    assert len(ports) == 4 * 8 * 3
    assert kv_utils.kv_zmq_port(50051, 1) == 50051 + initialization.KV_TRANSFER_PORT_OFFSET + 1
    monkeypatch.setenv("VLLM_OMNI_REPLICA_ID", "2")
    assert kv_utils.kv_zmq_port(50051, 1) == kv_utils.kv_zmq_port(50051, 1, 0, 2)


@pytest.mark.parametrize(
    ("purpose", "offset"), [("request_forwarding", 0), ("kv_transfer", 100), ("orchestrator", 200)]
)
def test_connector_ports_follow_the_published_formula(purpose, offset):
    port = initialization.compute_connector_zmq_port(40000, purpose=purpose, from_stage=3, local_rank=2, replica_id=1)
    assert port == 40000 + offset + 1024 + 2 * 16 + 3


def test_a_port_of_an_unknown_purpose_or_outside_the_range_is_refused():
    with pytest.raises(ConfigError, match="orchestrator"):
        initialization.compute_connector_zmq_port(40000, purpose="gossip", from_stage=0)
    with pytest.raises(TopologyError, match="orchestrator port over base port 65500"):
        initialization.compute_connector_zmq_port(65500, purpose="orchestrator", from_stage=0)
    with pytest.raises(TopologyError, match="from_stage"):
        initialization.compute_connector_zmq_port(40000, purpose="kv_transfer", from_stage=16)


def test_a_request_carries_what_the_stage_needs_and_takes_its_kv_as_attributes():
    request = OmniDiffusionRequest("a cat", SimpleNamespace(), request_id="r/1", kv_sender_info={"host": "h"})
    request.past_key_values = "kv"
    assert (request.prompt, request.request_id, request.kv_sender_info) == ("a cat", "r/1", {"host": "h"})
    assert OmniDiffusionRequest(prompt="p", sampling_params=None, request_id="r").kv_sender_info is None


@pytest.mark.parametrize("request_id", ["", None, 7])
def test_a_request_without_a_usable_id_is_refused(request_id):
    with pytest.raises(ConfigError, match="non-empty"):
        OmniDiffusionRequest(prompt="p", sampling_params=None, request_id=request_id)


@pytest.mark.parametrize(
    ("request_id", "is_dummy"),
    [
        (DUMMY_DIFFUSION_REQUEST_ID, True),
        (f"{DUMMY_DIFFUSION_REQUEST_ID}/3", True),
        (f"{DUMMY_DIFFUSION_REQUEST_ID}s", False),
        ("r1", False),
        (None, False),
    ],
)
def test_warm_up_runs_are_told_by_their_id(request_id, is_dummy):
    assert OmniDiffusionRequest.is_dummy_run_request_id(request_id) is is_dummy
    if request_id is not None:
        assert OmniDiffusionRequest("p", None, request_id).is_dummy_run() is is_dummy
