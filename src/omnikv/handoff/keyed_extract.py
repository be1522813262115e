"""A request's KV out of an engine's paged caches, whatever their layout: whole, or not at all.

An engine frees a request's blocks as soon as it is told that it was sent, so what leaves here has memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omnikv.core.layout import Layout
from omnikv.errors import ConfigError
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.fill import fill
from omnikv.tensors.kv import LayerKV
from omnikv.tensors.layouts import infer_layout, layer_views
from omnikv.tensors.pack import KVCacheTransferData


def extract_kv(
    request_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    kv_caches: Sequence[Any],
    block_size: int,
    cache_dtype: str,
    custom_metadata: Mapping[str, Any] | None = None,
    *,
    layout: Layout | None = None,
) -> KVCacheTransferData:
    """The request's KV out of an engine's paged caches, in memory of its own, with the published metadata.

    Without a `layout`, each cache's is read from its shape, where that has one reading alone.

    Raises:
        ConfigError: a layer of unknown form or with two readings, an id outside the pool or named twice (X11), or more
            tokens than the blocks hold. Nothing is extracted then.
    """
    pairs = _as_pairs(request_id, kv_caches, block_size, layout)
    paged = PagedKV(pairs, block_ids=block_ids, num_tokens=num_tokens, layout=Layout.split_pair(block_size))
    layers = _gather(paged, pairs)
    return KVCacheTransferData(
        request_id=request_id,
        layer_blocks={"key_cache": [layer.key for layer in layers], "value_cache": [layer.value for layer in layers]},
        block_ids=list(block_ids),
        metadata={
            "block_size": block_size,
            "num_layers": len(layers),
            "dtype": str(cache_dtype),
            "seq_len": num_tokens,
            **(custom_metadata or {}),
        },
    )


def _as_pairs(
    request_id: str, kv_caches: Sequence[Any], block_size: int, layout: Layout | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Key and value blocks of every layer, `[blocks, block_size, kv_heads, head_dim]`, whatever its layout."""
    at = 0
    pairs = []
    try:
        for at, cache in enumerate(kv_caches):
            pairs.append(layer_views(cache, layout or infer_layout(cache, block_size), layer=at))
    except ConfigError as error:
        raise ConfigError(
            f"request {request_id!r} is not sent: layer {at}: {error}; an engine's omni_kv_config declares it by "
            "kv_layout",
            request_id=request_id,
        ) from error
    return pairs


def _gather(paged: PagedKV, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[LayerKV]:
    """The layers in memory of their own, on the device of their caches."""
    sources = paged.layer_sources()
    layers = [
        LayerKV(
            torch.empty(source.key.shape, dtype=source.key.dtype, device=key.device),
            torch.empty(source.value.shape, dtype=source.value.dtype, device=value.device),
        )
        for source, (key, value) in zip(sources, caches, strict=True)
    ]
    fill([job for source, layer in zip(sources, layers, strict=True) for job in zip(source, layer, strict=True)])
    return layers
