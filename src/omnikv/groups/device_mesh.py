"""The groups of one rank of a stage that is laid out by a torch `DeviceMesh`, by the names of its dimensions.

    dp    data-parallel replicas: they run different requests and share nothing
    cfg   guidance-parallel ranks: each runs one branch of the same request
    sp    sequence-parallel ranks: each runs a part of the same branch's tokens
    tp    tensor-parallel ranks: each holds some heads

Ranks with the same tensor-parallel place in one replica share the same heads, so one of them reads for all: the first
by global rank numbers that the mesh lists, not one that takes itself for the first because some group is of size 1
(D39). Ranks that run one request, all but `dp`, act in lockstep; no group here reaches across replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnikv.errors import ConfigError

DIMENSIONS = ("dp", "cfg", "sp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshGroups:
    """One rank's place in each dimension and its process groups, all with CPU tensors.

    `sharing` are the global ranks that share this rank's KV, the elected reader first. `lockstep` holds all ranks that
    run the same request. A dimension that the mesh lacks has size 1 and a group of this rank alone.
    """

    sizes: Mapping[str, int]
    places: Mapping[str, int]
    tp: dist.ProcessGroup
    cfg: dist.ProcessGroup
    sp: dist.ProcessGroup
    lockstep: dist.ProcessGroup
    sharing: tuple[int, ...]

    @property
    def replica(self) -> int:
        return self.places["dp"]

    @property
    def is_reader(self) -> bool:
        """Whether this rank is the one that fetches for all that share its heads."""
        return self.sharing[0] == dist.get_rank()


def from_device_mesh(mesh: DeviceMesh) -> MeshGroups:
    """This rank's groups in `mesh`, whose dimensions are named among dp, cfg, sp and tp; every rank of it must call.

    Process groups of the mesh itself are used where it has them; the group in lockstep is made here, among its members.

    Raises:
        ConfigError: a dimension has another name or none, this process is not in the mesh, or a group takes no CPU
            tensors.
    """
    names = tuple(mesh.mesh_dim_names or ())
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or len(names) != mesh.mesh.ndim:
        raise ConfigError(
            f"the mesh's dimensions must be named among {', '.join(DIMENSIONS)}, got {list(names)} for "
            f"{mesh.mesh.ndim}: pass mesh_dim_names to init_device_mesh"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    places = dict.fromkeys(DIMENSIONS, 0) | dict(zip(names, place, strict=True))
    ranks = _in_order(mesh.mesh, names)
    replica = ranks[places["dp"]]
    return MeshGroups(
        sizes=dict(zip(DIMENSIONS, ranks.shape, strict=True)),
        places=places,
        **{name: _group_along(mesh, name) for name in ("tp", "cfg", "sp")},
        lockstep=_checked(dist.new_group(_listed(replica), backend="gloo", use_local_synchronization=True)),
        sharing=tuple(_listed(replica[:, :, places["tp"]])),
    )


def _in_order(ranks: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    """The global ranks as `[dp, cfg, sp, tp]`, whatever order the mesh has them in."""
    present = [name for name in DIMENSIONS if name in names]
    ordered = ranks.permute([names.index(name) for name in present])
    sizes = dict(zip(present, ordered.shape, strict=True))
    return ordered.reshape([sizes.get(name, 1) for name in DIMENSIONS])


def _group_along(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    if name in (mesh.mesh_dim_names or ()):
        return _checked(mesh.get_group(name))
    return _checked(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))


def _checked(group: dist.ProcessGroup) -> dist.ProcessGroup:
    backend = dist.get_backend(group)
    if "gloo" not in backend and "mpi" not in backend:
        raise ConfigError(
            f"the mesh's groups have the backend {backend!r}, which takes no CPU tensors: initialise torch.distributed "
            "with 'cpu:gloo,cuda:nccl'"
        )
    return group


def _listed(ranks: torch.Tensor) -> list[int]:
    return [int(rank) for rank in ranks.flatten()]
