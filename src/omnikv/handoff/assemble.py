"""Puts the parts of several source ranks together, after checking that they belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnikv.core.keys import PayloadId
from omnikv.core.reshard import HeadIds, Piece
from omnikv.errors import RemoteProtocolError
from omnikv.handoff.received import ReceivedKV, ReceivedPiece
from omnikv.tensors.kv import LayerKV, head_runs
from omnikv.tensors.pack import DecodedPayload, decode_payload
from omnikv.transports.base import Lease


@dataclass(frozen=True, slots=True)
class Arrived:
    """One source rank's part, decoded in the memory that its lease holds."""

    piece: Piece
    lease: Lease
    payload: DecodedPayload
    received: ReceivedPiece


def read_part(identity: PayloadId, piece: Piece, lease: Lease, waited_s: float) -> Arrived:
    """The part that lies under `lease`, checked against what was asked for. The lease stays the caller's.

    Raises:
        WireError: it is damaged, or not the one that was asked for.
        RemoteProtocolError: its origin is another one, or its heads or layers are not those of the route.
    """
    payload = decode_payload(
        lease.buffer,
        request_id=identity.transfer_id,
        target_rank=identity.target_rank,
        # Both ends are ours, so a payload without a sealed head is a damaged one.
        require_checksum=True,
    )
    _check_origin(payload, identity)
    _check_heads(payload, piece)
    received = ReceivedPiece(
        source_rank=piece.source_rank, heads=piece.heads, nbytes=len(lease.buffer), waited_s=waited_s
    )
    return Arrived(piece, lease, payload, received)


def assemble(arrived: Sequence[Arrived], num_target_heads: int, request_id: str) -> ReceivedKV:
    """The request's KV from all of its parts; the leases go over to it.

    Raises:
        RemoteProtocolError: the parts differ in layers, tokens, dtype or metadata.
    """
    _check_alike(arrived, request_id)
    return _put_together(arrived, num_target_heads, request_id)


def _check_origin(payload: DecodedPayload, identity: PayloadId) -> None:
    """A transport that mixes up two payloads of one request would else give heads or roles that look right."""
    extension = payload.header.extension
    if extension is None:
        return
    stated = (extension.source_rank, extension.role, extension.attempt)
    if stated != (identity.source_rank, identity.role, identity.attempt):
        raise RemoteProtocolError(
            f"the payload under {identity.encode()} says that it is source rank {stated[0]}'s, role {stated[1]!r}, "
            f"attempt {stated[2]}: the transport or its sender mixed up two payloads",
            request_id=identity.transfer_id,
            key=identity.encode(),
            rank=identity.source_rank,
        )


def _check_heads(payload: DecodedPayload, piece: Piece) -> None:
    extension = payload.header.extension
    if extension is not None and extension.heads != piece.heads:
        raise RemoteProtocolError(
            f"source rank {piece.source_rank} sent heads {list(extension.heads)}, the route says {list(piece.heads)}",
            request_id=payload.header.request_id,
            rank=piece.source_rank,
        )
    for index, layer in enumerate(payload.layers):
        if layer is None:
            raise RemoteProtocolError(
                f"source rank {piece.source_rank} sent no layer {index}",
                request_id=payload.header.request_id,
                rank=piece.source_rank,
            )
        for name, tensor in (("key", layer.key), ("value", layer.value)):
            if tensor.ndim != 3 or tensor.shape[1] != len(piece.heads):
                raise RemoteProtocolError(
                    f"source rank {piece.source_rank}'s layer {index} {name} has shape {list(tensor.shape)}, expected "
                    f"[tokens, {len(piece.heads)}, head_dim]",
                    request_id=payload.header.request_id,
                    rank=piece.source_rank,
                )


def layer_facts(layers: Sequence[LayerKV | None]) -> list[tuple[object, ...]]:
    """What must be alike in every rank's part of a request: per layer and tensor, tokens, head_dim and dtype."""
    return [
        (tensor.shape[0], *tensor.shape[2:], str(tensor.dtype))
        for layer in layers
        if layer is not None
        for tensor in layer
    ]


def _check_alike(arrived: Sequence[Arrived], request_id: str) -> None:
    first = arrived[0]
    facts = layer_facts(first.payload.layers)
    for other in arrived[1:]:
        theirs = layer_facts(other.payload.layers)
        difference = None
        if len(theirs) != len(facts):
            difference = f"{len(theirs) // 2} against {len(facts) // 2} layers"
        elif theirs != facts:
            at = next(index for index, (mine, its) in enumerate(zip(facts, theirs, strict=True)) if mine != its)
            difference = f"layer {at // 2}: {_spell_facts(theirs[at])} against {_spell_facts(facts[at])}"
        elif other.payload.header.metadata != first.payload.header.metadata:
            difference = "their metadata"
        if difference is not None:
            raise RemoteProtocolError(
                f"request {request_id!r}: the parts from source ranks {other.piece.source_rank} and "
                f"{first.piece.source_rank} differ in {difference}",
                request_id=request_id,
                rank=other.piece.source_rank,
            )


def _spell_facts(facts: tuple[object, ...]) -> str:
    return f"{facts[0]} tokens of head_dim {'x'.join(map(str, facts[1:-1]))} in {str(facts[-1]).removeprefix('torch.')}"


def _put_together(arrived: Sequence[Arrived], num_target_heads: int, request_id: str) -> ReceivedKV:
    metadata: Mapping[str, Any] = arrived[0].payload.header.metadata
    in_place = len(arrived) == 1 and arrived[0].piece.target_positions == tuple(range(num_target_heads))
    first_layers = [layer for layer in arrived[0].payload.layers if layer is not None]
    layers = first_layers if in_place else _merge(arrived, first_layers, num_target_heads)
    return ReceivedKV(
        request_id=request_id,
        layers=layers,
        metadata=dict(metadata),
        sources=tuple(part.received for part in arrived),
        leases=[part.lease for part in arrived],
        owns_memory=not in_place,
    )


def _merge(arrived: Sequence[Arrived], like: Sequence[LayerKV], num_target_heads: int) -> list[LayerKV]:
    merged = [
        LayerKV(*(tensor.new_empty((tensor.shape[0], num_target_heads, *tensor.shape[2:])) for tensor in layer))
        for layer in like
    ]
    for part in arrived:
        runs = head_runs(part.piece.target_positions)
        for out, layer in zip(merged, part.payload.layers, strict=True):
            if layer is not None:
                for target, source in zip(out, layer, strict=True):
                    _copy_heads(target, source, part.piece.target_positions, runs)
    return merged


def _copy_heads(out: torch.Tensor, source: torch.Tensor, positions: HeadIds, runs: list[tuple[int, int]]) -> None:
    for at, length in runs:
        out.narrow(1, positions[at], length).copy_(source.narrow(1, at, length))
