"""Payloads into tensors: views on the payload's memory wherever its alignment allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import xxhash

from omnikv.core.wire import PREFIX_NBYTES, UNSEALED, Digest, Header, require_identity, seal, show, split_digest
from omnikv.core.wire_decode import decode_head, head_nbytes
from omnikv.core.wire_spans import ITEM_SIZES, TensorSpan
from omnikv.errors import ConfigError, WireError, WireReason
from omnikv.tensors.borrow import borrowed
from omnikv.tensors.kv import LayerKV

_Found = TypeVar("_Found")

# The most tensors of a payload of whose shape anything is kept.
_MOST_SPANS_KEPT = 4096

# A released torch may lack the youngest of them.
DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in ITEM_SIZES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
# What every dtype may lie at.
MAX_ITEM_SIZE = max(ITEM_SIZES.values())
# Small enough to stay in a cache between being copied and being hashed.
_HASH_PIECE_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPayload:
    """A payload's header, and its layers in order: None where the sender had none.

    The tensors are views on the memory that was decoded, unless that was read-only and not to be read in place, or they
    lay at addresses that their dtype does not allow.
    """

    header: Header
    layers: list[LayerKV | None]


def decode_payload(
    buffer: bytes | bytearray | memoryview,
    *,
    request_id: str | None = None,
    target_rank: int | None = None,
    verify: bool = True,
    require_checksum: bool = False,
    in_place: bool = False,
    head: bytes | None = None,
) -> DecodedPayload:
    """The payload in `buffer`, in full; its tensors live as long as the memory behind `buffer` is left in place.

    Read-only memory is copied once, since torch has no read-only tensors; with `in_place` it is viewed like any other,
    and the tensors are not to be written.

    `request_id` and `target_rank`, where given, must be the payload's own. A checksum that is carried is compared
    unless `verify` is off. `require_checksum` refuses payloads without one, as released engines write them. `head` is
    the payload's, where `buffer` does not hold it yet; its data must not be looked at before it is written.

    Raises:
        WireError: the bytes are no payload we can trust; `reason` and `offset` say why.
        ConfigError: `buffer` is not contiguous memory.
    """
    view = contiguous_bytes(buffer)
    start = head_nbytes(view[:PREFIX_NBYTES] if head is None else head, view.nbytes)
    head = bytes(view[:start]) if head is None else head[:start]
    header = decode_head(head, view.nbytes)
    check_digest_presence(header, require_checksum)
    if verify:
        hasher = xxhash.xxh3_128()
        digest = start_digest(hasher, head)
        if digest is not None and digest.scope == "all":
            hasher.update(view[start:])
        compare_digest(hasher, digest, header)
    require_identity(header, request_id=request_id, target_rank=target_rank)
    return DecodedPayload(header=header, layers=as_layers(header, _data_tensor(view[start:], in_place)))


def decode_device_payload(payload: torch.Tensor, *, verify: bool = True) -> DecodedPayload:
    """The payload in a 1-D uint8 tensor on any device, its tensors there too and with memory of their own.

    Raises:
        WireError: the bytes are no payload we can trust.
        ConfigError: `payload` is not a 1-D uint8 tensor.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ConfigError(
            f"a packed payload must be a 1-D uint8 tensor, got {payload.dim()}-D {payload.dtype}; use "
            "tensor.view(torch.uint8).flatten()"
        )
    start = head_nbytes(_host_bytes(payload[:PREFIX_NBYTES]), payload.numel())
    head = bytes(_host_bytes(payload[:start]))
    header = decode_head(head, payload.numel())
    if verify:
        hasher = xxhash.xxh3_128()
        digest = start_digest(hasher, head)
        if digest is not None and digest.scope == "all":
            for at in range(start, payload.numel(), _HASH_PIECE_NBYTES):
                hasher.update(_host_bytes(payload[at : at + _HASH_PIECE_NBYTES]))
        compare_digest(hasher, digest, header)
    # A copy starts at an aligned address wherever the payload lay.
    return DecodedPayload(header=header, layers=as_layers(header, payload[start:].clone()))


def start_digest(hasher: xxhash.xxh3_128, head: bytes) -> Digest | None:
    """The checksum that `head` carries; `hasher` has then taken the head as it was before it was sealed."""
    digest = split_digest(head)
    if digest is not None:
        hasher.update(seal(head, UNSEALED))
    return digest


def compare_digest(hasher: xxhash.xxh3_128, digest: Digest | None, header: Header) -> None:
    """Nothing, when there is no checksum or it is what `hasher` found.

    Raises:
        WireError: it is not (CHECKSUM).
    """
    if digest is None or hasher.hexdigest() == digest.hexdigest:
        return
    covered = "header and data" if digest.scope == "all" else "header"
    raise WireError(
        f"the {covered} of request {show(header.request_id)} have the checksum {hasher.hexdigest()}, sent was "
        f"{digest.hexdigest}: bytes changed on the way",
        reason=WireReason.CHECKSUM,
        offset=digest.at,
    )


def check_digest_presence(header: Header, required: bool) -> None:
    """Nothing, when the payload carries a checksum or none is `required`.

    Raises:
        WireError: it carries none (CHECKSUM).
    """
    if required and header.scope is None:
        raise WireError(
            f"the payload of request {show(header.request_id)} carries no checksum: it is not one of omnikv's",
            reason=WireReason.CHECKSUM,
            offset=PREFIX_NBYTES,
        )


def contiguous_bytes(buffer: bytes | bytearray | memoryview) -> memoryview:
    """`buffer` as a flat view of its bytes.

    Raises:
        ConfigError: it is not contiguous memory.
    """
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise ConfigError(f"a payload is bytes, bytearray or memoryview, got {type(buffer).__name__}") from error
    if not view.c_contiguous:
        raise ConfigError("a payload must lie in contiguous memory; copy it with bytes(view)")
    return view.cast("B") if view.nbytes else memoryview(b"")


def as_layers(header: Header, data: torch.Tensor) -> list[LayerKV | None]:
    """The layers of a payload whose data bytes are `data`, a 1-D uint8 tensor."""
    tensors = span_views(data, header.spans)
    places = _kept(_places_of_layers, header.spans)(header.num_layers, header.spans)
    if places is None:
        return list(map(LayerKV._make, zip(tensors[: header.num_layers], tensors[header.num_layers :], strict=True)))
    return [None if place is None else LayerKV(tensors[place[0]], tensors[place[1]]) for place in places]


def _kept(worked_out: functools._lru_cache_wrapper[_Found], spans: tuple[TensorSpan, ...]) -> Callable[..., _Found]:
    """`worked_out`, which keeps what it found, or the same without keeping: 64 huge heads of a peer fill the memory."""
    return worked_out if len(spans) <= _MOST_SPANS_KEPT else worked_out.__wrapped__


# What follows from spans alone is worked out once for each shape of request.
@functools.lru_cache(maxsize=64)
def _places_of_layers(num_layers: int, spans: tuple[TensorSpan, ...]) -> tuple[tuple[int, int] | None, ...] | None:
    """Which of `spans` are the key and the value of each layer; None where all keys come first, and no layer lacks."""
    found = {(span.kind, span.layer): place for place, span in enumerate(spans)}
    places = tuple(
        (found["key", layer], found["value", layer]) if ("key", layer) in found else None for layer in range(num_layers)
    )
    return None if places == tuple((layer, num_layers + layer) for layer in range(num_layers)) else places


def span_views(data: torch.Tensor, spans: tuple[TensorSpan, ...]) -> Sequence[torch.Tensor]:
    """The tensors of `spans`: views on `data`, or copies where an address does not allow one.

    Raises:
        WireError: the installed torch has no such dtype.
    """
    strides = _kept(_common_strides, spans)(spans)
    if strides is None or not _may_view(data, spans[0].offset, ITEM_SIZES[spans[0].dtype]):
        return [_span_view(data, span) for span in spans]
    # Alike and equally far apart, as we write them: one strided view costs a third of as many single ones.
    first, last = spans[0], spans[-1]
    typed = data[first.offset : last.offset + last.nbytes].view(torch_dtype(first))
    return typed.as_strided((len(spans), *first.shape), strides).unbind(0)


def _span_view(data: torch.Tensor, span: TensorSpan) -> torch.Tensor:
    raw = data[span.offset : span.offset + span.nbytes]
    if not _may_view(data, span.offset, ITEM_SIZES[span.dtype]):
        raw = raw.clone()
    return raw.view(torch_dtype(span)).view(span.shape)


def torch_dtype(span: TensorSpan) -> torch.dtype:
    """The dtype of a span.

    Raises:
        WireError: the installed torch has no such dtype.
    """
    dtype = DTYPES.get(span.dtype)
    if dtype is None:
        raise WireError(
            f"the {span.kind} of layer {span.layer} is {span.dtype}, which torch {torch.__version__} does not have",
            reason=WireReason.DTYPE,
            offset=PREFIX_NBYTES,
        )
    return dtype


@functools.lru_cache(maxsize=64)
def _common_strides(spans: tuple[TensorSpan, ...]) -> tuple[int, ...] | None:
    """The strides of one view that holds all the spans, one after another, or None where no view can."""
    if len(spans) < 2 or not spans[0].nbytes:
        return None
    first = spans[0]
    step, item_size = spans[1].offset - first.offset, ITEM_SIZES[first.dtype]
    if step <= 0 or step % item_size:
        return None
    for index, span in enumerate(spans):
        if span.dtype != first.dtype or span.shape != first.shape or span.offset != first.offset + index * step:
            return None
    return step // item_size, *(math.prod(first.shape[at + 1 :]) for at in range(len(first.shape)))


def can_stay_in_place(header: Header, address: int) -> bool:
    """Whether all tensors of a payload are views on its memory, with its data at `address`, none of them a copy."""
    return not address % MAX_ITEM_SIZE and _kept(_are_aligned, header.spans)(header.spans)


@functools.lru_cache(maxsize=64)
def _are_aligned(spans: tuple[TensorSpan, ...]) -> bool:
    return not any(span.offset % ITEM_SIZES[span.dtype] for span in spans)


def _may_view(data: torch.Tensor, offset: int, item_size: int) -> bool:
    # torch wants the offset into the storage aligned, the processor wants the address.
    return not (data.data_ptr() % item_size or data.storage_offset() % item_size or offset % item_size)


def _data_tensor(view: memoryview, in_place: bool) -> torch.Tensor:
    data = borrowed(view)
    return data.clone() if view.readonly and not in_place else data


def _host_bytes(part: torch.Tensor) -> bytearray:
    host = bytearray(part.numel())
    if host:
        torch.frombuffer(host, dtype=torch.uint8).copy_(part)
    return host
