"""Conformance suites, an exhaustive explorer of the vote and a simulated world, shipped for all; needs no pytest.

`World` is `omnikv.testing.world.World`, loaded when first used. Everything else is imported from its own module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnikv.testing.world import World

__all__ = ["World"]


def __getattr__(name: str) -> Any:
    # Not at import time: `python -m omnikv.testing.world` would then find its module loaded already.
    if name != "World":
        raise AttributeError(f"module 'omnikv.testing' has no attribute {name!r}")
    return importlib.import_module("omnikv.testing.world").World
