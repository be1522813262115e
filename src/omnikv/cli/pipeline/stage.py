"""What the ranks of every stage do alike: joining their group, the model, digests of caches, and hearing orders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from omnikv.cli.pipeline.conditions import Cache, Condition
from omnikv.cli.pipeline.model import ModelConfig, OmniModel
from omnikv.cli.pipeline.plan import StageJob, picture_prompt
from omnikv.cli.ranks.channel import RankChannel
from omnikv.errors import RemoteProtocolError

# The pool touches a whole segment when it makes one; a picture's caches need no more than this.
SHM_OPTIONS = {"segment_nbytes": 1 << 20}


def begin(channel: RankChannel) -> tuple[StageJob, OmniModel]:
    """This rank's job, and the model with the weights that every rank has."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return StageJob.from_message(channel.next_message()), OmniModel(ModelConfig())


def join_stage(job: StageJob, size: int) -> None:
    """Nothing; this process is in the default process group of its stage, over gloo.

    Ranks meet at a file, not at a port, so that no other process can take the port in between.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/{job.stage}.group",
        rank=job.rank,
        world_size=size,
        timeout=timedelta(seconds=job.request.timeout_s),
    )


def condition(job: StageJob, number: int) -> Condition:
    """What the picture `number` is drawn from."""
    return Condition(picture_prompt(job.request, number), job.request.seed + number)


def digests(caches: Mapping[str, Cache], heads: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """For each role, a digest of the bytes of every KV head in all layers, by global head id."""
    return {role: {str(head): _digest(cache, at) for at, head in enumerate(heads)} for role, cache in caches.items()}


def _digest(cache: Cache, at: int) -> str:
    found = hashlib.blake2b(digest_size=12)
    for layer in cache:
        for tensor in layer:
            found.update(tensor[:, at].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def next_order(channel: RankChannel, *known: str) -> dict[str, Any]:
    """The orchestrator's next order, which is one of `known`.

    Raises:
        RemoteProtocolError: it is none of them.
    """
    order = channel.next_message()
    if order.get("command") not in known:
        raise RemoteProtocolError(f"this rank waits to be told {' or '.join(known)}, but was told {order!r}")
    return order
