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

_Found = TypeVar("_Found")


def read_layout(topology: KVTPTopology) -> ReceiveLayout:
    """This rank's place in its stage. Groups that are not set up count as absent, and a rank without any is alone.

    The tensor-parallel group is vLLM's own. It may exist where a diffusion world does not, and its ranks vote then too.
    """
    diffusion = _state("vllm_omni.diffusion.distributed.parallel_state", diffusion_parallel_state)
    vllm = _state("vllm.distributed.parallel_state", vllm_parallel_state)
    world_size, world_rank, world = _group(
        lambda: diffusion.get_world_group().world_size,
        lambda: diffusion.get_world_group().rank_in_group,
        lambda: diffusion.get_world_group(),
    )
    cfg_size, cfg_rank, cfg_group = _group(
        diffusion.get_classifier_free_guidance_world_size,
        diffusion.get_classifier_free_guidance_rank,
        diffusion.get_cfg_group,
    )
    sp_size, sp_rank, sp_group = _group(
        diffusion.get_sequence_parallel_world_size, diffusion.get_sequence_parallel_rank, diffusion.get_sp_group
    )
    tp_size, _, tp_group = _group(lambda: vllm.get_tp_group().world_size, lambda: 0, lambda: vllm.get_tp_group())
    # Older engines have no such getter, and a program without an engine need not say.
    replicas = _or_none(lambda: int(diffusion.get_data_parallel_world_size()))
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
        replicas=replicas,
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
        tp_size=tp_size,
        replicas=replicas,
    )


def _state(name: str, stand_in: Any) -> Any:
    return sys.modules.get(name) or stand_in


def _group(size: Callable[[], int], rank: Callable[[], int], group: Callable[[], Any]) -> tuple[int, int, Any]:
    found = _or_none(lambda: (int(size()), int(rank()), group()))
    return found if found is not None else (1, 0, None)


def _or_none(read: Callable[[], _Found]) -> _Found | None:
    try:
        return read()
    # edge: the state is an engine's; a group that was not set up raises, and may well not exist in this stage.
    except Exception as error:  # noqa: BLE001
        logger.debug("a parallel group is not set up: %s", error)
        return None
