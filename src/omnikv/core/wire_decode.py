"""Reads the head of a payload: a `Header`, or a `WireError` with a reason and an offset, whatever the bytes.

Nothing is believed before it is compared with what is there: layer counts with the entries that are listed, sizes with
shapes, places with the bytes that came. So no number in a head makes us allocate, and memory stays proportional to the
head. Rules that only our own payloads promise (exact data size, no gaps beyond alignment, a checksum) hold where the
`"omnikv"` key is; without it a released engine wrote the payload, and gaps or bytes after the last tensor are allowed.

Requests of one model come in few shapes, and nearly all of a head says nothing else: its list of tensors, and what
stands behind that but for the checksum. That is read once for each distinct text of it (`_body_in`) and cut out of the
head before what stands before it is parsed. In place of the list stands a number then that occurs nowhere else and has
one spelling: where it comes out as the list's value, it was the list that stood there.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, NamedTuple, NoReturn

from omnikv.core.hashed import Hashed
from omnikv.core.wire import (
    ALIGNMENT,
    DIGEST_KEY,
    ENTRIES_KEY,
    EXTENSION_KEY,
    EXTENSION_VERSION,
    ITEM_SIZES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    MAX_INTEGER,
    MAX_TENSORS,
    PREFIX_NBYTES,
    REGIONS_VERSION,
    UNSEALED,
    Extension,
    Header,
    Kind,
    Scope,
    TensorSpan,
    parse_json,
    show,
    split_digest,
    tensor_nbytes,
    text_of,
)
from omnikv.core.wire_fields import as_integer, as_integers, as_object, as_optional_integer, as_text, refuse
from omnikv.core.wire_regions import read_regions
from omnikv.errors import WireError, WireReason

# The texts around the list of tensors as we write heads, and what stands in its place while the rest is parsed.
_LIST_START, _LIST_END = f'"{ENTRIES_KEY}":['.encode(), ',"nl":'
_LIST_MARK = 20422042204220422042
_MARK = str(_LIST_MARK)
_MARK_BYTES = _MARK.encode()
_JSON_SPACES = b" \t\n\r"
# A longer head is parsed whole, so that what is kept stays small.
_MAX_KEPT_NBYTES = 64 << 10
_REST_KEYS = frozenset((ENTRIES_KEY, "nl", EXTENSION_KEY, DIGEST_KEY))
_TENSOR_NAME = re.compile(r"(key|value)_cache_(0|[1-9][0-9]{0,9})", re.ASCII)


def head_nbytes(start: bytes | bytearray | memoryview, payload_nbytes: int) -> int:
    """How long the head of a payload is, read from its first bytes; also where its data begins.

    Raises:
        WireError: the payload is too short for the head it announces, or the head is over `MAX_HEADER_BYTES`.
    """
    if payload_nbytes < PREFIX_NBYTES or len(start) < PREFIX_NBYTES:
        raise WireError(
            f"a payload begins with {PREFIX_NBYTES} length bytes, here are {min(payload_nbytes, len(start))} bytes",
            reason=WireReason.TRUNCATED,
            offset=payload_nbytes,
        )
    nbytes = int.from_bytes(start[:PREFIX_NBYTES], "big")
    if nbytes > MAX_HEADER_BYTES:
        raise WireError(
            f"the payload announces a header of {nbytes} bytes, at most {MAX_HEADER_BYTES} are allowed",
            reason=WireReason.HEADER_TOO_LARGE,
        )
    if PREFIX_NBYTES + nbytes > payload_nbytes:
        raise WireError(
            f"the payload announces a header of {nbytes} bytes, only {payload_nbytes - PREFIX_NBYTES} came",
            reason=WireReason.TRUNCATED,
            offset=payload_nbytes,
        )
    return PREFIX_NBYTES + nbytes


def decode(payload: bytes | bytearray | memoryview) -> Header:
    """The header of a whole payload, given as contiguous bytes; the checksum's value is not checked.

    Raises:
        WireError: the payload breaks a rule of the format.
    """
    nbytes = head_nbytes(payload[:PREFIX_NBYTES], len(payload))
    return decode_head(bytes(payload[:nbytes]), len(payload))


def decode_head(head: bytes, payload_nbytes: int) -> Header:
    """What `head` (as long as `head_nbytes` said) says about a payload of `payload_nbytes`, every rule checked.

    The checksum is checked for its form only: its value is for whoever holds the data (`omnikv.tensors.pack`).

    Raises:
        WireError: the head breaks a rule of the format; `reason` names the rule.
    """
    fields, body = _load_fields(head)
    if body is not None:
        listed, stated = body.listed, body.stated
    else:
        listed = _read_list(fields.get(ENTRIES_KEY), as_integer(fields.get("nl"), "nl", WireReason.LAYER_COUNT))
        stated = _read_stated(fields.get(EXTENSION_KEY))
    extension = stated.extension
    data_nbytes = _fitting_nbytes(stated, len(head), payload_nbytes)
    if extension is None:
        _check_published_spans(listed.spans, len(head), data_nbytes)
    elif listed.tiled_nbytes != data_nbytes:
        _check_tiled_spans(listed.spans, len(head), data_nbytes)
    return Header(
        request_id=as_text(fields.get("rid"), "rid"),
        num_layers=listed.num_layers,
        spans=listed.spans,
        data_nbytes=data_nbytes,
        block_ids=as_integers(fields.get("bids"), "bids", low=-MAX_INTEGER),
        metadata=as_object(fields.get("meta"), "meta"),
        extension=extension,
        scope=_read_scope(head, fields, ours=extension is not None),
    )


# --- the head as JSON ---


def _load_fields(head: bytes) -> tuple[dict[str, Any], _Body | None]:
    """The head's fields and, where it is written as we write heads, what was read apart from them."""
    start, digest = head.find(_LIST_START), split_digest(head)
    end = len(head.rstrip(_JSON_SPACES)) if digest is None else digest.at
    if start < PREFIX_NBYTES or end <= start or len(head) > _MAX_KEPT_NBYTES:
        return _load_object(text_of(head)), None
    before = head[PREFIX_NBYTES:start]
    try:
        body = _body_in(head[start:end], is_sealed=digest is not None)
        fields = parse_json(f'{before.decode()}"{ENTRIES_KEY}":{_MARK}}}')
    except (WireError, ValueError, RecursionError):
        # Read again whole, which says what is wrong and where.
        return _load_object(text_of(head)), None
    mark = fields.get(ENTRIES_KEY) if isinstance(fields, dict) else None
    if type(mark) is not int or mark != _LIST_MARK or _MARK_BYTES in before or fields.keys() & body.fields.keys():
        return _load_object(text_of(head)), None
    return fields | body.fields, body


def _load_object(text: str) -> dict[str, Any]:
    try:
        fields = parse_json(text)
    except json.JSONDecodeError as error:
        offset = PREFIX_NBYTES + len(text[: error.pos].encode("utf-8"))
        raise WireError(
            f"the header is not JSON: {error.msg}", reason=WireReason.HEADER_NOT_JSON, offset=offset
        ) from error
    except (ValueError, RecursionError) as error:
        raise WireError(
            f"the header is not JSON that we read: {error}", reason=WireReason.HEADER_NOT_JSON, offset=PREFIX_NBYTES
        ) from error
    return as_object(fields, "the header")


# --- tensors ---


class _Listed(NamedTuple):
    """A list of tensors that was read: its layers, its spans, and the data's size that they tile, None for none."""

    num_layers: int
    spans: tuple[TensorSpan, ...]
    tiled_nbytes: int | None


class _Stated(NamedTuple):
    """What we added to a head, and the data's size that it states; a released engine's head has neither."""

    extension: Extension | None
    data_nbytes: int


class _Body(NamedTuple):
    """What a head says from its list of tensors on: the fields behind the list, the list, and what we stated."""

    fields: dict[str, Any]
    listed: _Listed
    stated: _Stated


@functools.lru_cache(maxsize=32)
def _body_in(body: bytes, *, is_sealed: bool) -> _Body:
    """What `body` says: a head from its list of tensors on, up to its checksum's digits where it `is_sealed`.

    Raises:
        WireError, ValueError, RecursionError: it is no such text.
    """
    text = body.decode() + f'{UNSEALED}"}}' * is_sealed
    end = text.find(_LIST_END)
    fields = parse_json(f'{{"{ENTRIES_KEY}":{_MARK}{text[end:]}')
    rest = parse_json(f"{{{text[:end]}}}")
    if _MARK in text or fields.pop(ENTRIES_KEY) != _LIST_MARK or not fields.keys() <= _REST_KEYS or len(rest) != 1:
        raise ValueError("the list of tensors stands among other keys than we write")
    num_layers = as_integer(fields.get("nl"), "nl", WireReason.LAYER_COUNT)
    listed = _read_list(rest[ENTRIES_KEY], num_layers)
    data_nbytes = max((span.offset + span.nbytes for span in listed.spans), default=0)
    _check_tiled_spans(listed.spans, 0, data_nbytes)
    stated = _read_stated(fields.get(EXTENSION_KEY))
    if is_sealed and stated.extension is None:
        raise ValueError("what is refused is said with the checksum that came")
    return _Body(fields, listed._replace(tiled_nbytes=data_nbytes), stated)


def _read_list(entries: object, num_layers: int) -> _Listed:
    if not isinstance(entries, list) or len(entries) != 2 * num_layers:
        found = f"{len(entries)} entries" if isinstance(entries, list) else show(entries)
        refuse(
            WireReason.LAYER_COUNT,
            f'"{ENTRIES_KEY}" must hold a key and a value for each of {num_layers} layers, got {found}',
        )
    if len(entries) > MAX_TENSORS:
        refuse(WireReason.LAYER_COUNT, f"the payload lists {len(entries)} tensors, at most {MAX_TENSORS} are read")
    return _Listed(num_layers, _read_entries(entries, num_layers), None)


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


def _check_published_spans(spans: tuple[TensorSpan, ...], data_start: int, available: int) -> None:
    """A released engine's payload: tensors lie apart and inside of what came; other bytes may lie between them."""
    end = total = 0
    for span in sorted(spans, key=_place):
        if span.nbytes and span.offset < end:
            _refuse_overlap(span, data_start, end)
        end = max(end, span.offset + span.nbytes)
        total += span.nbytes
    if end > available:
        # Released engines pack without gaps, so only then do we know that the rest was cut off.
        reason = WireReason.TRUNCATED if end == total else WireReason.SPAN_OUT_OF_RANGE
        refuse(reason, f"tensors end at byte {end} of the data, of which {available} came", data_start + available)


def _check_tiled_spans(spans: tuple[TensorSpan, ...], data_start: int, data_nbytes: int) -> None:
    """A payload of ours: tensors fill the stated size, but for less than `ALIGNMENT` bytes before each."""
    end = 0
    for span in sorted(spans, key=_place):
        if span.offset < end:
            _refuse_overlap(span, data_start, end)
        if span.offset + span.nbytes > data_nbytes:
            refuse(
                WireReason.SPAN_OUT_OF_RANGE,
                f"the {span.kind} of layer {span.layer} ends at byte {span.offset + span.nbytes} of {data_nbytes}",
                data_start + data_nbytes,
            )
        if span.offset - end >= ALIGNMENT:
            _refuse_gap(data_start + end, span.offset - end)
        end = span.offset + span.nbytes
    if end != data_nbytes:
        _refuse_gap(data_start + end, data_nbytes - end)


def _place(span: TensorSpan) -> tuple[int, int]:
    return span.offset, span.nbytes


def _refuse_overlap(span: TensorSpan, data_start: int, end: int) -> NoReturn:
    refuse(
        WireReason.SPAN_OVERLAP,
        f"the {span.kind} of layer {span.layer} begins at byte {span.offset}, inside of a tensor that ends at {end}",
        data_start + span.offset,
    )


def _refuse_gap(offset: int, nbytes: int) -> NoReturn:
    refuse(WireReason.SPAN_GAP, f"{nbytes} bytes belong to no tensor; only alignment may leave gaps", offset)


# --- what is ours ---


def _read_stated(value: object) -> _Stated:
    """What we added, of which `value` is the text's; nothing in a released engine's head."""
    if value is None:
        return _Stated(None, 0)
    fields = as_object(value, EXTENSION_KEY)
    version = fields.get("v")
    if type(version) is not int or version not in (EXTENSION_VERSION, REGIONS_VERSION):
        known = f"{EXTENSION_VERSION} and {REGIONS_VERSION}"
        refuse(
            WireReason.HEADER_FIELD,
            f"the payload is of omnikv's format version {show(version)}, this reader knows {known}",
        )
    data_nbytes = as_integer(fields.get("n"), "omnikv.n")
    extension = Extension(
        source_rank=as_optional_integer(fields.get("src"), "omnikv.src"),
        target_rank=as_optional_integer(fields.get("dst"), "omnikv.dst"),
        role=None if fields.get("role") is None else as_text(fields["role"], "omnikv.role"),
        attempt=as_optional_integer(fields.get("attempt"), "omnikv.attempt"),
        heads=as_integers(fields.get("heads", []), "omnikv.heads"),
        num_tokens=as_optional_integer(fields.get("tokens"), "omnikv.tokens"),
        regions=read_regions(fields.get("regions"), MAX_INTEGER) if version == REGIONS_VERSION else (),
    )
    return _Stated(extension, data_nbytes)


def _fitting_nbytes(stated: _Stated, data_start: int, payload_nbytes: int) -> int:
    """The data's size, which is what came; a released engine's payload takes all bytes."""
    available = payload_nbytes - data_start
    if stated.extension is None:
        return available
    if stated.data_nbytes > available:
        refuse(WireReason.TRUNCATED, f"{stated.data_nbytes} data bytes were sent, {available} came", payload_nbytes)
    if stated.data_nbytes < available:
        _refuse_gap(data_start + stated.data_nbytes, available - stated.data_nbytes)
    return stated.data_nbytes


def _read_scope(head: bytes, fields: dict[str, Any], *, ours: bool) -> Scope | None:
    """What the checksum covers. Our payloads carry one, released engines' none: a half of that was tampered with."""
    digest = split_digest(head)
    if not ours and DIGEST_KEY not in fields:
        return None
    if digest is None or not ours:
        refuse(
            WireReason.CHECKSUM,
            f'a payload with "{EXTENSION_KEY}" ends its header with a checksum that we know, one without has none; '
            f"got {show(fields.get(DIGEST_KEY))}",
        )
    return digest.scope
