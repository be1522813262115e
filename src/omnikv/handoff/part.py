"""One source rank's part of a request, decoded where it lies and checked against what was asked for.

What a part is, is taken from what arrived: the regions that its head states, compared with the route's, and the shapes
of its tensors, compared with the regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omnikv.core.boxes import EVERY_LAYER, Region, Span
from omnikv.core.keys import PayloadId
from omnikv.core.plan import Piece
from omnikv.core.tokens import ALL_TOKENS, State, count
from omnikv.errors import RemoteProtocolError
from omnikv.handoff.received import ReceivedPiece
from omnikv.tensors.kv import LayerKV
from omnikv.tensors.pack import DecodedPayload, decode_payload
from omnikv.transports.base import Lease


@dataclass(frozen=True, slots=True)
class Arrived:
    """One source rank's part, decoded in the memory that its lease holds.

    `pairs` are its tensors and `regions`, one a box of the piece, what they are, of a request of `num_tokens`.
    """

    piece: Piece
    lease: Lease
    payload: DecodedPayload
    pairs: tuple[LayerKV, ...]
    regions: tuple[Region, ...]
    num_tokens: int
    received: ReceivedPiece


def read_part(identity: PayloadId, piece: Piece, lease: Lease, waited_s: float) -> Arrived:
    """The part that lies under `lease`, checked against what was asked for. The lease stays the caller's.

    Raises:
        WireError: it is damaged, or not the one that was asked for.
        RemoteProtocolError: its origin is another one, or its heads, layers or tokens are not those of the route.
    """
    payload = decode_payload(
        lease.buffer,
        request_id=identity.transfer_id,
        target_rank=identity.target_rank,
        # Both ends are ours, so a payload without a sealed head is a damaged one.
        require_checksum=True,
        # Lent for as long as the lease is held, like the tensors.
        in_place=True,
    )
    _check_origin(payload, identity)
    pairs, num_tokens = _checked_pairs(payload, piece)
    found = _checked_regions(payload, piece, pairs, num_tokens)
    received = ReceivedPiece(
        source_rank=piece.source_rank, heads=piece.heads, nbytes=len(lease.buffer), waited_s=waited_s
    )
    return Arrived(piece, lease, payload, pairs, found, num_tokens, received)


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


def _checked_pairs(payload: DecodedPayload, piece: Piece) -> tuple[tuple[LayerKV, ...], int]:
    """The part's tensors in order, and the tokens of the whole request."""
    pairs = tuple(layer for layer in payload.layers if layer is not None)
    extension = payload.header.extension
    stated = () if extension is None else extension.heads
    if extension is not None and stated != piece.heads:
        raise _unlike_route(payload, piece, f" sent heads {list(stated)}, the route says {list(piece.heads)}")
    if len(pairs) < len(payload.layers) or not pairs:
        absent = next((at for at, layer in enumerate(payload.layers) if layer is None), 0)
        raise _unlike_route(payload, piece, f" sent no layer {absent}")
    if _names_regions(payload):
        if extension is None or extension.num_tokens is None:
            raise _unlike_route(payload, piece, " names regions without the number of tokens of the request")
        return pairs, extension.num_tokens
    return pairs, max(_num_rows(pair.key) for pair in pairs)


def _checked_regions(
    payload: DecodedPayload, piece: Piece, pairs: Sequence[LayerKV], num_tokens: int
) -> tuple[Region, ...]:
    """What the part is, from its head and its tensors; no region of it is taken from the route alone."""
    stated = _names_regions(payload)
    found = stated or tuple(
        # A payload that names no regions has all tokens of all layers.
        Region(Span(0, len(pairs)), box.heads, ALL_TOKENS.stripes(num_tokens))
        for box in piece.boxes
    )
    planned = tuple(
        Region(box.layers if box.layers.stop != EVERY_LAYER.stop else region.layers, box.heads, box.tokens(num_tokens))
        for box, region in zip(piece.boxes, found, strict=False)
    )
    if found != planned or len(found) != len(piece.boxes):
        raise _unlike_route(payload, piece, f" sent {_spell(found)}, the route says {_spell(planned)}")
    named = sum(region.layers.num_layers for region in found)
    if named != len(pairs):
        raise _unlike_route(payload, piece, f" sent {len(pairs)} layers for the {named} that it names")
    rest = iter(pairs)
    for box, region in zip(piece.boxes, found, strict=True):
        for layer, pair in zip(range(*region.layers), rest, strict=False):
            # Layers that nothing is known of may be windows, which hold fewer tokens.
            is_known = stated or box.layers.stop != EVERY_LAYER.stop
            rows = count(region.tokens) if is_known else _num_rows(pair.key)
            for name, tensor in zip(LayerKV._fields, pair, strict=True):
                if not _fits(tensor, rows, len(region.heads), is_state=box.target_share == State()):
                    expected = f"[{rows}, {len(region.heads)}, head_dim]"
                    what = f"'s layer {layer} {name} has shape {list(tensor.shape)}, expected {expected}"
                    raise _unlike_route(payload, piece, what)
    return found


def _names_regions(payload: DecodedPayload) -> tuple[Region, ...]:
    return () if payload.header.extension is None else payload.header.extension.regions


def _num_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 0


def _fits(tensor: torch.Tensor, rows: int, num_heads: int, *, is_state: bool) -> bool:
    if tensor.ndim != 3 and not (is_state and tensor.ndim > 3):
        return False
    return tuple(tensor.shape[:2]) == (rows, num_heads)


def _spell(stated: Sequence[Region]) -> str:
    return "; ".join(
        f"layers {region.layers.start}-{region.layers.stop - 1} heads {list(region.heads)} tokens "
        f"{[tuple(stripe) for stripe in region.tokens[:4]]}"
        for region in stated
    )


def _unlike_route(payload: DecodedPayload, piece: Piece, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"source rank {piece.source_rank}{what}", request_id=payload.header.request_id, rank=piece.source_rank
    )
