"""A payload's head: what the bytes of a handoff say about themselves, read and written without touching tensor data.

A payload is a *head* and then the *data*. The head is a 4-byte big-endian length, that many bytes of JSON, and nothing
else; every offset in it counts from the first byte of the data. The keys are the ones that released engines write
(vllm-omni's KV transfer manager), and both sides read each other:

* a released reader takes each tensor from its stated offset and ignores keys it does not know, so we may pad the JSON
  with spaces, leave gaps before tensors to align them, and add two keys of our own;
* `"omnikv"` states how many data bytes there are and whose part this is, `"ck"`, always last, carries a checksum at a
  place that `split_digest` finds without parsing, so that it can be filled in after the tensors are packed.

This module holds the format's limits and records and writes heads; `omnikv.core.wire_decode` reads them.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from omnikv.core.boxes import Region
from omnikv.core.wire_regions import spell_regions
from omnikv.core.wire_spans import ALIGNMENT, MAX_INTEGER, TensorSpan, aligned, spell_entries
from omnikv.errors import ConfigError, WireError, WireReason

Scope = Literal["all", "header"]

PREFIX_NBYTES = 4
MAX_HEADER_BYTES = 8 << 20
# Reading takes time for each value and tensor, not for each byte: together these keep the longest well under a second.
MAX_HEADER_MARKS = 1 << 19
MAX_TENSORS = 1 << 14
# Numbers in metadata may be larger than MAX_INTEGER (hashes), but parsing digits costs their square.
MAX_INTEGER_DIGITS = 100
EXTENSION_KEY = "omnikv"
EXTENSION_VERSION = 1
# Of payloads whose i-th pair is not layer i: readers that know only version 1 must not read them.
REGIONS_VERSION = 2
SLICE_STAMP_KEY = "tp_head_slice"

DIGEST_KEY = "ck"
DIGEST_ALGORITHM = "xxh3_128"
UNSEALED = "0" * 32
_UNSEALED_BYTES = UNSEALED.encode()
_DIGEST_TAIL = re.compile(rb',"ck":"xxh3_128\.(all|header)\.([0-9a-f]{32})"\} *\Z')
_DIGEST_TAIL_NBYTES = 128 + ALIGNMENT

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60
# Shows a value of unknown size and depth in a message, shortened.
show = _shown.repr


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Whose part of which send a payload is, as its sender stated it; None or empty where it did not.

    `heads` are the global KV-head ids in the order of the tensors' head axis. `regions`, where a part has not all
    tokens of all layers, say which it has of a request of `num_tokens`; its pairs follow them, layer by layer.
    """

    source_rank: int | None = None
    target_rank: int | None = None
    role: str | None = None
    attempt: int | None = None
    heads: tuple[int, ...] = ()
    num_tokens: int | None = None
    regions: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything that a head says. A layer without spans was sent as missing; the others have a key and a value.

    `extension` and `scope` are None when a released engine wrote the payload; `scope` says what its checksum covers.
    """

    request_id: str
    num_layers: int
    spans: tuple[TensorSpan, ...]
    data_nbytes: int
    block_ids: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extension: Extension | None = None
    scope: Scope | None = None


class Digest(NamedTuple):
    """The checksum that a head carries: 32 hex digits at byte `at` of the head."""

    scope: Scope
    hexdigest: str
    at: int


def encode_head(header: Header) -> bytes:
    """The head of a payload of ours, with its checksum still `UNSEALED`; its length is a multiple of `ALIGNMENT`.

    Raises:
        ConfigError: an empty request id, metadata that JSON cannot hold, or a head over `MAX_HEADER_BYTES`,
            `MAX_HEADER_MARKS` or `MAX_TENSORS`.
    """
    _require_request_id(header.request_id)
    block_ids = _to_json(_plain_block_ids(header.block_ids)) if header.block_ids else "[]"
    text = f'{{"rid":{_to_json(header.request_id)},"bids":{block_ids},"meta":{_spell_metadata(header.metadata)},'
    extension, scope = header.extension or Extension(), header.scope or "header"
    text += _spell_body(header.num_layers, header.spans, extension, header.data_nbytes, scope)
    nbytes = aligned(PREFIX_NBYTES + len(text)) - PREFIX_NBYTES
    if nbytes > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the header of request {show(header.request_id)} takes {nbytes} bytes, at most {MAX_HEADER_BYTES} "
            "are allowed; send less metadata or fewer block ids"
        )
    if 2 * header.num_layers > MAX_TENSORS or _has_too_many_marks(text):
        raise ConfigError(
            f"the header of request {show(header.request_id)} lists {2 * header.num_layers} tensors, at most "
            f"{MAX_TENSORS} are allowed, or has more than {MAX_HEADER_MARKS} of the characters , : [ and {{ in all; "
            "send less metadata or fewer block ids"
        )
    return nbytes.to_bytes(PREFIX_NBYTES, "big") + text.ljust(nbytes).encode("ascii")


def text_of(head: bytes) -> str:
    """The JSON of a head, not parsed.

    Raises:
        WireError: it is no UTF-8, or has more than `MAX_HEADER_MARKS`.
    """
    try:
        text = head[PREFIX_NBYTES:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(
            f"the header is not UTF-8: {error.reason}",
            reason=WireReason.HEADER_NOT_JSON,
            offset=PREFIX_NBYTES + error.start,
        ) from error
    if _has_too_many_marks(text):
        raise WireError(
            f"the header has more than {MAX_HEADER_MARKS} of the characters , : [ and {{: more values than are read",
            reason=WireReason.HEADER_TOO_LARGE,
            offset=PREFIX_NBYTES,
        )
    return text


def _has_too_many_marks(text: str) -> bool:
    """Whether this JSON may hold more values than are read: each but the first follows one of these marks."""
    return len(text) > MAX_HEADER_MARKS and sum(map(text.count, ",:[{")) > MAX_HEADER_MARKS


def split_digest(head: bytes) -> Digest | None:
    """The checksum that `head` carries at its end, or None."""
    start = max(0, len(head) - _DIGEST_TAIL_NBYTES)
    found = _DIGEST_TAIL.search(head, start)
    if found is None:
        return None
    scope: Scope = "all" if found[1] == b"all" else "header"
    return Digest(scope, found[2].decode("ascii"), found.start(2))


def seal(head: bytes, hexdigest: str) -> bytes:
    """`head` with its checksum replaced by `hexdigest`: 32 lower-case hex digits, or `UNSEALED`.

    Raises:
        ConfigError: `head` has no place for a checksum, or `hexdigest` is none.
    """
    digest = split_digest(head)
    if digest is None or not re.fullmatch("[0-9a-f]{32}", hexdigest):
        raise ConfigError(f"cannot write the checksum {hexdigest!r} into a head of {len(head)} bytes")
    return _with_digits(head, digest.at, hexdigest)


def seal_new(head: bytes, hexdigest: str) -> bytes:
    """As `seal`, for a head that `encode_head` gave: it is sure to have a place, which is faster to find."""
    return _with_digits(head, head.rindex(_UNSEALED_BYTES), hexdigest)


def _with_digits(head: bytes, at: int, digits: str) -> bytes:
    return head[:at] + digits.encode("ascii") + head[at + len(digits) :]


def require_identity(header: Header, *, request_id: str | None = None, target_rank: int | None = None) -> None:
    """Nothing, when the payload is of this request and made for this rank; None accepts any.

    A payload says its rank in our extension, in the published slice stamp, in both or not at all.

    Raises:
        WireError: it is another request's (WRONG_REQUEST) or another rank's (WRONG_RANK).
    """
    if request_id is not None and header.request_id != request_id:
        raise WireError(
            f"the payload is of request {show(header.request_id)}, expected {show(request_id)}",
            reason=WireReason.WRONG_REQUEST,
            offset=PREFIX_NBYTES,
            request_id=request_id,
        )
    if target_rank is None:
        return
    stamp = header.metadata.get(SLICE_STAMP_KEY)
    stated = {
        f'metadata["{SLICE_STAMP_KEY}"]': stamp.get("target_rank") if isinstance(stamp, dict) else None,
        f'"{EXTENSION_KEY}"': header.extension.target_rank if header.extension else None,
    }
    for where, rank in stated.items():
        if rank is not None and (type(rank) is not int or rank != target_rank):
            raise WireError(
                f"the payload of request {show(header.request_id)} was cut for target rank {show(rank)} "
                f"({where}), this is rank {target_rank}: sender and receiver disagree about ranks or keys",
                reason=WireReason.WRONG_RANK,
                offset=PREFIX_NBYTES,
                request_id=header.request_id,
                rank=target_rank,
            )


def _require_request_id(request_id: object) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise ConfigError(f"request_id must be a non-empty string, got {show(request_id)}")
    if not request_id.isascii() and any("\ud800" <= char <= "\udfff" for char in request_id):
        raise ConfigError(f"request_id holds a lone surrogate and has no UTF-8 form: {show(request_id)}")


def _plain_block_ids(block_ids: Sequence[int]) -> list[int]:
    try:
        plain = [operator.index(block) for block in block_ids]
    except TypeError as error:
        raise ConfigError(f"block_ids must be integers, got {show(block_ids)}") from error
    if any(abs(block) > MAX_INTEGER for block in plain):
        raise ConfigError(f"block_ids must fit in 64 bits, got {show(block_ids)}")
    return plain


def _spell_metadata(metadata: Mapping[str, Any]) -> str:
    """`metadata` as JSON that a reader takes: tuples as lists, keys as strings."""
    if isinstance(metadata, Mapping) and not metadata:
        return "{}"
    try:
        text = _to_json(dict(metadata))
        # A reader refuses what it cannot tell apart, such as the keys 1 and "1": said here rather than there.
        parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"metadata must be a mapping that JSON can hold (text, finite numbers, booleans, None, lists and mappings "
            f"with distinct text keys): {error}; got {show(metadata)}"
        ) from error
    return text


# Made once: making one takes longer than spelling a short value.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


# The requests of one model come in few shapes, and spelling out a hundred tensors takes longer than moving them.
@functools.lru_cache(maxsize=64)
def _spell_body(
    num_layers: int, spans: tuple[TensorSpan, ...], extension: Extension, data_nbytes: int, scope: Scope
) -> str:
    """A head from its list of tensors on, without the spaces at its end."""
    return (
        f'{spell_entries(num_layers, spans)},"nl":{num_layers},'
        f'"{EXTENSION_KEY}":{_spell_extension(extension, data_nbytes)},'
        f'"{DIGEST_KEY}":"{DIGEST_ALGORITHM}.{scope}.{UNSEALED}"}}'
    )


def _spell_extension(extension: Extension, data_nbytes: int) -> str:
    fields = {
        "v": REGIONS_VERSION if extension.regions else EXTENSION_VERSION,
        "n": data_nbytes,
        "src": extension.source_rank,
        "dst": extension.target_rank,
        "role": extension.role,
        "attempt": extension.attempt,
        "heads": list(extension.heads) or None,
        "tokens": extension.num_tokens,
        "regions": spell_regions(extension.regions) or None,
    }
    return _to_json({name: value for name, value in fields.items() if value is not None})


def parse_json(text: str) -> Any:
    """What strict JSON says: no NaN or Infinity, no number that overflows, no key twice in one object.

    Raises:
        ValueError: `text` is no such JSON.
        RecursionError: it is nested deeper than the interpreter allows.
    """
    found: Any = _strict_json.decode(text)
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"an object of {len(pairs)} keys has only {len(fields)} distinct ones")
    return fields


def _bounded_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits, at most {MAX_INTEGER_DIGITS} are allowed")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {show(digits)} overflows")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_strict_json = json.JSONDecoder(
    object_pairs_hook=_distinct,
    parse_int=_bounded_integer,
    parse_float=_finite,
    parse_constant=_no_constant,
)
