"""The published names of a diffusion engine's KV transfer, offered over omnikv, and only on request.

`install()` makes them importable, `uninstall()` takes them away again. Importing this package does neither, and is
cheap: no torch, no engine.
"""

from omnikv.integrations.vllm_omni.aliases import install, is_installed, rebind, uninstall

__all__ = ["install", "is_installed", "rebind", "uninstall"]
