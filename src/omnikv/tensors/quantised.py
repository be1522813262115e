"""KV in 8-bit floats, with its scales as a part of its own: they travel as entries of the cache, after what they scale.

A quantised layer is two entries: its values in 8 bits, then its scales in float32, each `[tokens, kv_heads, 1]`
whatever one scale covers (a whole tensor, a head, or a head of one token). So scales are cut, merged and proven as
everything else is, and every part of a layer, whichever tokens and heads it has, carries the scales of just those. A
route that names layers counts both entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from omnikv.core.dtypes import FLOATS, FLOATS8, convertible
from omnikv.core.layout import ScaleGrain
from omnikv.errors import ConfigError, HandoffError
from omnikv.tensors.convert import converted, is_scale, name_of, require_finite
from omnikv.tensors.kv import LayerKV

# What an engine scales one tensor by: a number; a tensor `[kv_heads]`; or `[tokens, kv_heads]`.
Scale: TypeAlias = "float | torch.Tensor"

_SCALE_DTYPE = torch.float32


def quantise(layers: Sequence[LayerKV], dtype: torch.dtype, grain: ScaleGrain = "head") -> list[LayerKV]:
    """Each layer `[tokens, kv_heads, head_dim]` as two entries: its values in `dtype`, and its scales.

    The largest value that a scale covers becomes the largest that `dtype` holds.

    Raises:
        ConfigError: `dtype` is no 8-bit float, or a layer is in no float of 16 or 32 bits.
        HandoffError: a layer holds what is infinite or no number, for which there is no scale.
    """
    if name_of(dtype) not in FLOATS8:
        raise ConfigError(f"KV is quantised to {', '.join(FLOATS8)}, not to {name_of(dtype)}")
    entries = []
    for layer in layers:
        halves = [_quantised(tensor, dtype, grain) for tensor in layer]
        entries += [LayerKV(*(values for values, _ in halves)), LayerKV(*(scales for _, scales in halves))]
    return entries


def dequantise(entries: Sequence[LayerKV], dtype: torch.dtype) -> list[LayerKV]:
    """The layers of quantised `entries` in `dtype`, in memory of their own.

    Raises:
        ConfigError: the entries are no quantised layers, or `dtype` is no float of 16 or 32 bits.
        HandoffError: a value is beyond what float16 holds.
    """
    if name_of(dtype) not in FLOATS:
        raise ConfigError(f"KV is dequantised to {', '.join(FLOATS)}, not to {name_of(dtype)}")
    layers, scales = split_scales(entries)
    return [
        LayerKV(*(_scaled(values, by, dtype) for values, by in zip(layer, scale, strict=True)))
        for layer, scale in zip(layers, scales, strict=True)
    ]


def in_dtype(entries: Sequence[LayerKV], dtype: torch.dtype, *, copy: bool) -> list[LayerKV]:
    """The layers in `dtype`, quantised ones without their scales; with `copy`, all of them in memory of their own.

    Raises:
        ConfigError: a layer does not convert into `dtype`.
        HandoffError: a value is beyond what float16 holds.
    """
    # Both, since a head of one element in float32 looks like a scale.
    if any(map(is_scale, entries)) and any(name_of(entry.key.dtype) in FLOATS8 for entry in entries):
        return dequantise(entries, dtype)
    for number, layer in enumerate(entries):
        if not convertible(name_of(layer.key.dtype), name_of(dtype)):
            raise ConfigError(f"layer {number} in {name_of(layer.key.dtype)} does not convert into {name_of(dtype)}")
    return [LayerKV(*(converted(tensor, dtype, copy=copy) for tensor in layer)) for layer in entries]


def split_scales(entries: Sequence[LayerKV]) -> tuple[list[LayerKV], list[LayerKV]]:
    """The values of quantised `entries`, and their scales, one pair a layer each.

    Raises:
        ConfigError: the entries are not values in 8 bits, each followed by its scales.
    """
    layers, scales = list(entries[::2]), list(entries[1::2])
    if not layers or len(layers) != len(scales):
        raise ConfigError(f"{len(entries)} entries are no quantised layers: each has its values, then its scales")
    for number, (layer, scale) in enumerate(zip(layers, scales, strict=True)):
        for name, values, by in zip(("key", "value"), layer, scale, strict=True):
            expected = (*values.shape[:2], 1)
            if name_of(values.dtype) not in FLOATS8 or by.dtype != _SCALE_DTYPE or tuple(by.shape) != expected:
                raise ConfigError(
                    f"the {name} of layer {number} is {list(values.shape)} in {name_of(values.dtype)}, followed by "
                    f"{list(by.shape)} in {name_of(by.dtype)}: a quantised one has 8-bit values and then scales "
                    f"{list(expected)} in float32"
                )
    return layers, scales


def scale_entry(key: Scale, value: Scale, grain: ScaleGrain, num_tokens: int, num_heads: int) -> LayerKV:
    """An engine's scales of one layer as the entry that travels: views `[tokens, kv_heads, 1]` in float32.

    Raises:
        ConfigError: a scale has not the shape that `grain` says.
    """
    return LayerKV(*(_expanded(scale, grain, num_tokens, num_heads) for scale in (key, value)))


def _quantised(tensor: torch.Tensor, dtype: torch.dtype, grain: ScaleGrain) -> tuple[torch.Tensor, torch.Tensor]:
    if name_of(tensor.dtype) not in FLOATS:
        raise ConfigError(f"KV in {name_of(tensor.dtype)} cannot be quantised; {', '.join(FLOATS)} can")
    largest = torch.finfo(dtype).max
    wide = tensor.detach().float()
    scale = torch.ones(1, 1, 1, device=tensor.device)
    if wide.numel():
        covered = {"tensor": (0, 1, 2), "head": (0, 2), "token_head": (2,)}[grain]
        scale = wide.abs().amax(covered, keepdim=True) / largest
        if not bool(scale.isfinite().all()):
            raise HandoffError(f"the KV holds values that are infinite or no numbers; they cannot be {name_of(dtype)}")
        # Nothing but zeros, or what is too small to be divided by, needs no scale.
        scale = torch.where(scale > torch.finfo(_SCALE_DTYPE).tiny, scale, torch.ones_like(scale))
    # Rounding may exceed the largest value by a little, which some formats turn into no number.
    values = (wide / scale).clamp_(-largest, largest).to(dtype)
    return values, scale.expand(*tensor.shape[:2], 1)


def _scaled(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = (values.float() * scales).to(dtype)
    require_finite(out, values.dtype)
    return out


def _expanded(scale: Scale, grain: ScaleGrain, num_tokens: int, num_heads: int) -> torch.Tensor:
    tensor = torch.as_tensor(scale, dtype=_SCALE_DTYPE).detach()
    shapes = {"tensor": (), "head": (num_heads,), "token_head": (num_tokens, num_heads)}
    if tensor.numel() == 1 and grain == "tensor":
        tensor = tensor.reshape(())
    if tuple(tensor.shape) != shapes[grain]:
        raise ConfigError(f"a scale a {grain} has the shape {list(shapes[grain])} here, got {list(tensor.shape)}")
    return tensor.expand(num_tokens, num_heads).unsqueeze(-1)
