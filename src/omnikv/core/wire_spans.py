"""The tensors of a payload: what it can hold, where each lies in the data, and how the list of them is spelled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from omnikv.core.hashed import Hashed
from omnikv.errors import ConfigError

Kind = Literal["key", "value"]

KINDS: tuple[Kind, Kind] = ("key", "value")
ALIGNMENT = 64
MAX_DIMS = 8
MAX_INTEGER = 2**63 - 1
ENTRIES_KEY = "td"

# Bytes per element of each dtype that a payload may hold: the names that released readers accept.
ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
        "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
        "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    }
)  # fmt: skip


class TensorSpan(NamedTuple):
    """Where one tensor lies: `offset` and `nbytes` in the data, dtype by name, contiguous in C order."""

    kind: Kind
    layer: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def lay_out(tensors: Iterable[tuple[Kind, int, str, tuple[int, ...]]]) -> tuple[tuple[TensorSpan, ...], int]:
    """The span of each `(kind, layer, dtype, shape)`, aligned and in the given order, and the data's size in bytes.

    Raises:
        ConfigError: a dtype that payloads cannot hold, or a shape over the limits.
    """
    spans: list[TensorSpan] = []
    # Most layers are alike.
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    end = 0
    for kind, layer, dtype, shape in tensors:
        nbytes = sizes.get((dtype, shape))
        if nbytes is None:
            nbytes = sizes[dtype, shape] = _packed_nbytes(kind, layer, dtype, shape)
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        spans.append(TensorSpan(kind, layer, dtype, shape, offset, nbytes))
        end = offset + nbytes
    return Hashed(spans), end


def _packed_nbytes(kind: Kind, layer: int, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in ITEM_SIZES:
        raise ConfigError(
            f"the {kind} of layer {layer} has dtype {dtype}, which a payload cannot hold; convert it to one of "
            f"{', '.join(ITEM_SIZES)}"
        )
    nbytes = tensor_nbytes(shape, ITEM_SIZES[dtype])
    if nbytes is None:
        raise ConfigError(
            f"the {kind} of layer {layer} has shape {list(shape)}: at most {MAX_DIMS} dimensions and "
            f"{MAX_INTEGER} bytes fit in a payload"
        )
    return nbytes


def spell_entries(num_layers: int, spans: tuple[TensorSpan, ...]) -> str:
    """The list of tensors in a head: all keys, then all values, with those of missing layers among them."""
    names = list(itertools.product(KINDS, range(num_layers)))
    found: Iterable[TensorSpan | None] = spans
    if [(span.kind, span.layer) for span in spans] != names:
        present = {(span.kind, span.layer): span for span in spans}
        found = [present.get(name) for name in names]
    entries, shape, spelled = [], None, ""
    for (kind, layer), span in zip(names, found, strict=True):
        if span is None:
            entries.append(f'{{"n":"{kind}_cache_{layer}","x":true}}')
            continue
        if span.shape is not shape:
            shape, spelled = span.shape, ",".join(map(str, span.shape))
        entries.append(
            f'{{"n":"{kind}_cache_{layer}","i":{layer},"d":"{span.dtype}","s":[{spelled}],'
            f'"o":{span.offset},"b":{span.nbytes}}}'
        )
    return f'"{ENTRIES_KEY}":[{",".join(entries)}]'


def aligned(nbytes: int) -> int:
    """The least multiple of `ALIGNMENT` that is not below `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tensor_nbytes(shape: Sequence[int], item_size: int) -> int | None:
    """The bytes of a contiguous tensor with these sizes, none negative, or None when it is over the limits."""
    if len(shape) > MAX_DIMS:
        return None
    nbytes = math.prod(shape) * item_size
    # A zero size hides no overflow: strides are computed from the others.
    bound = nbytes or math.prod([size or 1 for size in shape]) * item_size
    return nbytes if bound <= MAX_INTEGER else None
