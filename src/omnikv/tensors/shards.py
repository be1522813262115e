"""Cutting a rank's KV along heads for several receivers, and joining the shards that one receiver got.

A payload here is the published dict: `request_id`, `layer_blocks` with one list of tensors each under `key_cache` and
`value_cache` (`[tokens, kv_heads, head_dim]`, or None where a layer has no KV), `block_ids`, `metadata`. A sender that
cuts a payload for one receiver stamps its metadata with `tp_head_slice`, so that it is not cut twice, nor used by
another rank.

Shards are joined only if they fit: a layer that one of them lacks, another dtype, another number of tokens or another
request would give a tensor that looks right and is not (X03, X04, X05).

A shard does not say which heads it holds. Where there are fewer KV heads than ranks, neighbouring ranks hold the same
ones, and joining their shards side by side would double them (X01). So whoever knows the model says how many KV heads
it has: a sender in its payload (`heads_stamp`), or a receiver's settings. Which shard then gives which head is planned
as for every other route (`omnikv.core.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from omnikv.core.boxes import HeadIds
from omnikv.core.partition import Parallel, split_heads
from omnikv.core.plan import StageIndex, plan_target, prove
from omnikv.core.topology import KVTPTopology
from omnikv.core.wire import SLICE_STAMP_KEY
from omnikv.errors import TopologyError, WireError, WireReason

Payload = dict[str, Any]
Merger = Callable[[list[Payload]], Payload | None]
Slicer = Callable[[Payload | None], Payload | None]

CACHE_NAMES = ("key_cache", "value_cache")

# In a payload's metadata: how many KV heads the model has over all ranks, where ranks of its sender hold copies.
HEADS_STAMP_KEY = "tp_num_kv_heads"


def slice_kv_tensor_heads(tensor: torch.Tensor | None, offset_in_shard: int, num_slices: int) -> torch.Tensor | None:
    """The `offset_in_shard`-th of `num_slices` equal parts of the tensor's heads (dimension 1), as a view.

    Of fewer heads than parts, neighbouring parts are the same head: engines replicate them so (D18). What is no tensor
    is given back as it is.

    Raises:
        TopologyError: no head axis, or the heads do not divide, or there is no such part.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dim() < 2:
        raise TopologyError(f"a KV tensor needs a head axis to be cut, got shape {tuple(tensor.shape)}")
    if num_slices <= 0 or not 0 <= offset_in_shard < num_slices:
        raise TopologyError(f"there is no part {offset_in_shard} of {num_slices}")
    num_heads = tensor.shape[1]
    if not num_heads or (num_heads % num_slices and num_slices % num_heads):
        raise TopologyError(
            f"{num_heads} KV heads must be divisible by {num_slices} receivers, or they by the heads; state explicit "
            "head ids (omnikv.Route) for such stages"
        )
    heads = split_heads(num_heads, num_slices)[offset_in_shard]
    return tensor.narrow(1, heads[0], len(heads))


def slice_layer_blocks(layer_blocks: dict[str, Any], offset_in_shard: int, num_slices: int) -> dict[str, list[Any]]:
    """All layers of a payload cut to one part of their heads, as views.

    Raises:
        TopologyError: see `slice_kv_tensor_heads`.
    """
    return {
        name: [slice_kv_tensor_heads(tensor, offset_in_shard, num_slices) for tensor in layer_blocks.get(name, [])]
        for name in CACHE_NAMES
    }


def slice_for_target(layer_blocks: dict[str, Any], topo: KVTPTopology, target_rank: int) -> dict[str, list[Any]]:
    """What `target_rank` needs of this sender rank's layers, as views; its metadata takes `sender_stamp`.

    Raises:
        TopologyError: the heads do not divide by the receivers that share this sender.
    """
    return slice_layer_blocks(layer_blocks, target_rank % topo.ratio, topo.ratio)


def sender_stamp(topo: KVTPTopology, target_rank: int) -> dict[str, Any]:
    """The published stamp of a payload that this sender rank has cut for `target_rank`."""
    return _stamp("sender", topo, target_rank) | {"source_rank": topo.local_rank}


def heads_stamp(topo: KVTPTopology, num_kv_heads: int | None) -> dict[str, int]:
    """What a sender of this model adds to a payload's metadata: nothing where its ranks have heads of their own."""
    has_copies = num_kv_heads is not None and num_kv_heads < topo.source_tp_size
    return {HEADS_STAMP_KEY: num_kv_heads} if num_kv_heads is not None and has_copies else {}


def pop_heads_stamp(payloads: Sequence[Payload]) -> tuple[list[Payload], int | None]:
    """The payloads without their `heads_stamp`, and the model's number of KV heads that it states, if it does.

    Raises:
        WireError: the shards state no number, or different ones.
    """
    stated: list[object] = []
    bare: list[Payload] = []
    for payload in payloads:
        metadata = payload.get("metadata")
        if isinstance(metadata, dict) and HEADS_STAMP_KEY in metadata:
            stated.append(metadata[HEADS_STAMP_KEY])
            payload = payload | {"metadata": {key: metadata[key] for key in metadata if key != HEADS_STAMP_KEY}}
        bare.append(payload)
    if not stated:
        return bare, None
    if len(set(map(repr, stated))) > 1 or type(stated[0]) is not int or stated[0] < 1:
        raise _misfit(
            f"the shards must state one number of the model's KV heads ({HEADS_STAMP_KEY}), got "
            f"{', '.join(map(repr, stated))}",
            WireReason.HEADER_FIELD,
        )
    return bare, stated[0]


def slice_received_rank_shard(
    payload: Payload | None, topo: KVTPTopology, slicer: Slicer | None = None
) -> Payload | None:
    """The part of a received payload that belongs to this rank: the payload itself unless it still has to be cut.

    A `slicer` decides for itself. Cut tensors are copies, so the whole shard is not kept alive by its part.

    Raises:
        WireError: the payload was cut for another rank or for other parallel sizes (X05).
        TopologyError: the heads do not divide.
    """
    if callable(slicer):
        return slicer(payload)
    if not payload or "layer_blocks" not in payload:
        return payload
    metadata = payload.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    stamp = metadata.get(SLICE_STAMP_KEY)
    if isinstance(stamp, dict) and stamp.get("applied"):
        _require_own_stamp(stamp, topo, payload.get("request_id"))
        return payload
    if topo.target_tp_size <= topo.source_tp_size:
        return payload
    blocks = slice_layer_blocks(payload["layer_blocks"], topo.local_rank % topo.ratio, topo.ratio)
    return {
        "request_id": payload.get("request_id"),
        "layer_blocks": {name: [_copied(tensor) for tensor in tensors] for name, tensors in blocks.items()},
        "block_ids": list(payload.get("block_ids") or []),
        "metadata": metadata | {SLICE_STAMP_KEY: _stamp("receiver", topo, topo.local_rank)},
    }


def merge_received_rank_shards(
    payloads: list[Payload],
    merger: Merger | None = None,
    source_ranks: Sequence[int | None] | None = None,
    *,
    topo: KVTPTopology | None = None,
    num_kv_heads: int | None = None,
) -> Payload | None:
    """One payload whose layers hold the heads of all shards, in their order; a single shard is given back unchanged.

    A `merger` decides for itself. `source_ranks` name the shards in messages; their positions do otherwise. With
    `num_kv_heads`, how many the model has in all, `topo` and the `source_ranks`, each head is taken from one shard that
    holds it; without, every shard is taken to hold heads of its own, as released engines do.

    Raises:
        WireError: the shards do not fit together; the message names the layer and the shard.
        TopologyError: the shards of these ranks do not hold all heads that this rank needs.
    """
    if callable(merger):
        return merger(payloads)
    if len(payloads) <= 1:
        return payloads[0] if payloads else None
    ranks = source_ranks or [None] * len(payloads)
    names = [f"shard {at}" if rank is None else f"the shard of source rank {rank}" for at, rank in enumerate(ranks)]
    for payload, name in zip(payloads, names, strict=True):
        require_layers(payload, name)
        _require_same(
            "request", payloads[0].get("request_id"), payload.get("request_id"), name, WireReason.WRONG_REQUEST
        )
    known = [rank for rank in ranks if rank is not None]
    if topo is None or num_kv_heads is None or len(known) < len(payloads):
        picks = [_Pick(at, None) for at in range(len(payloads))]
    else:
        picks = _planned_picks(topo, num_kv_heads, known)
    blocks = {
        cache: _merge_cache(cache, [payload["layer_blocks"].get(cache) or [] for payload in payloads], names, picks)
        for cache in CACHE_NAMES
    }
    for layer, (key, value) in enumerate(zip(*(blocks[cache] for cache in CACHE_NAMES), strict=True)):
        if (key is None) != (value is None):
            raise _misfit(f"layer {layer} has only one of key and value", WireReason.MISSING_LAYER)
    return {
        "request_id": payloads[0].get("request_id"),
        "layer_blocks": blocks,
        "block_ids": list(payloads[0].get("block_ids") or []),
        "metadata": dict(payloads[0].get("metadata") or {}),
    }


class _Pick(NamedTuple):
    """A shard's number and which of its heads are taken, of how many it must have; None: all that it has."""

    shard: int
    heads: _Heads | None


class _Heads(NamedTuple):
    positions: HeadIds
    held: int


def _planned_picks(topo: KVTPTopology, num_kv_heads: int, source_ranks: Sequence[int]) -> list[_Pick]:
    """What a plan takes from each of these shards, which are all that this rank reads, in the order of its own heads.

    Raises:
        TopologyError: these shards do not hold all heads that this rank needs.
    """
    held = Parallel(tp=topo.source_tp_size).boxes(num_kv_heads)
    sources = StageIndex([held[rank] for rank in source_ranks])
    needed = Parallel(tp=topo.target_tp_size).boxes(num_kv_heads)[topo.local_rank]
    pieces = plan_target(0, sources, StageIndex([needed]))
    prove(topo.local_rank, pieces, sources, needed)
    picks = sorted(
        (box.target_positions, piece.source_rank, box.source_positions) for piece in pieces for box in piece.boxes
    )
    return [_Pick(at, _Heads(positions, len(sources.ranks[at][0].heads))) for _, at, positions in picks]


def _merge_cache(
    cache: str, shards: list[list[Any]], names: list[str], picks: Sequence[_Pick]
) -> list[torch.Tensor | None]:
    for layers, name in zip(shards, names, strict=True):
        _require_same(f"number of layers in {cache}", len(shards[0]), len(layers), name, WireReason.LAYER_COUNT)
    return [
        _merge_layer(f"{cache} layer {at}", list(parts), names, picks)
        for at, parts in enumerate(zip(*shards, strict=True))
    ]


def _merge_layer(what: str, parts: list[Any], names: list[str], picks: Sequence[_Pick]) -> torch.Tensor | None:
    absent = [name for part, name in zip(parts, names, strict=True) if part is None]
    if len(absent) == len(parts):
        return None
    if absent:
        raise _misfit(f"{what} is missing in {', '.join(absent)} and present in others", WireReason.MISSING_LAYER)
    first = parts[0]
    for part, name in zip(parts, names, strict=True):
        if not isinstance(part, torch.Tensor) or part.dim() < 3:
            raise _misfit(
                f"{what} of {name} has no head axis to join along, got {_describe(part)}; set a payload merger",
                WireReason.SHAPE,
            )
        _require_same(f"dtype of {what}", first.dtype, part.dtype, name, WireReason.DTYPE)
        _require_same(f"number of tokens of {what}", first.shape[0], part.shape[0], name, WireReason.SHAPE)
        _require_same(f"head size of {what}", tuple(first.shape[2:]), tuple(part.shape[2:]), name, WireReason.SHAPE)
    return torch.cat([_picked(f"{what} of {names[at]}", parts[at], heads) for at, heads in picks], dim=1)


def _picked(what: str, part: torch.Tensor, heads: _Heads | None) -> torch.Tensor:
    if heads is None:
        return part
    if part.shape[1] != heads.held:
        raise _misfit(
            f"{what} has {part.shape[1]} heads; by the model's number of KV heads and the sender's size it has "
            f"{heads.held}",
            WireReason.SHAPE,
        )
    # A plan takes neighbouring heads of a rank that holds neighbouring heads.
    return part.narrow(1, heads.positions[0], len(heads.positions))


def require_layers(payload: Any, name: str) -> None:
    """Nothing, when the payload has layers, as many of keys as of values; `name` names it in errors.

    Raises:
        WireError: it has not.
    """
    blocks = payload.get("layer_blocks") if isinstance(payload, dict) else None
    keys, values = (blocks.get(cache) if isinstance(blocks, dict) else None for cache in CACHE_NAMES)
    if not (isinstance(keys, list | tuple) and isinstance(values, list | tuple)):
        raise WireError(
            f"{name} has no layer_blocks with a list of tensors each under {' and '.join(CACHE_NAMES)}, got "
            f"{_describe(payload)}",
            reason=WireReason.HEADER_FIELD,
        )
    if len(keys) != len(values):
        raise WireError(
            f"{name} has {len(keys)} key layers and {len(values)} value layers", reason=WireReason.LAYER_COUNT
        )


def _require_same(what: str, first: object, other: object, name: str, reason: WireReason) -> None:
    if first != other:
        raise _misfit(f"the {what} differs: {first!r} in the first shard, {other!r} in {name}", reason)


def _require_own_stamp(stamp: dict[str, Any], topo: KVTPTopology, request_id: object) -> None:
    own = {"target_rank": topo.local_rank, "from_tp": topo.source_tp_size, "to_tp": topo.target_tp_size}
    for field, expected in own.items():
        if stamp.get(field) is not None and stamp[field] != expected:
            raise WireError(
                f"the payload was cut for {field}={stamp[field]!r}, but this receiver has {field}={expected}",
                reason=WireReason.WRONG_RANK,
                request_id=request_id if isinstance(request_id, str) else None,
                rank=topo.local_rank,
            )


def _stamp(side: str, topo: KVTPTopology, target_rank: int) -> dict[str, Any]:
    return {
        "applied": True,
        "side": side,
        "target_rank": target_rank,
        "from_tp": topo.source_tp_size,
        "to_tp": topo.target_tp_size,
        "offset_in_shard": target_rank % topo.ratio,
        "num_slices": topo.ratio,
    }


def _copied(tensor: Any) -> Any:
    return tensor.clone(memory_format=torch.contiguous_format) if isinstance(tensor, torch.Tensor) else tensor


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _misfit(message: str, reason: WireReason) -> WireError:
    return WireError(f"shards do not fit together: {message}", reason=reason)
