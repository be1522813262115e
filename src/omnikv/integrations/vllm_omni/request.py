"""Stands in for an absent engine's `vllm_omni.diffusion.request`: one request of a diffusion stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnikv.core.published_vote import DUMMY_REQUEST_ID, is_dummy_request_id
from omnikv.errors import ConfigError

# Warm-up runs carry this id, or this id, a slash and more; there is no sender for them.
DUMMY_DIFFUSION_REQUEST_ID = DUMMY_REQUEST_ID


@dataclass
class OmniDiffusionRequest:
    """A prompt, how to sample it, and under which id its KV travels; received KV is attached to it as attributes.

    Raises:
        ConfigError: `request_id` is empty or no text.
    """

    prompt: Any
    sampling_params: Any
    request_id: str
    kv_sender_info: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ConfigError(f"a request's id must be a non-empty string, got {self.request_id!r}")

    def is_dummy_run(self) -> bool:
        """Whether this is a warm-up run, which receives no KV."""
        return self.is_dummy_run_request_id(self.request_id)

    @staticmethod
    def is_dummy_run_request_id(request_id: str | None) -> bool:
        """Whether a request of this id is a warm-up run."""
        return is_dummy_request_id(request_id)
