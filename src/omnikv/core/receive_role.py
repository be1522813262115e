"""How each rank of a stage comes to its KV, from the parallel layout it runs in."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class ReceiveRole(enum.Enum):
    """LOCAL fetches its own shard; LEADER fetches and hands on to others; FOLLOWER gets it from a leader."""

    LOCAL = "local"
    LEADER = "leader"
    FOLLOWER = "follower"


def choose_role(
    *, tp_active: bool, cfg_size: int, cfg_rank: int, sp_size: int, sp_rank: int, world_size: int, world_rank: int
) -> ReceiveRole:
    """The role of a rank: with tensor parallelism each tensor rank has its own shard, without it one rank has all."""
    if world_size <= 1:
        return ReceiveRole.LOCAL
    if not tp_active:
        return ReceiveRole.LEADER if world_rank == 0 else ReceiveRole.FOLLOWER
    if cfg_size <= 1 and sp_size <= 1:
        return ReceiveRole.LOCAL
    return ReceiveRole.LEADER if cfg_rank == 0 and sp_rank == 0 else ReceiveRole.FOLLOWER


@dataclass(frozen=True)
class ReceiveLayout:
    """This rank's place in its stage, taken once; the groups are an engine's own objects and only carried along.

    `tp_group` holds the ranks that run the same request in lockstep, and nothing else does: `world` may also hold
    data-parallel replicas and pipeline stages that work on other requests, so no verdict is ever taken over it.
    """

    role: ReceiveRole
    tp_active: bool
    cfg_size: int
    cfg_rank: int
    cfg_group: Any
    sp_size: int
    sp_rank: int
    sp_group: Any
    world: Any
    tp_group: Any = None
    tp_size: int = 1

    @property
    def is_leader(self) -> bool:
        return self.role is ReceiveRole.LEADER

    @property
    def is_follower(self) -> bool:
        return self.role is ReceiveRole.FOLLOWER

    @property
    def is_local(self) -> bool:
        return self.role is ReceiveRole.LOCAL

    @property
    def cfg_active(self) -> bool:
        return self.cfg_size > 1

    @property
    def sp_active(self) -> bool:
        return self.sp_size > 1
