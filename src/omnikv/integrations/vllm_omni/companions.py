"""A request's guidance companions: found by a function of the model's, set on the request's sampling parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from omnikv.core.roles import COMPANION_IDS

logger = logging.getLogger("omnikv.vllm_omni")

# Called with the request's id, its companions' ids by role, the manager, and the device; gives fields by name.
Collector = Callable[..., "dict[str, Any] | None"]


def collect_companions(
    req: Any, collector: Collector | None, manager: Any, device: torch.device | None, counters: Counter[str]
) -> None:
    """Nothing; sets on the sampling parameters what the model's collector finds for the request's companions.

    A collector that fails is logged and counted, and the request goes on without companions: the vote, which follows,
    compares which ones each rank holds.
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
    except Exception:
        counters["companions_failed"] += 1
        logger.exception("the guidance companions of request %s were not collected", request_id)
