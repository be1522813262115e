"""Puts the parts of several source ranks together, after checking that they belong together and are everything.

Nothing is handed out before the regions that arrived are proven to cover this rank's boxes exactly once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from omnikv.core.boxes import EVERY_LAYER, Box, Boxes, HeadIds, Region, Span, position_of, regions
from omnikv.core.coverage import Flaw, Part, find_flaw
from omnikv.core.plan import Piece
from omnikv.core.tokens import ALL_TOKENS, Stripes, count, is_everything
from omnikv.errors import RemoteProtocolError
from omnikv.handoff.part import Arrived
from omnikv.handoff.received import ReceivedKV
from omnikv.tensors.kv import LayerKV
from omnikv.tensors.rows import write_rows


def assemble(arrived: Sequence[Arrived], boxes: Boxes, request_id: str) -> ReceivedKV:
    """The request's KV on a rank that holds `boxes`, from all of its parts; the leases go over to it.

    Raises:
        RemoteProtocolError: the parts differ in layers, tokens, dtype or metadata, or do not cover the boxes exactly.
    """
    _check_alike(arrived, request_id)
    first = arrived[0]
    plan = _plan_of(tuple((part.piece, part.regions) for part in arrived), boxes, first.num_tokens)
    if isinstance(plan, Flaw):
        raise RemoteProtocolError(f"request {request_id!r} did not arrive whole: {plan.spell()}", request_id=request_id)
    return ReceivedKV(
        request_id=request_id,
        layers=_put_together(arrived, plan, request_id),
        layer_ids=plan.layer_ids,
        num_tokens=first.num_tokens,
        metadata=dict(first.payload.header.metadata),
        sources=tuple(part.received for part in arrived),
        leases=[part.lease for part in arrived],
        owns_memory=plan.owns_memory,
    )


def layer_facts(layers: Sequence[LayerKV]) -> list[tuple[object, ...]]:
    """What must be alike in every rank's part of a request: per layer and tensor, tokens, head_dim and dtype."""
    return [_facts(tensor) for layer in layers for tensor in layer]


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape[0], *tensor.shape[2:], str(tensor.dtype)


def _check_alike(arrived: Sequence[Arrived], request_id: str) -> None:
    if len(arrived) == 1:
        return
    first = arrived[0]
    plain = not _names_regions(first)
    facts = layer_facts(first.pairs)
    for other in arrived[1:]:
        theirs = layer_facts(other.pairs)
        difference = None
        if plain and len(theirs) != len(facts):
            difference = f"{len(theirs) // 2} against {len(facts) // 2} layers"
        elif plain and theirs != facts:
            at = next(index for index, (mine, its) in enumerate(zip(facts, theirs, strict=True)) if mine != its)
            difference = f"layer {at // 2}: {_spell_facts(theirs[at])} against {_spell_facts(facts[at])}"
        elif other.num_tokens != first.num_tokens:
            difference = f"{other.num_tokens} against {first.num_tokens} tokens of the request"
        elif other.payload.header.metadata != first.payload.header.metadata:
            difference = "their metadata"
        if difference is not None:
            raise _misfit(other, first.piece.source_rank, difference, request_id)


def _names_regions(part: Arrived) -> bool:
    extension = part.payload.header.extension
    return extension is not None and bool(extension.regions)


def _spell_facts(facts: tuple[object, ...]) -> str:
    return f"{facts[0]} tokens of head_dim {'x'.join(map(str, facts[1:-1]))} in {str(facts[-1]).removeprefix('torch.')}"


def _misfit(other: Arrived, first_rank: int, difference: str, request_id: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"request {request_id!r}: the parts from source ranks {other.piece.source_rank} and {first_rank} differ in "
        f"{difference}",
        request_id=request_id,
        rank=other.piece.source_rank,
    )


class _Placed(NamedTuple):
    """One pair that arrived: the pair's and its part's numbers, and where it belongs: heads and rows (None: all)."""

    part: int
    pair: int
    head_positions: HeadIds
    rows: Stripes | None


class _Place(NamedTuple):
    """One of this rank's layers, and what it is made of; whole where that is one pair as it came."""

    placed: tuple[_Placed, ...]
    num_heads: int
    num_rows: int
    is_whole: bool


class _Plan(NamedTuple):
    """How parts become a rank's layers, ascending; each element of them comes once.

    `is_as_it_came` where the first part's pairs are the layers.
    """

    layer_ids: tuple[int, ...]
    layers: tuple[_Place, ...]
    is_as_it_came: bool
    owns_memory: bool


# What each request of one length would repeat.
@functools.lru_cache(maxsize=64)
def _plan_of(parts: tuple[tuple[Piece, tuple[Region, ...]], ...], boxes: Boxes, num_tokens: int) -> _Plan | Flaw:
    """How these parts become `boxes`, or why they are not all of them, each element once (D20, D35)."""
    boxes = _closed(boxes, parts[0][1])
    found = [Part(piece.source_rank, region) for piece, held in parts for region in held]
    flaw = find_flaw(regions(boxes, num_tokens), found)
    if flaw is not None:
        return flaw
    by_layer: dict[int, list[_Placed]] = {}
    for number, (piece, held) in enumerate(parts):
        for at, placed in _placed(number, piece, held, boxes, num_tokens):
            by_layer.setdefault(at, []).append(placed)
    layers = [
        _place(by_layer[at], box, num_tokens)
        for at, box in enumerate(box for box in boxes for _ in range(box.layers.num_layers))
    ]
    return _Plan(
        layer_ids=tuple(layer for box in boxes for layer in range(*box.layers)),
        layers=tuple(layers),
        is_as_it_came=len(parts) == 1
        and all(place.is_whole and place.placed[0].pair == at for at, place in enumerate(layers)),
        owns_memory=not any(place.is_whole for place in layers),
    )


def _closed(boxes: Boxes, first: Sequence[Region]) -> Boxes:
    """The boxes, open layers ending with the last one that came."""
    stop = max(region.layers.stop for region in first)
    return tuple(
        Box(heads=box.heads, layers=Span(box.layers.start, min(box.layers.stop, stop)), tokens=box.tokens)
        if box.layers.stop == EVERY_LAYER.stop
        else box
        for box in boxes
    )


def _placed(
    number: int, piece: Piece, held: Sequence[Region], boxes: Boxes, num_tokens: int
) -> Iterator[tuple[int, _Placed]]:
    """Each pair of part `number` with its layer's place among this rank's, and its own place in that."""
    pair = 0
    for box, region in zip(piece.boxes, held, strict=True):
        whole = box.source_share == box.target_share == ALL_TOKENS
        rows = None if whole else box.target_rows(num_tokens)
        first = position_of(region.layers.start, boxes)
        for at in range(first, first + region.layers.num_layers):
            yield at, _Placed(number, pair, box.target_positions, rows)
            pair += 1


def _place(placed: Sequence[_Placed], box: Box, num_tokens: int) -> _Place:
    num_rows = count(box.tokens.stripes(num_tokens))
    first = placed[0]
    is_whole = (
        len(placed) == 1
        and first.head_positions == tuple(range(len(box.heads)))
        and (first.rows is None or is_everything(first.rows, num_rows))
    )
    return _Place(tuple(placed), len(box.heads), num_rows, is_whole)


def _put_together(arrived: Sequence[Arrived], plan: _Plan, request_id: str) -> list[LayerKV]:
    """This rank's layers; one that came in one pair is that pair."""
    if plan.is_as_it_came:
        return list(arrived[0].pairs)
    pairs = [part.pairs for part in arrived]
    return [
        pairs[place.placed[0].part][place.placed[0].pair] if place.is_whole else _merged(arrived, place, at, request_id)
        for at, place in enumerate(plan.layers)
    ]


def _merged(arrived: Sequence[Arrived], place: _Place, at: int, request_id: str) -> LayerKV:
    first, *others = place.placed
    pairs = [arrived[placed.part].pairs[placed.pair] for placed in place.placed]
    for other, pair in zip(others, pairs[1:], strict=True):
        for mine, theirs in zip(pairs[0], pair, strict=True):
            if mine.dtype != theirs.dtype or mine.shape[2:] != theirs.shape[2:]:
                difference = f"layer {at}: {_spell_facts(_facts(theirs))} against {_spell_facts(_facts(mine))}"
                raise _misfit(arrived[other.part], arrived[first.part].piece.source_rank, difference, request_id)
    merged = LayerKV(*(_room_for(tensor, first.rows, place) for tensor in pairs[0]))
    for placed, pair in zip(place.placed, pairs, strict=True):
        for out, tensor in zip(merged, pair, strict=True):
            write_rows(out, tensor, placed.rows, placed.head_positions)
    return merged


def _room_for(like: torch.Tensor, rows: Stripes | None, place: _Place) -> torch.Tensor:
    return like.new_empty((like.shape[0] if rows is None else place.num_rows, place.num_heads, *like.shape[2:]))
