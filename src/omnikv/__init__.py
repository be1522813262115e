"""Hands KV caches from one stage of an inference pipeline to the next, rank by rank.

Importing this package is cheap and does not import torch: names that need it are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnikv.core.handshake import ModelFacts
    from omnikv.core.keys import Edge, PayloadId
    from omnikv.core.layout import Layout
    from omnikv.core.partition import Parallel
    from omnikv.core.reshard import Route
    from omnikv.handoff.api import KVReceiver, KVSender
    from omnikv.tensors.blocks import PagedKV, scatter_into_blocks
    from omnikv.tensors.kv import LayerKV

__version__ = "0.1.0"

_HOMES = {
    "Edge": "omnikv.core.keys",
    "KVReceiver": "omnikv.handoff.api",
    "KVSender": "omnikv.handoff.api",
    "LayerKV": "omnikv.tensors.kv",
    "Layout": "omnikv.core.layout",
    "ModelFacts": "omnikv.core.handshake",
    "PagedKV": "omnikv.tensors.blocks",
    "Parallel": "omnikv.core.partition",
    "PayloadId": "omnikv.core.keys",
    "Route": "omnikv.core.reshard",
    "scatter_into_blocks": "omnikv.tensors.blocks",
}

__all__ = [
    "Edge",
    "KVReceiver",
    "KVSender",
    "LayerKV",
    "Layout",
    "ModelFacts",
    "PagedKV",
    "Parallel",
    "PayloadId",
    "Route",
    "__version__",
    "scatter_into_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'omnikv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
