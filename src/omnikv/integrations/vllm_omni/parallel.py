"""Where this process stands among an engine's parallel ranks, read from the engine's parallel state.

The state is found under its published module names if something has loaded it there (the engine, or our aliases), else
in our stand-ins, where a program without an engine can set groups of its own. Nothing here imports an engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from omnikv.core.keys import is_rank_aware
from omnikv.core.receive_role import ReceiveLayout, choose_role
from omnikv.core.topology import KVTPTopology
from omnikv.integrations.vllm_omni import diffusion_parallel_state, vllm_parallel_state

logger = logging.getLogger("omnikv.vllm_omni")

# What engines, and our stand-ins, raise for a group that was not set up; it may well not exist in this stage.
_NOT_SET_UP = (AssertionError, AttributeError, ImportError, RuntimeError, ValueError)
_Found = TypeVar("_Found")


def read_layout(topology: KVTPTopology) -> ReceiveLayout:
    """This rank's place in its stage. Groups that are not set up count as absent, and a rank without any is alone.

    The tensor-parallel group is vLLM's own. It may exist where a diffusion world does not, and its ranks vote then too.
    """
    diffusion = _state("vllm_omni.diffusion.distributed.parallel_state", diffusion_parallel_state)
    vllm = _state("vllm.distributed.parallel_state", vllm_parallel_state)
    world = _or_none(lambda: diffusion.get_world_group())
    world_size, world_rank = (int(world.world_size), int(world.rank_in_group)) if world is not None else (1, 0)
    cfg_size, cfg_rank, cfg_group = _group(
        diffusion.get_classifier_free_guidance_world_size,
        diffusion.get_classifier_free_guidance_rank,
        diffusion.get_cfg_group,
    )
    sp_size, sp_rank, sp_group = _group(
        diffusion.get_sequence_parallel_world_size, diffusion.get_sequence_parallel_rank, diffusion.get_sp_group
    )
    tp_group = _or_none(lambda: vllm.get_tp_group())
    if world_size <= 1:
        cfg_size, cfg_rank, cfg_group, sp_size, sp_rank, sp_group = 1, 0, None, 1, 0, None
    tp_active = is_rank_aware(topology) and (world is None or world_size > 1)
    role = choose_role(
        tp_active=tp_active,
        cfg_size=cfg_size,
        cfg_rank=cfg_rank,
        sp_size=sp_size,
        sp_rank=sp_rank,
        world_size=world_size,
        world_rank=world_rank,
    )
    return ReceiveLayout(
        role=role,
        tp_active=tp_active,
        cfg_size=cfg_size,
        cfg_rank=cfg_rank,
        cfg_group=cfg_group,
        sp_size=sp_size,
        sp_rank=sp_rank,
        sp_group=sp_group,
        world=world,
        tp_group=tp_group,
        tp_size=int(tp_group.world_size) if tp_group is not None else 1,
    )


def _state(name: str, stand_in: Any) -> Any:
    return sys.modules.get(name) or stand_in


def _group(size: Callable[[], int], rank: Callable[[], int], group: Callable[[], Any]) -> tuple[int, int, Any]:
    found = _or_none(lambda: (size(), rank(), group()))
    return found if found is not None else (1, 0, None)


def _or_none(read: Callable[[], _Found]) -> _Found | None:
    try:
        return read()
    except _NOT_SET_UP as error:
        logger.debug("a parallel group is not set up: %s", error)
        return None
