"""Stands in for an absent engine's `vllm.distributed.parallel_state`: the tensor-parallel group of a stage.

Every getter fails with "not initialized" until `set_groups` lends it a group. A `vllm` that is really installed is
never shadowed; its own module is read then.
"""

from __future__ import annotations

from typing import Any

from omnikv.integrations.vllm_omni.group_slots import GroupSlots

_slots = GroupSlots(__name__, ("world", "tp"))


def set_groups(*, world: Any = None, tp: Any = None) -> None:
    """Nothing; afterwards the getters give these groups, and those left out are not initialised (again).

    `world` spans all ranks, `tp` those that hold the heads of one model copy between them. See `GroupSlots` for what
    a group must have.

    Raises:
        ConfigError: a group lacks its size or its own rank.
    """
    _slots.put({"world": world, "tp": tp})


def get_world_group() -> Any:
    """The group of all ranks.

    Raises:
        LocalProtocolError: not initialised.
    """
    return _slots.get("world")


def get_tp_group() -> Any:
    """The group of ranks that hold the heads of one model copy between them.

    Raises:
        LocalProtocolError: not initialised.
    """
    return _slots.get("tp")


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks the tensor-parallel group has.

    Raises:
        LocalProtocolError: not initialised.
    """
    size: int = get_tp_group().world_size
    return size


def get_tensor_model_parallel_rank() -> int:
    """This process's rank in the tensor-parallel group.

    Raises:
        LocalProtocolError: not initialised.
    """
    rank: int = get_tp_group().rank_in_group
    return rank
