"""Ranks that act in lockstep, and how they exchange ballots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnikv.groups.device_mesh import MeshGroups, from_device_mesh

__all__ = ["MeshGroups", "from_device_mesh"]


def __getattr__(name: str) -> Any:
    # Loaded when first used: it needs torch's device meshes, and most groups do not.
    if name not in __all__:
        raise AttributeError(f"module 'omnikv.groups' has no attribute {name!r}")
    from omnikv.groups import device_mesh

    return getattr(device_mesh, name)
