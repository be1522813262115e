"""Stands in for an absent engine's `vllm_omni.diffusion.distributed.parallel_state`: the groups of a diffusion stage.

Every getter fails with "not initialized" until `set_groups` lends it a group, as an engine's does before it has set up
its own. This is a module object of its own beside `vllm_parallel_state`: both have a `get_world_group`, and patching
one must not reach the other.
"""

from __future__ import annotations

from typing import Any

from omnikv.integrations.vllm_omni.group_slots import GroupSlots

_slots = GroupSlots(__name__, ("world", "cfg", "sp", "dp"))


def set_groups(*, world: Any = None, cfg: Any = None, sp: Any = None, dp: Any = None) -> None:
    """Nothing; afterwards the getters give these groups, and those left out are not initialised (again).

    `world` spans the stage's ranks, `cfg` the ranks that share a request's guidance branches, `sp` those that share
    its sequence, and `dp` those at the same place of each data-parallel replica. See `GroupSlots` for what a group
    must have.

    Raises:
        ConfigError: a group lacks its size or its own rank.
    """
    _slots.put({"world": world, "cfg": cfg, "sp": sp, "dp": dp})


def get_world_group() -> Any:
    """The group of all ranks of the stage.

    Raises:
        LocalProtocolError: not initialised.
    """
    return _slots.get("world")


def is_cfg_group_initialized() -> bool:
    """Whether there is a guidance group."""
    return _slots.is_set("cfg")


def get_cfg_group() -> Any:
    """The group of ranks that split a request's guidance branches.

    Raises:
        LocalProtocolError: not initialised.
    """
    return _slots.get("cfg")


def get_classifier_free_guidance_world_size() -> int:
    """How many ranks the guidance group has.

    Raises:
        LocalProtocolError: not initialised.
    """
    size: int = get_cfg_group().world_size
    return size


def get_classifier_free_guidance_rank() -> int:
    """This process's rank in the guidance group.

    Raises:
        LocalProtocolError: not initialised.
    """
    rank: int = get_cfg_group().rank_in_group
    return rank


def get_sp_group() -> Any:
    """The group of ranks that split a request's sequence.

    Raises:
        LocalProtocolError: not initialised.
    """
    return _slots.get("sp")


def get_sequence_parallel_world_size() -> int:
    """How many ranks the sequence-parallel group has.

    Raises:
        LocalProtocolError: not initialised.
    """
    size: int = get_sp_group().world_size
    return size


def get_sequence_parallel_rank() -> int:
    """This process's rank in the sequence-parallel group.

    Raises:
        LocalProtocolError: not initialised.
    """
    rank: int = get_sp_group().rank_in_group
    return rank


def get_dp_group() -> Any:
    """The group of ranks at the same place of each data-parallel replica.

    Raises:
        LocalProtocolError: not initialised.
    """
    return _slots.get("dp")


def get_data_parallel_world_size() -> int:
    """How many data-parallel replicas the stage has.

    Raises:
        LocalProtocolError: not initialised.
    """
    size: int = get_dp_group().world_size
    return size


def get_data_parallel_rank() -> int:
    """Which data-parallel replica this process is part of.

    Raises:
        LocalProtocolError: not initialised.
    """
    rank: int = get_dp_group().rank_in_group
    return rank
