"""Objects as released connectors send them: msgpack, in which tensors and arrays are maps with a marker.

    tensor   {"__tensor__": true, "dtype": "float32", "shape": [...], "data": bytes}
    array    {"__ndarray__": true, "dtype": "<f4", "shape": [...], "data": bytes}

What only an engine knows (its requests' outputs) arrives as plain maps. Nothing that is received is executed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from typing import Any

import msgspec
import torch

from omnikv.errors import ConfigError, WireError, WireReason

_TENSOR = "__tensor__"
_ARRAY = "__ndarray__"


def encode_object(value: Any) -> bytes:
    """`value` as released connectors write it.

    Raises:
        ConfigError: something in it is neither plain data, tensor, array nor dataclass.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise ConfigError(f"a {type(value).__name__} cannot be sent through a published connector: {error}") from error


def decode_object(data: bytes | bytearray | memoryview, key: str) -> Any:
    """What `encode_object`, or a released connector, wrote; tensors own their memory.

    Raises:
        WireError: it is no msgpack, or a tensor or array in it is none.
    """
    try:
        return _restore(_decoder.decode(data))
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RuntimeError, RecursionError) as error:
        raise WireError(
            f"what the sender holds under {key!r} is no object of a released connector: {error}",
            reason=WireReason.HEADER_FIELD,
            key=key,
        ) from error


def _encode_other(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {
            _TENSOR: True,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": ctypes.string_at(data.data_ptr(), data.numel()),
        }
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and hasattr(value, "shape"):
        return {_ARRAY: True, "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    raise TypeError(f"a {type(value).__name__} in it is neither plain data, tensor, array nor dataclass")


def _restore(value: Any) -> Any:
    if isinstance(value, list):
        return [_restore(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(_TENSOR):
        return _restore_tensor(value)
    if value.get(_ARRAY):
        numpy = importlib.import_module("numpy")
        return numpy.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"])
    return {name: _restore(item) for name, item in value.items()}


def _restore_tensor(told: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, told["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{told['dtype']!r} is no dtype")
    data = bytearray(told["data"])
    if not data:
        return torch.empty(told["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(told["shape"])


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder = msgspec.msgpack.Decoder()
