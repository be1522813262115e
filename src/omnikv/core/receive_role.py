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


@dataclass(frozen=True, slots=True)
class Level:
    """One step down: rank 0 of `group` gives, the others take, each its own part where the level `splits`.

    `rank` is this rank's within the group. Only a level that splits needs `size`, which else may be 0.
    """

    group: Any
    rank: int
    size: int
    splits: bool


def shares_world(*, world_size: int, cfg_size: int, sp_size: int, replicas: int | None) -> bool:
    """Whether, without tensor parallelism, one request runs on the whole world and not on a part of it (X15).

    It does when the engine says that the world is one data-parallel replica, or when the guidance and sequence groups
    account for all of it. Where an engine says neither and has no such groups, the world is all there is to go by, as
    in the published path.
    """
    if replicas is not None:
        return replicas == 1
    return cfg_size * sp_size in (1, world_size)


def choose_role(
    *,
    tp_active: bool,
    cfg_size: int,
    cfg_rank: int,
    sp_size: int,
    sp_rank: int,
    world_size: int,
    world_rank: int,
    replicas: int | None = None,
) -> ReceiveRole:
    """The role of a rank: with tensor parallelism each tensor rank has its own shard, without it one rank has all.

    `replicas` is how many data-parallel replicas the world holds, None where the engine does not say.
    """
    if world_size <= 1:
        return ReceiveRole.LOCAL
    is_whole = shares_world(world_size=world_size, cfg_size=cfg_size, sp_size=sp_size, replicas=replicas)
    if not tp_active and is_whole:
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
    # How many data-parallel replicas the world holds; None where the engine does not say.
    replicas: int | None = None

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

    @property
    def confirms(self) -> bool:
        """Whether what leaders hand on is confirmed before anyone uses it: the same answer on every rank.

        The leaders of a tensor-parallel group must hear of a follower that could not be served. Where the engine set
        up no such group, the published calls are all that the other ranks expect.
        """
        return self.tp_active and self.tp_group is not None and (self.cfg_active or self.sp_active)

    def levels(self) -> tuple[Level, ...]:
        """The groups through which KV goes from a leader down to this rank and on from it, in order; none if local."""
        if self.is_local:
            return ()
        is_led_by_branch = self.tp_active and (self.cfg_active or self.sp_active)
        if not is_led_by_branch and self._shares_world():
            return (Level(self.world, rank=0 if self.is_leader else 1, size=0, splits=False),)
        found = []
        if self.cfg_active and self.cfg_group is not None and self.sp_rank == 0:
            found.append(Level(self.cfg_group, rank=self.cfg_rank, size=self.cfg_size, splits=self.tp_active))
        if self.sp_active and self.sp_group is not None:
            found.append(Level(self.sp_group, rank=self.sp_rank, size=self.sp_size, splits=False))
        return tuple(found)

    def _shares_world(self) -> bool:
        size = getattr(self.world, "world_size", 0)
        return self.tp_active or shares_world(
            world_size=int(size), cfg_size=self.cfg_size, sp_size=self.sp_size, replicas=self.replicas
        )
