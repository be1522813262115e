"""The receiving half of a handoff: every payload that a rank needs is leased, checked and put together.

Nothing is consumed here. A payload stays leased until its `ReceivedKV` is closed, so a set that turns out incomplete,
broken or not agreed upon can be given back whole and asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from omnikv.core.keys import PayloadId
from omnikv.core.reshard import HeadIds, Piece
from omnikv.errors import HandoffError, ReceiveTimeout, RemoteProtocolError, TransportError
from omnikv.tensors.kv import LayerKV, head_runs
from omnikv.tensors.pack import DecodedPayload, decode_payload
from omnikv.transports.base import Lease, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPiece:
    """What came from one source rank: global head ids, the payload's size, and how long this rank waited for it."""

    source_rank: int
    heads: HeadIds
    nbytes: int
    waited_s: float


class ReceivedKV:
    """One request's KV on this rank: `layers`, `metadata`, and which rank sent what.

    With one sender the tensors are views on the transport's memory (`owns_memory` is False): read them, or `detach`
    them, before `close`, which lets the sender reuse that memory. With several they were merged into memory of their
    own. Close it, or use it as a context manager; `give_back` returns the payloads unconsumed instead.
    """

    def __init__(
        self,
        *,
        request_id: str,
        layers: list[LayerKV],
        metadata: dict[str, Any],
        sources: tuple[ReceivedPiece, ...],
        leases: Sequence[Lease],
        owns_memory: bool,
    ) -> None:
        self.request_id = request_id
        self.layers = layers
        self.metadata = metadata
        self.sources = sources
        self.owns_memory = owns_memory
        self._leases = list(leases)

    @property
    def num_tokens(self) -> int:
        return int(self.layers[0].key.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes received, headers included."""
        return sum(piece.nbytes for piece in self.sources)

    def detach(self) -> None:
        """Copy the tensors into memory of their own, unless they are, and let the senders reuse theirs."""
        if not self.owns_memory:
            self.layers = [LayerKV(layer.key.clone(), layer.value.clone()) for layer in self.layers]
            self.owns_memory = True
        self._end(consumed=True)

    def close(self) -> None:
        """Tell the senders that the payloads were used; views on them end here. Idempotent."""
        if not self.owns_memory:
            self.layers = []
        self._end(consumed=True)

    def give_back(self) -> None:
        """Return the payloads unconsumed, so that the same receive finds them again; the tensors end here."""
        self.layers = []
        self._end(consumed=False)

    def _end(self, *, consumed: bool) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            if consumed:
                lease.acknowledge()
            else:
                lease.release()

    def __enter__(self) -> ReceivedKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Arrived:
    piece: Piece
    lease: Lease
    payload: DecodedPayload
    received: ReceivedPiece


def fetch(
    transport: Transport, wanted: Sequence[tuple[PayloadId, Piece]], num_target_heads: int, *, deadline: float
) -> ReceivedKV:
    """The request's KV, once every wanted payload is here; whatever arrived is given back when one is not.

    `deadline` is on the monotonic clock, in seconds.

    Raises:
        ReceiveTimeout: a payload is still absent at the deadline; the message names the source ranks.
        ProducerFailed: a sender failed or died.
        WireError: a payload is damaged, or not the one that was asked for.
        RemoteProtocolError: the payloads of several ranks do not belong together.
        TransportError: the transport failed.
    """
    with ExitStack() as held:
        arrived: list[_Arrived] = []
        absent: list[int] = []
        for identity, piece in wanted:
            started = time.monotonic()
            lease = transport.get(identity, deadline=deadline)
            if lease is None:
                absent.append(piece.source_rank)
                continue
            held.enter_context(lease)
            waited_s = time.monotonic() - started
            payload = decode_payload(
                lease.buffer,
                request_id=identity.transfer_id,
                target_rank=identity.target_rank,
                # Both ends are ours, so a payload without a sealed head is a damaged one.
                require_checksum=True,
            )
            _check_heads(payload, piece)
            received = ReceivedPiece(
                source_rank=piece.source_rank, heads=piece.heads, nbytes=len(lease.buffer), waited_s=waited_s
            )
            arrived.append(_Arrived(piece, lease, payload, received))
        request_id = wanted[0][0].transfer_id
        if absent:
            raise ReceiveTimeout(
                f"request {request_id!r}: nothing from source rank{'s' * (len(absent) > 1)} "
                f"{', '.join(map(str, absent))} by the deadline; nothing was consumed",
                request_id=request_id,
                rank=absent[0],
            )
        _check_alike(arrived, request_id)
        kv = _put_together(arrived, num_target_heads, request_id)
        # From here on the leases belong to the result.
        held.pop_all()
        return kv


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


def _check_alike(arrived: Sequence[_Arrived], request_id: str) -> None:
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


def _put_together(arrived: Sequence[_Arrived], num_target_heads: int, request_id: str) -> ReceivedKV:
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


def _merge(arrived: Sequence[_Arrived], like: Sequence[LayerKV], num_target_heads: int) -> list[LayerKV]:
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


def discard_payload(transport: Transport, identity: PayloadId) -> bool:
    """Whether the payload was here and is now consumed unread; False when it is absent or its sender is gone."""
    try:
        lease = transport.get(identity, deadline=time.monotonic())
    except (HandoffError, TransportError):
        return False
    if lease is None:
        return False
    lease.acknowledge()
    return True
