"""Any nesting of plain values and tensors as one tensor of bytes, and back as views on it, without pickling.

For ranks of one stage, which run the same code: between stages, and wherever bytes come from elsewhere, payloads travel
in the format of `omnikv.core.wire`. A bundle is a mark, the length of a JSON head, the head, and the data of each
tensor at a multiple of `ALIGNMENT`. The head holds the value with a number in place of each tensor, and where each
tensor lies. A tensor met twice is written once.

What a head can hold: None, bool, int, float, str, list, tuple, dict and `SimpleNamespace`, each of exactly that type.
A value with anything else in it is refused, since nobody could say what its reader should make of it.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from omnikv.core.wire_spans import ALIGNMENT
from omnikv.errors import ConfigError, RemoteProtocolError
from omnikv.tensors.unpack import DTYPES

_MARK = b"OKVB0001"
_LENGTH_NBYTES = 8
_PREFIX_NBYTES = len(_MARK) + _LENGTH_NBYTES
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = (type(None), bool, int, float, str)


def pack(value: Any) -> torch.Tensor:
    """A new 1-D uint8 tensor on the CPU that holds `value`, its tensors copied, wherever they were.

    Raises:
        ConfigError: something in `value` cannot be held; the message names its type.
        RuntimeError: torch could not copy a tensor.
    """
    packing = _Packing()
    skeleton = packing.encode(value)
    head = json.dumps({"value": skeleton, "tensors": packing.spans}).encode()
    start = _aligned(_PREFIX_NBYTES + len(head))
    out = torch.empty(start + packing.data_nbytes, dtype=torch.uint8)
    front = _MARK + len(head).to_bytes(_LENGTH_NBYTES, "little") + head
    out[:start] = torch.frombuffer(bytearray(front.ljust(start, b"\0")), dtype=torch.uint8)
    for tensor, (_, shape, offset) in zip(packing.tensors, packing.spans, strict=True):
        room = out[start + offset : start + offset + tensor.nbytes]
        room.view(tensor.dtype).view(shape).copy_(tensor.detach())
    return out


def unpack(bundle: torch.Tensor) -> Any:
    """The value in `bundle`; its tensors are views on it.

    Raises:
        RemoteProtocolError: it is no bundle, or one that was cut short.
    """
    try:
        head, start = _read_head(bundle)
        tensors = [_view(bundle, start, *span) for span in head["tensors"]]
        return _decode(head["value"], tensors)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, RuntimeError) as error:
        raise RemoteProtocolError(
            f"{bundle.numel()} bytes of a peer are no bundle of values and tensors: {error}"
        ) from error


class _Packing:
    """What was met so far: each tensor once, and where it will lie."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.spans: list[tuple[str, list[int], int]] = []
        self.data_nbytes = 0
        self._numbers: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        """`value` as JSON: a plain value is itself, everything else a pair of a letter and its parts."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            return ["l" if kind is list else "t", [self.encode(part) for part in value]]
        if kind is dict or kind is SimpleNamespace:
            items = value.items() if kind is dict else vars(value).items()
            return ["d" if kind is dict else "n", [[self.encode(key), self.encode(part)] for key, part in items]]
        if isinstance(value, torch.Tensor):
            return ["x", self._number(value)]
        raise ConfigError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be packed: only plain values and tensors can"
        )

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            name = _NAMES.get(tensor.dtype)
            if name is None or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
                raise ConfigError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be packed")
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.spans.append((name, list(tensor.shape), self.data_nbytes))
            self.data_nbytes = _aligned(self.data_nbytes + tensor.nbytes)
        return self._numbers[id(tensor)]


def _read_head(bundle: torch.Tensor) -> tuple[dict[str, Any], int]:
    prefix = bytes(bundle[:_PREFIX_NBYTES].numpy())
    if prefix[: len(_MARK)] != _MARK:
        raise ValueError(f"they begin with {prefix[:8]!r}")
    end = _PREFIX_NBYTES + int.from_bytes(prefix[len(_MARK) :], "little")
    if end > bundle.numel():
        raise ValueError(f"a head that ends at {end}")
    return json.loads(bytes(bundle[_PREFIX_NBYTES:end].numpy())), _aligned(end)


def _view(bundle: torch.Tensor, start: int, name: str, shape: list[int], offset: int) -> torch.Tensor:
    dtype = DTYPES[name]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return bundle.narrow(0, start + offset, nbytes).view(dtype).view(shape)


def _decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    letter, content = value
    if letter == "x":
        return tensors[content]
    if letter in ("l", "t"):
        parts = [_decode(part, tensors) for part in content]
        return parts if letter == "l" else tuple(parts)
    if letter not in ("d", "n"):
        raise ValueError(f"an unknown letter {letter!r}")
    items = {_decode(key, tensors): _decode(part, tensors) for key, part in content}
    return items if letter == "d" else SimpleNamespace(**items)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
