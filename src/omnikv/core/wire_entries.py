"""The list of tensors in a payload's head, read strictly: which layers were sent, and where their tensors lie.

Requests come in every length, so lists are read that were never seen before. Most say the same of every layer: then it
is enough to read the first entries, and to see that the list they make is spelled like the one that came.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

from omnikv.core.hashed import Hashed
from omnikv.core.wire import MAX_TENSORS, parse_json, show
from omnikv.core.wire_fields import as_object, refuse
from omnikv.core.wire_spans import (
    ENTRIES_KEY,
    ITEM_SIZES,
    KINDS,
    MAX_DIMS,
    MAX_INTEGER,
    Kind,
    TensorSpan,
    lay_out,
    spell_entries,
    tensor_nbytes,
)
from omnikv.errors import WireError, WireReason

_TENSOR_NAME = re.compile(r"(key|value)_cache_(0|[1-9][0-9]{0,9})", re.ASCII)
_SHORTEST_ENTRY = len('{"n":"key_cache_0","x":true}')


class Listed(NamedTuple):
    """A list of tensors that was read: its layers, its spans, and the data's size that they tile, None for none."""

    num_layers: int
    spans: tuple[TensorSpan, ...]
    tiled_nbytes: int | None


def read_alike(text: str, num_layers: int) -> Listed | None:
    """What a list says as a head spells it, where all its keys are alike, and all its values, and they tile the data.

    None where it says anything else, or is spelled otherwise than we do.
    """
    if not 0 < 2 * num_layers <= min(MAX_TENSORS, len(text) // _SHORTEST_ENTRY):
        return None
    try:
        first = [_read_first(text, kind) for kind in KINDS]
    except (ValueError, RecursionError, WireError):
        return None
    named = itertools.product(first, range(num_layers))
    spans, data_nbytes = lay_out((span.kind, layer, span.dtype, span.shape) for span, layer in named)
    if data_nbytes > MAX_INTEGER or spell_entries(num_layers, spans) != text:
        return None
    return Listed(num_layers, spans, data_nbytes)


def _read_first(text: str, kind: Kind) -> TensorSpan:
    start = text.index(f'{{"n":"{kind}_cache_0"')
    entry = parse_json(text[start : text.index("}", start) + 1])
    return _read_span(as_object(entry, "an entry"), kind, 0)


def read_list(entries: object, num_layers: int) -> Listed:
    """What a parsed list says; nothing is known yet of what its tensors tile.

    Raises:
        WireError: it is no list of tensors of `num_layers`.
    """
    if not isinstance(entries, list) or len(entries) != 2 * num_layers:
        found = f"{len(entries)} entries" if isinstance(entries, list) else show(entries)
        refuse(
            WireReason.LAYER_COUNT,
            f'"{ENTRIES_KEY}" must hold a key and a value for each of {num_layers} layers, got {found}',
        )
    if len(entries) > MAX_TENSORS:
        refuse(WireReason.LAYER_COUNT, f"the payload lists {len(entries)} tensors, at most {MAX_TENSORS} are read")
    return Listed(num_layers, _read_entries(entries, num_layers), None)


def _read_entries(entries: list[Any], num_layers: int) -> tuple[TensorSpan, ...]:
    """The spans of the layers that were sent; each layer has exactly one key and one value, or lacks both."""
    spans: list[TensorSpan] = []
    present: dict[tuple[Kind, int], bool] = {}
    for entry in entries:
        fields = as_object(entry, 'an entry of "td"')
        kind, layer = _read_name(fields, num_layers)
        if (kind, layer) in present:
            refuse(WireReason.DUPLICATE_LAYER, f"the {kind} of layer {layer} is listed twice")
        missing = fields.get("x", False)
        if type(missing) is not bool:
            refuse(
                WireReason.HEADER_FIELD, f'"x" of the {kind} of layer {layer} must be a boolean, got {show(missing)}'
            )
        present[kind, layer] = not missing
        if not missing:
            spans.append(_read_span(fields, kind, layer))
    # 2 * num_layers distinct names within range: each layer has both entries.
    for layer in range(num_layers):
        if present["key", layer] != present["value", layer]:
            absent = "value" if present["key", layer] else "key"
            refuse(WireReason.MISSING_LAYER, f"layer {layer} has no {absent}: both must be sent, or neither")
    return Hashed(spans)


def _read_name(fields: dict[str, Any], num_layers: int) -> tuple[Kind, int]:
    name = fields.get("n")
    match = _TENSOR_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        refuse(WireReason.TENSOR_NAME, f"a tensor is named key_cache_<layer> or value_cache_<layer>, got {show(name)}")
    kind: Kind = "key" if match[1] == "key" else "value"
    layer = int(match[2])
    index = fields.get("i")
    if index is not None and (type(index) is not int or index != layer):
        refuse(WireReason.TENSOR_NAME, f'the name {name} and the index "i" {show(index)} name different layers')
    if layer >= num_layers:
        refuse(WireReason.LAYER_COUNT, f"{name} is outside the payload's {num_layers} layers")
    return kind, layer


def _read_span(fields: dict[str, Any], kind: Kind, layer: int) -> TensorSpan:
    # Runs once a tensor: texts are only put together where they are needed.
    dtype, shape, offset, nbytes = fields.get("d"), fields.get("s"), fields.get("o"), fields.get("b")
    item_size = ITEM_SIZES.get(dtype) if isinstance(dtype, str) else None
    if not isinstance(dtype, str) or item_size is None:
        known = ", ".join(ITEM_SIZES)
        refuse(WireReason.DTYPE, f"the {kind} of layer {layer} has the unknown dtype {show(dtype)}; known are {known}")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        refuse(WireReason.SHAPE, f"the {kind} of layer {layer} has a shape that is no list of sizes: {show(shape)}")
    expected = tensor_nbytes(shape, item_size)
    if expected is None:
        limits = f"over {MAX_DIMS} dimensions or {MAX_INTEGER} bytes"
        refuse(WireReason.SHAPE, f"the {kind} of layer {layer} has shape {show(shape)}: {limits}")
    if type(nbytes) is not int or nbytes != expected:
        stated = f"states {show(nbytes)} bytes, but shape {show(shape)} of {dtype} takes {expected}"
        refuse(WireReason.SHAPE, f"the {kind} of layer {layer} {stated}")
    if type(offset) is not int or not 0 <= offset <= MAX_INTEGER:
        refuse(WireReason.SPAN_OUT_OF_RANGE, f"the {kind} of layer {layer} begins at no byte: {show(offset)}")
    return TensorSpan(kind, layer, dtype, tuple(shape), offset, nbytes)
