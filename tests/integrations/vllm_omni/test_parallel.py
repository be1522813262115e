"""This rank's place, from groups that are set up, not set up, or only half."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omnikv.core.receive_role import ReceiveRole
from omnikv.core.topology import KVTPTopology
from omnikv.integrations.vllm_omni import diffusion_parallel_state, vllm_parallel_state
from omnikv.integrations.vllm_omni.parallel import read_layout

TP2 = KVTPTopology(2, 2, 1)
TP1 = KVTPTopology(1, 1, 0)


def group(size, rank):
    return SimpleNamespace(world_size=size, rank_in_group=rank)


@pytest.fixture(autouse=True)
def no_groups():
    yield
    diffusion_parallel_state.set_groups()
    vllm_parallel_state.set_groups()


def test_without_any_group_a_rank_is_alone():
    layout = read_layout(TP1)
    assert layout.role is ReceiveRole.LOCAL
    assert (layout.world, layout.cfg_size, layout.sp_size, layout.tp_group, layout.tp_size) == (None, 1, 1, None, 1)
    assert not layout.tp_active


def test_a_pure_tensor_parallel_rank_fetches_for_itself_and_knows_its_group():
    tp_group = group(2, 1)
    diffusion_parallel_state.set_groups(world=group(4, 3))
    vllm_parallel_state.set_groups(tp=tp_group)
    layout = read_layout(TP2)
    assert layout.role is ReceiveRole.LOCAL
    assert layout.tp_active
    assert (layout.tp_group, layout.tp_size) == (tp_group, 2)


def test_a_tensor_parallel_group_counts_even_where_no_diffusion_world_was_set_up():
    tp_group = group(2, 1)
    vllm_parallel_state.set_groups(tp=tp_group)
    layout = read_layout(TP2)
    assert (layout.is_local, layout.tp_active, layout.tp_group) == (True, True, tp_group)


def test_a_world_of_one_has_no_one_to_share_with():
    diffusion_parallel_state.set_groups(world=group(1, 0), cfg=group(2, 1))
    layout = read_layout(TP2)
    assert (layout.is_local, layout.tp_active, layout.cfg_size) == (True, False, 1)


@pytest.mark.parametrize(("cfg_rank", "role"), [(0, ReceiveRole.LEADER), (1, ReceiveRole.FOLLOWER)])
def test_guidance_ranks_lead_and_follow(cfg_rank, role):
    cfg = group(2, cfg_rank)
    diffusion_parallel_state.set_groups(world=group(4, cfg_rank), cfg=cfg)
    layout = read_layout(TP2)
    assert (layout.role, layout.cfg_size, layout.cfg_rank, layout.cfg_group) == (role, 2, cfg_rank, cfg)


@pytest.mark.parametrize(("rank", "role"), [(0, ReceiveRole.LEADER), (2, ReceiveRole.FOLLOWER)])
def test_without_tensor_parallelism_rank_0_of_the_world_leads(rank, role):
    diffusion_parallel_state.set_groups(world=group(3, rank))
    assert read_layout(TP1).role is role


def test_x15_an_engine_that_counts_its_replicas_keeps_each_of_them_apart():
    diffusion_parallel_state.set_groups(world=group(4, 2), cfg=group(2, 0), sp=group(1, 0), dp=group(2, 1))
    layout = read_layout(TP1)
    assert (layout.role, layout.replicas) == (ReceiveRole.LEADER, 2)


def test_a_group_whose_getter_fails_in_any_way_counts_as_absent(monkeypatch):
    def explode():
        raise KeyError("no such group")

    diffusion_parallel_state.set_groups(world=group(4, 2))
    monkeypatch.setattr(diffusion_parallel_state, "get_cfg_group", explode)
    monkeypatch.setattr(vllm_parallel_state, "get_tp_group", explode)
    layout = read_layout(TP2)
    assert (layout.cfg_size, layout.tp_group, layout.tp_size) == (1, None, 1)
