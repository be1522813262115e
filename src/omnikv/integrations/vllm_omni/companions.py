"""A request's guidance companions: found by a function of the model's, set on the request's sampling parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from omnikv.core.roles import COMPANION_IDS
from omnikv.handoff.open_request import OpenRequest

logger = logging.getLogger("omnikv.vllm_omni")

# Called with the request's id, its companions' ids by role, the manager, and the device; gives fields by name.
Collector = Callable[..., "dict[str, Any] | None"]


def collect_companions(
    req: Any,
    collector: Collector | None,
    manager: Any,
    device: torch.device | None,
    *,
    request: OpenRequest,
    counters: Counter[str],
) -> None:
    """Nothing; sets on the sampling parameters what the model's collector finds for the request's companions.

    What the collector asks the manager for shares the deadline of `request`. A collector that fails is logged and
    counted, and `request` says so to the vote that follows.
    """
    params = getattr(req, "sampling_params", None)
    companion_ids = getattr(params, COMPANION_IDS, None)
    if not companion_ids or not collector:
        return
    request_id = getattr(req, "request_id", None)
    try:
        for name, value in (collector(request_id, companion_ids, manager, device) or {}).items():
            setattr(params, name, value)
    # edge: the collector is a model's, and runs just before the vote.
    except Exception as error:
        counters["companions_failed"] += 1
        request.is_broken = True
        request.failures[str(request_id)] = f"the collector of its companions failed: {type(error).__name__}: {error}"
        logger.exception("the guidance companions of request %s were not collected", request_id)
