"""Tensors into payloads, in one pass over the bytes: the format itself is `omnikv.core.wire`'s.

A `PayloadPlan` knows a payload's size before a byte of it is written, so a transport can reserve room first; then each
tensor writes itself into its place there. Decoding (`omnikv.tensors.unpack`) gives views on the payload's memory. A
checksum over the data, where one is asked for, costs one more pass that only reads.

torch keeps the *object* behind a view alive, not its buffer locked: whoever owns a payload's memory must not unmap or
reuse it while decoded views live, nor call `release()` on the memoryview that was decoded.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from omnikv.core.wire import Extension, Header, encode_head, seal_new, show
from omnikv.core.wire_spans import KINDS, TensorSpan, lay_out
from omnikv.errors import ConfigError, LocalProtocolError, WireError, WireReason
from omnikv.tensors.fill import Written, WrittenRange, fill, move_all
from omnikv.tensors.kv import DenseSource, LayerSource, LayerSources, Move, TensorSource
from omnikv.tensors.unpack import (
    DTYPES,
    MAX_ITEM_SIZE,
    DecodedPayload,
    contiguous_bytes,
    decode_device_payload,
    decode_payload,
    span_views,
)

__all__ = ["DecodedPayload", "KVCacheTransferData", "PayloadPlan", "decode_payload", "plan_payload"]

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def sealed_head(header: Header) -> bytes:
    """The head of a payload whose checksum covers the head alone.

    Raises:
        ConfigError: as `encode_head`.
    """
    head = encode_head(header)
    return seal_new(head, xxhash.xxh3_128(head).hexdigest())


class PayloadPlan:
    """A payload that is laid out and not yet written: `nbytes` in all, `header` as its reader will see it."""

    __slots__ = ("_head", "head", "header", "nbytes", "sources")

    def __init__(self, header: Header, sources: Sequence[TensorSource]) -> None:
        """`sources` are the tensors of `header.spans`, in that order."""
        self.header = header
        # A checksum over the head alone is known by now.
        self._head = sealed_head(header) if header.scope == "header" else encode_head(header)
        # How it begins, where that can be known before its data is written.
        self.head = b"" if header.scope == "all" else self._head
        self.sources = tuple(sources)
        self.nbytes = len(self._head) + header.data_nbytes

    def write_into(
        self,
        buffer: memoryview,
        threads: int | None = None,
        written: WrittenRange | None = None,
    ) -> None:
        """Nothing; `buffer`, writable and exactly `nbytes` long, then holds the payload. It stays the caller's.

        At most `threads` threads copy; None lets the size and the cores decide. `written` hears of each range of bytes,
        begin and end, that is final before the whole is, from the thread that wrote it.

        Raises:
            ConfigError: `buffer` is read-only, not contiguous, of another size, or not aligned to 16 bytes.
            Exception: what a tensor's source raises; `buffer` then holds no payload.
        """
        view = contiguous_bytes(buffer)
        start = len(self._head)
        data = _room_for_data(view, start, self.nbytes)
        _zero_gaps(data, self.header.spans)
        first = data.data_ptr() - start
        moves = self._moves(first + start)
        if moves is not None:
            move_all(moves, threads, None if written is None else partial(_tell_range, written, first))
        else:
            self._fill(data, threads, None if written is None else partial(_tell, written, first))
        head = self._head
        if self.header.scope == "all":
            hasher = xxhash.xxh3_128(head)
            hasher.update(view[start:])
            head = seal_new(head, hasher.hexdigest())
        view[:start] = head

    def on_device(self, device: torch.device) -> torch.Tensor:
        """The payload as a new 1-D uint8 tensor on `device`. Plan it without a checksum: the data is not read there.

        Raises:
            ConfigError: the plan has a checksum over the data.
        """
        if self.header.scope == "all":
            raise ConfigError(f"a payload on {device} cannot be checksummed there; plan it with checksum=False")
        payload = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        start = len(self._head)
        payload[:start].copy_(torch.frombuffer(bytearray(self._head), dtype=torch.uint8))
        data = payload[start:]
        _zero_gaps(data, self.header.spans)
        self._fill(data)
        return payload

    def _fill(self, data: torch.Tensor, threads: int | None = None, written: Written | None = None) -> None:
        fill(list(zip(self.sources, span_views(data, self.header.spans), strict=True)), threads, written)

    def _moves(self, address: int) -> list[Move] | None:
        """The moves that write all data from `address` on, or None where a source takes more than that."""
        moves: list[Move] = []
        for source, span in zip(self.sources, self.header.spans, strict=True):
            add_moves = getattr(source, "add_moves", None)
            if add_moves is None or not add_moves(address + span.offset, moves):
                return None
        return moves


def _tell_range(written: WrittenRange, first: int, begin: int, end: int) -> None:
    written(begin - first, end - first)


def _tell(written: WrittenRange, first: int, out: torch.Tensor) -> None:
    # One without elements lies nowhere.
    if out.nbytes:
        _tell_range(written, first, out.data_ptr(), out.data_ptr() + out.nbytes)


def _zero_gaps(data: torch.Tensor, spans: tuple[TensorSpan, ...]) -> None:
    for start, end in _gaps(spans):
        data[start:end].zero_()


# What follows from shapes alone is worked out once for each shape of request.
@functools.lru_cache(maxsize=64)
def _gaps(spans: tuple[TensorSpan, ...]) -> tuple[tuple[int, int], ...]:
    """The bytes between spans, `(start, end)` of each stretch."""
    ends = (0, *(span.offset + span.nbytes for span in spans))
    return tuple((end, span.offset) for end, span in zip(ends, spans, strict=False) if end < span.offset)


@functools.lru_cache(maxsize=64)
def _laid_out(
    present: tuple[int, ...], tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
) -> tuple[tuple[TensorSpan, ...], int]:
    """The spans of all keys, then all values, of the layers `present`, as released engines write them; and the size."""
    for layer, (_, key), (_, value) in zip(present, tensors, tensors[len(present) :], strict=False):
        if key[:1] != value[:1]:
            raise ConfigError(
                f"layer {layer} has a key of shape {list(key)} and a value of shape {list(value)}: both must hold the "
                "same number of tokens"
            )
    named = itertools.product(KINDS, present)
    return lay_out(
        (kind, layer, _dtype_name(dtype), shape) for (kind, layer), (dtype, shape) in zip(named, tensors, strict=True)
    )


def plan_payload(
    *,
    request_id: str,
    layers: Sequence[LayerSource | None],
    block_ids: Sequence[int] = (),
    metadata: Mapping[str, Any] | None = None,
    extension: Extension | None = None,
    checksum: bool,
) -> PayloadPlan:
    """The plan of a payload of these layers, None for one that is missing; nothing is copied yet.

    `extension` says whose part this is. `checksum` covers every byte; without it only the header is covered. The
    sources are read when the plan is written, so they must not change until then.

    Raises:
        ConfigError: an empty request id, metadata that JSON cannot hold, key and value of different length, or a dtype
            or shape that a payload cannot hold.
    """
    present = tuple(layer for layer, pair in enumerate(layers) if pair is not None)
    # Those of a cache stay what they are, with what is known of them.
    pairs = layers if isinstance(layers, LayerSources) else LayerSources(pair for pair in layers if pair is not None)
    spans, data_nbytes = _laid_out(present, pairs.kinds)
    header = Header(
        request_id=request_id,
        num_layers=len(layers),
        spans=spans,
        data_nbytes=data_nbytes,
        block_ids=tuple(block_ids),
        metadata=metadata if metadata is not None else {},
        extension=extension,
        scope="all" if checksum else "header",
    )
    return PayloadPlan(header, pairs.in_order)


@dataclass
class KVCacheTransferData:
    """One request's KV between engines, under the published names.

    `layer_blocks` holds the lists `"key_cache"` and `"value_cache"`, a tensor or None a layer.
    """

    request_id: str
    layer_blocks: dict[str, Any]
    block_ids: list[int]
    metadata: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; lists and mappings are copied, tensors are shared."""
        return {
            "request_id": self.request_id,
            "layer_blocks": {name: list(tensors) for name, tensors in self.layer_blocks.items()},
            "block_ids": list(self.block_ids),
            "metadata": dict(self.metadata),
        }

    def to_bytes(self) -> bytes:
        """The payload, with a checksum.

        Raises:
            ConfigError: something that a payload cannot hold (see `plan_payload`).
        """
        plan = self._plan(checksum=True)
        stream = io.BytesIO()
        # The one way to `bytes` that were written in place: getvalue gives the stream's own, uncopied.
        stream.seek(plan.nbytes - 1)
        stream.write(b"\0")
        with stream.getbuffer() as buffer:
            plan.write_into(buffer)
        return stream.getvalue()

    def to_gpu_tensor(self) -> torch.Tensor:
        """The payload as a 1-D uint8 tensor on the device of the first tensor that is not on the CPU.

        Raises:
            LocalProtocolError: all tensors are on the CPU (a RuntimeError, as published).
            ConfigError: something that a payload cannot hold (see `plan_payload`).
        """
        keys, values = _caches(self.layer_blocks)
        devices = (tensor.device for tensor in (*keys, *values) if isinstance(tensor, torch.Tensor))
        device = next((device for device in devices if device.type != "cpu"), None)
        if device is None:
            raise LocalProtocolError(
                f"No device tensors found in request {show(self.request_id)}, use to_bytes() instead",
                request_id=self.request_id,
            )
        return self._plan(checksum=False).on_device(device)

    @staticmethod
    def from_bytes(raw: bytes | bytearray | memoryview) -> dict[str, Any]:
        """The payload's fields by name. Tensors are views on `raw`; read-only bytes are copied once.

        Raises:
            WireError: the bytes are no payload we can trust, or hold a part of a cache (a ValueError, as published).
        """
        return _published(decode_payload(raw))

    @staticmethod
    def from_bytes_device(tensor: torch.Tensor) -> dict[str, Any]:
        """The fields of a payload in a 1-D uint8 tensor; its tensors are copies on the same device.

        Raises:
            WireError: the bytes are no payload we can trust, or hold a part of a cache (a ValueError, as published).
            ConfigError: `tensor` is not 1-D uint8 (a ValueError, as published).
        """
        return _published(decode_device_payload(tensor))

    @staticmethod
    def from_bytes_gpu(tensor: torch.Tensor) -> dict[str, Any]:
        """What `from_bytes_device` gives: its older name."""
        return KVCacheTransferData.from_bytes_device(tensor)

    def _plan(self, *, checksum: bool) -> PayloadPlan:
        return plan_payload(
            request_id=self.request_id,
            layers=_as_sources(self.layer_blocks),
            block_ids=self.block_ids,
            metadata=self.metadata,
            checksum=checksum,
        )


def _published(payload: DecodedPayload) -> dict[str, Any]:
    extension = payload.header.extension
    if extension is not None and extension.regions:
        # The published fields number layers from 0 and know no parts of them: a part would pass for the whole.
        raise WireError(
            f"the payload of request {payload.header.request_id!r} holds regions of a cache, not all tokens of all its "
            "layers, which the published fields cannot say; receive it with KVReceiver",
            reason=WireReason.HEADER_FIELD,
            request_id=payload.header.request_id,
        )
    return {
        "request_id": payload.header.request_id,
        "layer_blocks": {
            "key_cache": [layer and layer.key for layer in payload.layers],
            "value_cache": [layer and layer.value for layer in payload.layers],
        },
        "block_ids": list(payload.header.block_ids),
        "metadata": dict(payload.header.metadata),
    }


def _caches(layer_blocks: object) -> tuple[Sequence[object], Sequence[object]]:
    """The keys and the values, one a layer each."""
    if not isinstance(layer_blocks, Mapping):
        raise ConfigError(f"layer_blocks must map key_cache and value_cache to lists, got {show(layer_blocks)}")
    keys, values = layer_blocks.get("key_cache", ()), layer_blocks.get("value_cache", ())
    if not isinstance(keys, list | tuple) or not isinstance(values, list | tuple):
        raise ConfigError(
            f"layer_blocks must map key_cache and value_cache to lists, one tensor or None a layer, got "
            f"{type(keys).__name__} and {type(values).__name__}"
        )
    if len(keys) != len(values):
        raise ConfigError(
            f"layer_blocks has {len(keys)} layers in key_cache and {len(values)} in value_cache: give both for each "
            "layer, or None in both for a layer that is missing"
        )
    return keys, values


def _as_sources(layer_blocks: object) -> list[LayerSource | None]:
    keys, values = _caches(layer_blocks)
    layers: list[LayerSource | None] = []
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        if key is None and value is None:
            layers.append(None)
        elif isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor):
            layers.append(LayerSource(DenseSource(key), DenseSource(value)))
        else:
            raise ConfigError(
                f"layer {layer} must have a key and a value tensor, or None for both, got {type(key).__name__} and "
                f"{type(value).__name__}"
            )
    return layers


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _room_for_data(view: memoryview, start: int, nbytes: int) -> torch.Tensor:
    """The bytes from `start`, a multiple of `ALIGNMENT`, of a buffer that a payload of `nbytes` can be written into."""
    if view.readonly or view.nbytes != nbytes:
        raise ConfigError(
            f"the payload needs a writable buffer of exactly {nbytes} bytes, got "
            f"{'a read-only' if view.readonly else 'a'} one of {view.nbytes}"
        )
    if nbytes == start:
        return torch.empty(0, dtype=torch.uint8)
    data = torch.frombuffer(view, dtype=torch.uint8, offset=start)
    if data.data_ptr() % MAX_ITEM_SIZE:
        first = data.data_ptr() - start
        raise ConfigError(f"the payload's buffer must begin at a multiple of {MAX_ITEM_SIZE}, got {first:#x}")
    return data
