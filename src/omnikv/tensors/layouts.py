"""A layer's cache under its declared layout: views of one shape for all, nothing is copied.

What a `Layout` says is read against a tensor's shape; a tensor that does not fit is refused with both. For callers who
were given no declaration there is one inference, which refuses every shape that can be read in two ways.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from omnikv.core.layout import Layout, axes_of, dimensions_of, is_count
from omnikv.errors import ConfigError

# One layer's cache as an engine holds it: one tensor, or key and value apart.
LayerCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# `(key_blocks, value_blocks)`, each `[blocks, slots, kv_heads, head_dim]`.
BlockViews = tuple[torch.Tensor, torch.Tensor]

_VIEW_ORDER = ("block", "slot", "head", "dim")


def layer_views(cache: LayerCache, layout: Layout, *, layer: int) -> BlockViews:
    """Key and value blocks of one layer, `[blocks, slots, kv_heads, head_dim]`: views, nothing is copied.

    Key and value have the same blocks, heads, dtype and device; their head_dim may differ in a pair of tensors.

    Raises:
        ConfigError: the cache does not fit the layout; `layer` is named.
    """
    pair = _split(cache, layout)
    if pair is None:
        raise ConfigError(
            f"layer {layer} has the KV cache {describe_cache(cache)}, but the layout {layout.describe()!r} needs "
            f"{layout.spell_shape()}; declare the layout that the engine uses"
        )
    key, value = pair
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.device != value.device:
        raise ConfigError(
            f"layer {layer} has the KV cache {describe_cache(cache)}: key and value must have the same blocks, "
            "heads, dtype and device"
        )
    return key, value


def infer_layout(cache: LayerCache, block_size: int) -> Layout:
    """The one layout that this cache can have, judged by its shape and the engine's `block_size`.

    For callers who were given no declaration. Only shapes are seen: a backend that gives the packed shape another
    meaning must be declared.

    Raises:
        ConfigError: no layout fits, the shape can be read in more than one way, or there is no such block size.
    """
    if not is_count(block_size):
        raise ConfigError(f"block_size must be a positive number of tokens, got {block_size!r}")
    layouts = _inferable(block_size)
    fitting = [layout for layout in layouts if _split(cache, layout) is not None]
    if not fitting:
        raise ConfigError(
            f"the KV cache {describe_cache(cache)} fits no known layout with blocks of {block_size} tokens; known are: "
            + "; ".join(layout.spell_shape() for layout in layouts)
        )
    if len(fitting) > 1:
        readings = " or ".join(repr(layout.describe()) for layout in fitting)
        raise ConfigError(f"the KV cache {describe_cache(cache)} is ambiguous: {readings}. {_REMEDY}")
    key, _ = layer_views(cache, fitting[0], layer=0)
    if key.shape[2] == block_size:
        raise ConfigError(
            f"the KV cache {describe_cache(cache)} is ambiguous: it has as many heads as tokens a block "
            f"({block_size}), so the two dimensions cannot be told apart. {_REMEDY}"
        )
    return fitting[0]


@functools.lru_cache(maxsize=8)
def _inferable(block_size: int) -> tuple[Layout, ...]:
    return (
        Layout.split_pair(block_size),
        Layout.stacked(block_size, dim=0),
        Layout.stacked(block_size, dim=1),
        Layout.packed(block_size),
    )


_REMEDY = "Declare it with Layout.split_pair(block_size), .stacked(block_size, dim=0|1), .packed(block_size) or another"


def _split(cache: object, layout: Layout) -> BlockViews | None:
    if layout.is_pair:
        if not (isinstance(cache, (tuple, list)) and len(cache) == 2 and all(map(torch.is_tensor, cache))):
            return None
        key, value = cache
    elif isinstance(cache, torch.Tensor):
        key = value = cache
    else:
        return None
    key_blocks = _blocks_of(key, layout, 0)
    value_blocks = _blocks_of(value, layout, 1)
    if key_blocks is None or value_blocks is None:
        return None
    return key_blocks, value_blocks[..., :0] if layout.is_latent else value_blocks


def _blocks_of(tensor: torch.Tensor, layout: Layout, which: int) -> torch.Tensor | None:
    """The blocks of key (`which` = 0) or value as a view, or None when the tensor does not fit."""
    if tensor.layout is not torch.strided:
        return None
    strided = _block_strides(layout, which, tensor.shape, tensor.stride())
    typed = _typed(tensor.detach(), layout.dtype)
    if strided is None or typed is None:
        return None
    sizes, strides, offset = strided
    return typed.as_strided(sizes, strides, typed.storage_offset() + offset)


class _Strided(NamedTuple):
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


# The layers of a model are alike, so what follows from shapes alone is worked out once for all of them.
@functools.lru_cache(maxsize=256)
def _block_strides(layout: Layout, which: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> _Strided | None:
    """Where the blocks `[blocks, slots, kv_heads, head_dim]` lie in a tensor; None when it does not fit the layout."""
    lengths = _axis_lengths(layout, shape)
    if lengths is None:
        return None
    order = axes_of((layout.key_order, layout.value_order)[which] or layout.axes)
    strides = _axis_strides(layout, order, lengths, shape, stride)
    if strides is None:
        return None
    return _Strided(
        sizes=tuple(lengths.get(axis, 1) for axis in _VIEW_ORDER),
        strides=tuple(strides.get(axis, 1) for axis in _VIEW_ORDER),
        offset=which * strides.get("kv", 0),
    )


def _axis_lengths(layout: Layout, shape: tuple[int, ...]) -> dict[str, int] | None:
    """How long each axis is, by the tensor's shape; None where a stated length does not fit."""
    stated = {"kv": 2} if layout.block_size is None else {"kv": 2, "slot": layout.block_size}
    dimensions = dimensions_of(layout.axes)
    if len(shape) != len(dimensions):
        return None
    lengths = dict(stated)
    for dimension, length in zip(dimensions, shape, strict=True):
        known = math.prod(stated.get(axis, 1) for axis in dimension)
        unknown = [axis for axis in dimension if axis not in stated]
        if length % known or (not unknown and length != known):
            return None
        lengths.update(dict.fromkeys(unknown, length // known))
    return lengths


def _axis_strides(
    layout: Layout, order: tuple[str, ...], lengths: dict[str, int], shape: tuple[int, ...], stride: tuple[int, ...]
) -> dict[str, int] | None:
    """How far apart two neighbours along each axis lie; None where what a backend packs as one is not in one piece."""
    dimensions = dimensions_of(layout.axes)
    if order == axes_of(layout.axes):
        kept = len(dimensions)
    else:
        kept = next(at for at, dimension in enumerate(dimensions) if dimension != order[at : at + 1])
        packed = zip(shape[kept:], stride[kept:], shape[kept + 1 :], stride[kept + 1 :], strict=False)
        if any(length > 1 and step != inner * inner_step for length, step, inner, inner_step in packed):
            return None
    strides: dict[str, int] = {}
    for dimension, step in (*zip(dimensions[:kept], stride, strict=False), (order[kept:], stride[-1])):
        for axis in reversed(dimension):
            strides[axis] = step
            step *= lengths[axis]
    return strides


def _typed(tensor: torch.Tensor, dtype_name: str | None) -> torch.Tensor | None:
    """The tensor in the stated dtype: itself, or its bits where an engine keeps 8-bit floats as bytes; else None."""
    if dtype_name is None:
        return tensor
    dtype: Any = getattr(torch, dtype_name, None)
    if tensor.dtype == dtype:
        return tensor
    if dtype_name.startswith("float8") and dtype is not None and tensor.dtype == torch.uint8:
        return tensor.view(dtype)
    return None


# Packed, of whatever block size: the published rule has compared that.
_PACKED = Layout.of("block head slot kv*dim", None)


def normalize_layer_kv(
    layer_kv: object, *, req_id: str = "", layer_idx: int = -1, block_size: int | None = None
) -> BlockViews | None:
    """`(key_blocks, value_blocks)` of one layer as views, or None when it has no form that is known.

    The published rule, for engines that declare nothing; in this order: a tensor of 4 dimensions whose third is
    `block_size` and whose last is even is packed `[blocks, kv_heads, block_size, 2 * head_dim]`; one of 3 or more whose
    first, else second, dimension is 2 is stacked along it; a pair of tensors is taken as it is. Each of the two must
    have 2 or more dimensions. `req_id` and `layer_idx` are part of the published signature; the caller, who may log,
    uses them.
    """
    pair = _published_split(layer_kv, block_size)
    if pair is None or any(blocks.ndim < 2 for blocks in pair):
        return None
    return pair


def _published_split(layer_kv: object, block_size: int | None) -> BlockViews | None:
    if isinstance(layer_kv, tuple):
        if len(layer_kv) == 2 and all(map(torch.is_tensor, layer_kv)):
            return layer_kv[0], layer_kv[1]
        return None
    if not isinstance(layer_kv, torch.Tensor):
        return None
    if layer_kv.ndim == 4 and layer_kv.shape[2] == block_size and layer_kv.shape[3] % 2 == 0:
        return _split(layer_kv, _PACKED)
    if layer_kv.ndim >= 3 and 2 in layer_kv.shape[:2]:
        dim = 0 if layer_kv.shape[0] == 2 else 1
        return layer_kv.select(dim, 0), layer_kv.select(dim, 1)
    return None


def describe_cache(cache: object) -> str:
    """The shape, dtype and device of a layer's cache in words, whatever it is."""
    if isinstance(cache, torch.Tensor):
        return f"{list(cache.shape)} {str(cache.dtype).removeprefix('torch.')} on {cache.device}"
    if isinstance(cache, (tuple, list)):
        return "(" + ", ".join(map(describe_cache, cache)) + ")"
    return f"of type {type(cache).__name__}"
