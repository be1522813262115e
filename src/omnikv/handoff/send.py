"""The sending half of a handoff: a request's layers become one payload a target rank, written where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import torch

from omnikv.core.keys import PayloadId
from omnikv.core.reshard import HeadIds, Piece
from omnikv.core.wire import Extension
from omnikv.errors import ConfigError, HandoffError, OmniKVError, PutRejected, TransportError
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.pack import PayloadPlan, plan_payload
from omnikv.transports.base import Transport

Layers: TypeAlias = "Sequence[tuple[torch.Tensor, torch.Tensor]] | PagedKV"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPiece:
    """What went to one target rank: the global head ids and the payload's size, header included."""

    target_rank: int
    heads: HeadIds
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What one `send` published, and how long it took (planning, gathering and publishing)."""

    request_id: str
    pieces: tuple[SentPiece, ...]
    send_s: float

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def piece_sources(layers: Layers, piece: Piece, num_local_heads: int) -> list[LayerSource]:
    """The piece's part of every layer, still unread.

    Raises:
        ConfigError: no layers, or one whose shape, dtype or head count does not fit.
    """
    if isinstance(layers, PagedKV):
        if layers.num_heads != num_local_heads:
            raise ConfigError(_head_count_message("the paged cache", layers.num_heads, num_local_heads))
        return layers.layer_sources(piece.source_positions)
    if not isinstance(layers, Sequence):
        # An iterator among others: it would be empty by the time of the second target rank.
        raise ConfigError(f"layers must be a list of (key, value) pairs, or a PagedKV, got a {type(layers).__name__}")
    if not layers:
        raise ConfigError("there are no layers to send: pass one (key, value) pair a layer")
    return [
        LayerSource(DenseSource(key, piece.source_positions), DenseSource(value, piece.source_positions))
        for key, value in (_checked_pair(index, pair, num_local_heads) for index, pair in enumerate(layers))
    ]


def _checked_pair(index: int, pair: Any, num_local_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(tensor, torch.Tensor) for tensor in pair):
        raise ConfigError(f"layer {index} must be a (key, value) pair of tensors, got {type(pair).__name__}")
    key, value = pair
    for name, tensor in (("key", key), ("value", value)):
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ConfigError(
                f"layer {index}'s {name} has no plain elements to send ({tensor.layout} on {tensor.device}, "
                f"{tensor.dtype}); pass a dense tensor that holds data"
            )
        if tensor.ndim != 3:
            raise ConfigError(
                f"layer {index}'s {name} must be [tokens, kv_heads, head_dim], got shape {list(tensor.shape)}"
            )
        if tensor.shape[1] != num_local_heads:
            raise ConfigError(_head_count_message(f"layer {index}'s {name}", tensor.shape[1], num_local_heads))
    if key.shape[0] != value.shape[0]:
        raise ConfigError(f"layer {index} has {key.shape[0]} tokens of keys and {value.shape[0]} of values")
    return key, value


def _head_count_message(what: str, got: int, stated: int) -> str:
    return f"{what} has {got} KV heads, but the route states {stated} for this rank; make the route's head ids match"


def plan_piece(
    identity: PayloadId,
    piece: Piece,
    sources: Sequence[LayerSource],
    *,
    metadata: Mapping[str, Any] | None,
    checksum: bool,
) -> PayloadPlan:
    """The payload that carries `sources` under `identity`, sized but not yet written."""
    extension = Extension(
        source_rank=identity.source_rank,
        target_rank=identity.target_rank,
        role=identity.role,
        attempt=identity.attempt,
        heads=piece.heads,
    )
    return plan_payload(
        request_id=identity.transfer_id,
        layers=sources,
        metadata=metadata,
        extension=extension,
        checksum=checksum,
    )


def publish_all(transport: Transport, plans: Sequence[tuple[PayloadId, PayloadPlan]]) -> None:
    """Nothing; every payload is reserved, written and then published, or none of them is.

    Room for the whole request is taken before anything is written, and nothing is visible before everything is
    written, so a failure leaves no half request behind: the receivers are told its cause instead.

    Raises:
        PutRejected: no room, or the request is already live (whose payloads stay as they are).
        HandoffError: a layer could not be copied.
        TransportError: the transport failed.
    """
    with _ReceiversTold(transport, [identity for identity, _ in plans]), ExitStack() as stack:
        slots = [stack.enter_context(transport.reserve(identity, plan.nbytes)) for identity, plan in plans]
        for slot, (identity, plan) in zip(slots, plans, strict=True):
            with _copy_faults_mapped(identity):
                plan.write_into(slot.buffer)
        for slot in slots:
            slot.publish()


class _ReceiversTold(AbstractContextManager["_ReceiversTold"]):
    """Tells every receiver the cause when the block fails, whatever it fails with, and lets that error go on."""

    def __init__(self, transport: Transport, identities: Sequence[PayloadId]) -> None:
        self._transport = transport
        self._identities = identities

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live_elsewhere = isinstance(error, PutRejected) and error.already_live
        if error is not None and not live_elsewhere:
            # A transport that cannot tell has told, by its end; the error that led here is the one to hear of.
            with suppress(TransportError):
                fail_all(self._transport, self._identities, f"{type(error).__name__}: {error}")


@contextmanager
def _copy_faults_mapped(identity: PayloadId) -> Iterator[None]:
    try:
        yield
    except OmniKVError:
        raise
    except RuntimeError as error:
        raise HandoffError(
            f"request {identity.transfer_id!r} could not be copied into the transport: {error}",
            request_id=identity.transfer_id,
            rank=identity.source_rank,
        ) from error


def fail_all(transport: Transport, identities: Sequence[PayloadId], cause: str) -> None:
    """Nothing; tells the receiver of every payload that it will not come, and why."""
    for identity in identities:
        transport.fail(identity, cause)
