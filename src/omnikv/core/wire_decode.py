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
from typing import Any, NamedTuple, NoReturn

from omnikv.core.wire import (
    DIGEST_KEY,
    EXTENSION_KEY,
    EXTENSION_VERSION,
    MAX_HEADER_BYTES,
    PREFIX_NBYTES,
    REGIONS_VERSION,
    UNSEALED,
    Extension,
    Header,
    Scope,
    parse_json,
    show,
    split_digest,
    text_of,
)
from omnikv.core.wire_entries import Listed, read_alike, read_list
from omnikv.core.wire_fields import as_integer, as_integers, as_object, as_optional_integer, as_text, refuse
from omnikv.core.wire_regions import read_regions
from omnikv.core.wire_spans import ALIGNMENT, ENTRIES_KEY, MAX_INTEGER, TensorSpan
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
        listed = read_list(fields.get(ENTRIES_KEY), as_integer(fields.get("nl"), "nl", WireReason.LAYER_COUNT))
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


class _Stated(NamedTuple):
    """What we added to a head, and the data's size that it states; a released engine's head has neither."""

    extension: Extension | None
    data_nbytes: int


class _Body(NamedTuple):
    """What a head says from its list of tensors on: the fields behind the list, the list, and what we stated."""

    fields: dict[str, Any]
    listed: Listed
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
    if _MARK in text or fields.pop(ENTRIES_KEY) != _LIST_MARK or not fields.keys() <= _REST_KEYS:
        raise ValueError("the list of tensors stands among other keys than we write")
    num_layers = as_integer(fields.get("nl"), "nl", WireReason.LAYER_COUNT)
    listed = read_alike(text[:end], num_layers) or _read_tiled(text[:end], num_layers)
    stated = _read_stated(fields.get(EXTENSION_KEY))
    if is_sealed and stated.extension is None:
        raise ValueError("what is refused is said with the checksum that came")
    return _Body(fields, listed, stated)


def _read_tiled(text: str, num_layers: int) -> Listed:
    rest = parse_json(f"{{{text}}}")
    if len(rest) != 1:
        raise ValueError("another key stands beside the list of tensors")
    listed = read_list(rest[ENTRIES_KEY], num_layers)
    data_nbytes = max((span.offset + span.nbytes for span in listed.spans), default=0)
    _check_tiled_spans(listed.spans, 0, data_nbytes)
    return listed._replace(tiled_nbytes=data_nbytes)


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
