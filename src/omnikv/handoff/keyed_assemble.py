"""Puts the shards that came by key together into this rank's payload, in memory that is ours.

An engine may join and cut payloads in its own way; what its functions raise becomes one of our errors here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from omnikv.core.fetch import Shard
from omnikv.core.keys import RecvKeyHook
from omnikv.core.senders import SenderAddress
from omnikv.core.topology import KVTPTopology
from omnikv.errors import HandoffError, OmniKVError, PayloadLost, WireError, WireReason
from omnikv.handoff.engine_connector import Delivery, Stages
from omnikv.tensors.place import borrows_from, map_tensors, move_tensors
from omnikv.tensors.shards import (
    Merger,
    Slicer,
    merge_received_rank_shards,
    pop_heads_stamp,
    require_layers,
    slice_received_rank_shard,
)

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveRoute:
    """Where a receiver rank's payloads come from, and an engine's own key builder, merger and slicer if it has them.

    `address` is where rank 0 of the sender listens. It is named to the connector for shards of a certain rank, and for
    all shards when it belongs to this one receive (`address_every_shard`). `num_kv_heads` are the model's, over all
    ranks, where the settings state them: with fewer than a stage has ranks, several shards hold the same head, and only
    this, or the same stated by the sender, tells which (X01).
    """

    stages: Stages
    topo: KVTPTopology
    address: SenderAddress | None = None
    address_every_shard: bool = False
    key_hook: RecvKeyHook | None = None
    merger: Merger | None = None
    slicer: Slicer | None = None
    num_kv_heads: int | None = None


def require_request(data: Mapping[str, Any], request_id: str, shard: Shard) -> None:
    """Nothing, when a shard's payload does not say that it is another request's.

    Raises:
        WireError: it does.
    """
    # Published keys of different requests can be equal (X06), so the payload's own word counts.
    found = data.get("request_id")
    if isinstance(found, str) and found and found != request_id:
        raise WireError(
            f"the payload under {shard.key!r} belongs to request {found!r}, not to {request_id!r}",
            reason=WireReason.WRONG_REQUEST,
            request_id=request_id,
            key=shard.key,
            rank=shard.source_rank,
        )


def assemble_shards(
    request_id: str, route: ReceiveRoute, shards: Sequence[Delivery], sources: Sequence[int | None]
) -> dict[str, Any]:
    """This rank's payload, made of its shards, which come from the ranks `sources`; it may borrow their memory.

    Raises:
        WireError: the shards do not fit together, or hold no layers: a payload without KV must not count as received.
        TopologyError: they do not hold all heads that this rank needs, by the model's number of them.
        HandoffError: an engine's merger or slicer failed.
    """
    payloads, stated = pop_heads_stamp([shard.data for shard in shards])
    num_kv_heads = route.num_kv_heads or stated
    merged: Any = payloads[0]
    if len(payloads) > 1:
        merged = by_hook(
            "payload merger",
            request_id,
            lambda: merge_received_rank_shards(
                payloads, route.merger, list(sources), topo=route.topo, num_kv_heads=num_kv_heads
            ),
        )
    data = by_hook(
        "payload slicer", request_id, lambda: slice_received_rank_shard(merged, route.topo, slicer=route.slicer)
    )
    if not isinstance(data, dict):
        raise HandoffError(
            f"the payload merger or slicer made {type(data).__name__} of request {request_id!r}, not a payload",
            request_id=request_id,
        )
    # What an engine's own functions make has a form that only it knows.
    if not (callable(route.merger) or callable(route.slicer)):
        require_layers(data, f"the payload of request {request_id!r}")
    return data


def place_payload(
    request_id: str, data: dict[str, Any], shards: Sequence[Delivery], device: torch.device | None
) -> dict[str, Any]:
    """The payload on `device`, or in memory of its own where that still belongs to the connector.

    Raises:
        PayloadLost: there was no room for it.
    """
    buffers = [buffer for shard in shards for buffer in shard.borrowed]
    try:
        if "layer_blocks" in data:
            data = data | {"layer_blocks": move_tensors(data["layer_blocks"], device)}
        if not buffers:
            return data
        owned: dict[str, Any] = map_tensors(data, lambda part: part.clone() if borrows_from(part, buffers) else part)
    # What torch raises when memory or a device gives out.
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise PayloadLost(
            f"KV of request {request_id!r} came and could not be brought to {device or 'memory of its own'}: {error}",
            request_id=request_id,
        ) from error
    return owned


def by_hook(what: str, request_id: str, run: Callable[[], _Made]) -> _Made:
    """What `run` makes; `what` names in errors the function that it stands for.

    Raises:
        HandoffError: it failed otherwise than by an error of ours.
    """
    try:
        return run()
    except OmniKVError:
        raise
    # edge: key builders, mergers and slicers may be an engine's own, and it may raise anything.
    except Exception as error:
        raise HandoffError(f"the {what} failed for request {request_id!r}: {error}", request_id=request_id) from error
