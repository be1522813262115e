"""One source rank's part of a request, decoded where it lies and checked against what was asked for.

What a part is, is taken from what arrived: the regions that its head states, compared with the route's, and the shapes
of its tensors, compared with the regions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from omnikv.core.boxes import EVERY_LAYER, HeadIds, Region, Span
from omnikv.core.keys import PayloadId
from omnikv.core.plan import Piece
from omnikv.core.tokens import ALL_TOKENS, State, count
from omnikv.core.wire import Extension, Header, show, split_digest
from omnikv.core.wire_decode import head_nbytes
from omnikv.core.wire_spans import TensorSpan
from omnikv.errors import OmniKVError, RemoteProtocolError
from omnikv.handoff.received import ReceivedPiece
from omnikv.tensors.borrow import address_of
from omnikv.tensors.kv import LayerKV
from omnikv.tensors.pack import DecodedPayload, decode_payload
from omnikv.tensors.unpack import can_stay_in_place
from omnikv.transports.base import Lease

Shape: TypeAlias = "tuple[int, ...]"

# Regions, and stripes of each, that a message lists before it shortens.
_SHOWN = 4
# Tensors, heads, regions and stripes of a head that is kept.
_MOST_KEPT = 4096


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


class _Content(NamedTuple):
    """What a part is: its heads, its regions, and the tokens of the whole request."""

    heads: HeadIds
    regions: tuple[Region, ...]
    num_tokens: int


class _Read(NamedTuple):
    """What the memory of a part holds."""

    payload: DecodedPayload
    pairs: tuple[LayerKV, ...]
    content: _Content


@dataclass(frozen=True, slots=True)
class Prepared:
    """A part that was looked at before it came: `read`, should this head lie there in the end."""

    memory: memoryview
    head: bytes
    read: _Read

    def is_of(self, memory: memoryview, head: bytes) -> bool:
        """Whether it is what a part that begins with `head` in `memory` needs."""
        if self.head != head or len(memory) != len(self.memory):
            return False
        return memory is self.memory or address_of(memory) == address_of(self.memory)

    def fits(self, memory: memoryview) -> bool:
        """Whether it is what lies in `memory` now."""
        return self.is_of(memory, bytes(memory[: len(self.head)]))


def prepare_part(identity: PayloadId, piece: Piece, memory: memoryview, head: bytes) -> Prepared | None:
    """The views of a part that will lie in `memory` and have this head, for `read_part`; None where that cannot be."""
    try:
        nbytes = head_nbytes(head, len(memory))
        head = head[:nbytes]
        digest = split_digest(head)
        if len(head) < nbytes or digest is None or digest.scope != "header":
            # Cut short, or with a checksum over what is not written.
            return None
        read = _read(identity, piece, memory, head)
    except OmniKVError:
        # Said when the part itself comes, should it be so by then.
        return None
    if not can_stay_in_place(read.payload.header, address_of(memory) + nbytes):
        # Copies of what is not written.
        return None
    return Prepared(memory, head, read)


def read_part(
    identity: PayloadId, piece: Piece, lease: Lease, waited_s: float, prepared: Prepared | None = None
) -> Arrived:
    """The part that lies under `lease`, checked against what was asked for. The lease stays the caller's.

    Nothing is read again that was `prepared` in the same memory and is still the same.

    Raises:
        WireError: it is damaged, or not the one that was asked for.
        RemoteProtocolError: its origin is another one, or its heads, layers or tokens are not those of the route.
    """
    memory = lease.buffer
    is_ready = prepared is not None and prepared.fits(memory)
    read = prepared.read if prepared is not None and is_ready else _read(identity, piece, memory)
    content = read.content
    received = ReceivedPiece(source_rank=piece.source_rank, heads=content.heads, nbytes=len(memory), waited_s=waited_s)
    return Arrived(piece, lease, read.payload, read.pairs, content.regions, content.num_tokens, received)


def _read(identity: PayloadId, piece: Piece, memory: memoryview, head: bytes | None = None) -> _Read:
    payload = decode_payload(
        memory,
        request_id=identity.transfer_id,
        target_rank=identity.target_rank,
        # Both ends are ours, so a payload without a sealed head is a damaged one.
        require_checksum=True,
        # Lent for as long as the lease is held, like the tensors.
        in_place=True,
        head=head,
    )
    _check_origin(payload, identity)
    header, extension = payload.header, payload.header.extension
    stated = (None, (), None) if extension is None else (extension.heads, extension.regions, extension.num_tokens)
    facts = (header.num_layers, header.spans, *stated, piece)
    content = _kept_content_of(*facts) if _is_small(header) else _content_of(*facts)
    if isinstance(content, str):
        raise RemoteProtocolError(
            f"source rank {piece.source_rank}{content}", request_id=header.request_id, rank=piece.source_rank
        )
    return _Read(payload, tuple(layer for layer in payload.layers if layer is not None), content)


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


def _content_of(
    num_layers: int,
    spans: tuple[TensorSpan, ...],
    heads: HeadIds | None,
    stated: tuple[Region, ...],
    num_tokens: int | None,
    piece: Piece,
) -> _Content | str:
    """What a part is, from its head and its tensors; or what the sender did wrong, in words that follow its name."""
    shapes: dict[int, dict[str, Shape]] = {}
    for span in spans:
        shapes.setdefault(span.layer, {})[span.kind] = span.shape
    if heads is not None and heads != piece.heads:
        return f" sent heads {show(list(heads))}, the route says {show(list(piece.heads))}"
    if len(shapes) < num_layers or not num_layers:
        return f" sent no layer {next((at for at in range(num_layers) if at not in shapes), 0)}"
    if not stated:
        num_tokens = max(_num_rows(pair["key"]) for pair in shapes.values())
    elif num_tokens is None:
        return " names regions without the number of tokens of the request"
    found = stated or tuple(
        # A payload that names no regions has all tokens of all layers.
        Region(Span(0, num_layers), box.heads, ALL_TOKENS.stripes(num_tokens))
        for box in piece.boxes
    )
    planned = tuple(
        Region(box.layers if box.layers.stop != EVERY_LAYER.stop else region.layers, box.heads, box.tokens(num_tokens))
        for box, region in zip(piece.boxes, found, strict=False)
    )
    if found != planned or len(found) != len(piece.boxes):
        return f" sent {_spell(found)}, the route says {_spell(planned)}"
    named = sum(region.layers.num_layers for region in found)
    if named != num_layers:
        return f" sent {num_layers} layers for the {named} that it names"
    misfit = _find_misfit(piece, found, [shapes[layer] for layer in range(num_layers)], is_stated=bool(stated))
    return misfit or _Content(piece.heads, found, num_tokens)


# What every part of one shape would repeat; its tensors have the shapes of its spans.
_kept_content_of = functools.lru_cache(maxsize=64)(_content_of)


def _is_small(header: Header) -> bool:
    """Whether the head says so little that it may be kept: a peer may state megabytes."""
    own = header.extension or Extension()
    named = sum(1 + len(region.heads) + len(region.tokens) for region in own.regions)
    return len(header.spans) + len(own.heads) + named <= _MOST_KEPT


def _find_misfit(
    piece: Piece, found: Sequence[Region], shapes: Sequence[Mapping[str, Shape]], *, is_stated: bool
) -> str | None:
    """Which tensor has not the shape that its region tells, in words, or None."""
    rest = iter(shapes)
    for box, region in zip(piece.boxes, found, strict=True):
        is_state, fitting = box.target_share == State(), None
        for layer, pair in zip(range(*region.layers), rest, strict=False):
            # Layers that nothing is known of may be windows, which hold fewer tokens.
            is_known = is_stated or box.layers.stop != EVERY_LAYER.stop
            rows = count(region.tokens) if is_known else _num_rows(pair["key"])
            if (rows, pair) == fitting:
                # Most layers are like the one before.
                continue
            fitting = rows, pair
            for name in LayerKV._fields:
                if not _fits(pair[name], rows, len(region.heads), is_state=is_state):
                    expected = f"[{rows}, {len(region.heads)}, head_dim]"
                    return f"'s layer {layer} {name} has shape {list(pair[name])}, expected {expected}"
    return None


def _num_rows(shape: Shape) -> int:
    return shape[0] if shape else 0


def _fits(shape: Shape, rows: int, num_heads: int, *, is_state: bool) -> bool:
    if len(shape) != 3 and not (is_state and len(shape) > 3):
        return False
    return shape[:2] == (rows, num_heads)


def _spell(stated: Sequence[Region]) -> str:
    # Shortened throughout: a peer may state as much as fits into a head.
    spelled = [
        f"layers {region.layers.start}-{region.layers.stop - 1} heads {show(list(region.heads))} tokens "
        f"{show([tuple(stripe) for stripe in region.tokens[:_SHOWN]])}"
        for region in stated[:_SHOWN]
    ]
    more = len(stated) - _SHOWN
    return "; ".join(spelled) + (f" and {more} regions more" if more > 0 else "")
