"""Values in another dtype, where they are copied anyway: at the sender if that makes them fewer bytes, else at the end.

Between the floats of 16 and 32 bits a copy converts. What must not be converted silently is refused: dtypes whose
values would be cut off, and numbers that float16 is too small for (they would become infinite).
"""

from __future__ import annotations

import torch

from omnikv.core.dtypes import FLOATS, FLOATS8
from omnikv.errors import ConfigError, HandoffError
from omnikv.tensors.kv import LayerKV, LayerSource, TensorSource
from omnikv.tensors.lanes import device_of


class CastSource:
    """Another source in a dtype of 16 or 32 bits; converted as it is written."""

    __slots__ = ("_source", "dtype", "shape")

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self._source = source
        self.dtype = dtype
        self.shape = source.shape

    @property
    def device(self) -> torch.device | None:
        """Where the source is, if on the host; None elsewhere: what is checked once written is not left to a stream."""
        device = device_of(self._source)
        return device if device is not None and device.type == "cpu" else None

    def write_into(self, out: torch.Tensor) -> None:
        """As `TensorSource`.

        Raises:
            HandoffError: a value is beyond what float16 holds.
        """
        self._source.write_into(out)
        require_finite(out, self._source.dtype)


def cast_layer(layer: LayerSource, dtype: torch.dtype) -> LayerSource:
    """The layer in `dtype`, still unread; itself where it is so already, as scales are where 8-bit floats are sent.

    Raises:
        ConfigError: its dtype does not convert into that one.
    """
    if layer.key.dtype == dtype or (name_of(dtype) in FLOATS8 and is_scale(layer)):
        return layer
    require_convertible(layer.key.dtype, dtype)
    return LayerSource(CastSource(layer.key, dtype), CastSource(layer.value, dtype))


def converted(tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """The tensor in `dtype`: itself where it is so already, unless a `copy` is wanted.

    Raises:
        HandoffError: a value is beyond what float16 holds.
    """
    out = tensor.to(dtype, copy=copy)
    require_finite(out, tensor.dtype)
    return out


def require_convertible(from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
    """Nothing, when a sender's copy may convert the one into the other.

    Raises:
        ConfigError: it may not; 8-bit floats need their scales for that.
    """
    names = name_of(from_dtype), name_of(to_dtype)
    if from_dtype != to_dtype and not set(names) <= set(FLOATS):
        raise ConfigError(
            f"{names[0]} is not sent as {names[1]}: {', '.join(FLOATS)} are sent as one another, and 8-bit floats go "
            "with their scales, made by omnikv.tensors.quantised.quantise and undone at the receiver"
        )


def require_finite(converted: torch.Tensor, from_dtype: torch.dtype) -> None:
    """Nothing, when no value of `converted` became infinite because float16 is too small for it.

    Raises:
        HandoffError: one did.
    """
    # float32 and bfloat16 reach equally far, so only float16 can overflow.
    if converted.dtype != torch.float16 or from_dtype == torch.float16 or not converted.numel():
        return
    # The extremes take a tenth of the time of asking every value; they are no numbers where any value is none.
    lowest, highest = torch.aminmax(converted)
    if not bool(torch.isfinite(highest - lowest)) and bool(converted.isinf().any()):
        raise HandoffError(
            f"the KV holds values beyond {torch.finfo(torch.float16).max:.0f}, which float16 cannot hold; hand it over "
            f"as bfloat16 or as {name_of(from_dtype)}"
        )


def is_scale(layer: LayerSource | LayerKV) -> bool:
    """Whether this entry of a quantised cache holds scales: `[tokens, kv_heads, 1]` in float32."""
    return layer.key.dtype == torch.float32 and tuple(layer.key.shape[2:]) == (1,)


def dtype_named(name: str | None) -> torch.dtype:
    """The dtype of this name.

    Raises:
        ConfigError: this torch has none.
    """
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name, as layouts and payloads have it."""
    return str(dtype).removeprefix("torch.")
