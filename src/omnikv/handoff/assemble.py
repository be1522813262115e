"""Puts the parts of several source ranks together, after checking that they belong together and are everything.

Nothing is handed out before the regions that arrived are proven to cover this rank's boxes exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from omnikv.core.boxes import EVERY_LAYER, Box, Boxes, HeadIds, Span, position_of, regions
from omnikv.core.coverage import Part, find_flaw
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
    boxes = _closed(boxes, first)
    _check_coverage(arrived, boxes, request_id)
    layers, owned = _put_together(arrived, boxes, request_id)
    return ReceivedKV(
        request_id=request_id,
        layers=layers,
        layer_ids=[layer for box in boxes for layer in range(*box.layers)],
        num_tokens=first.num_tokens,
        metadata=dict(first.payload.header.metadata),
        sources=tuple(part.received for part in arrived),
        leases=[part.lease for part in arrived],
        owns_memory=owned,
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


def _closed(boxes: Boxes, part: Arrived) -> Boxes:
    """The boxes, open layers ending with the last one that came."""
    stop = max(region.layers.stop for region in part.regions)
    return tuple(
        Box(heads=box.heads, layers=Span(box.layers.start, min(box.layers.stop, stop)), tokens=box.tokens)
        if box.layers.stop == EVERY_LAYER.stop
        else box
        for box in boxes
    )


def _check_coverage(arrived: Sequence[Arrived], boxes: Boxes, request_id: str) -> None:
    """Nothing, when what arrived is this rank's part of the request, each element once (D20, D35)."""
    parts = [Part(part.piece.source_rank, region) for part in arrived for region in part.regions]
    flaw = find_flaw(regions(boxes, arrived[0].num_tokens), parts)
    if flaw is not None:
        raise RemoteProtocolError(f"request {request_id!r} did not arrive whole: {flaw.spell()}", request_id=request_id)


class _Placed(NamedTuple):
    """One pair that arrived, and where it belongs: heads and rows (None: all) of one of this rank's layers."""

    part: Arrived
    pair: LayerKV
    head_positions: HeadIds
    rows: Stripes | None


def _put_together(arrived: Sequence[Arrived], boxes: Boxes, request_id: str) -> tuple[list[LayerKV], bool]:
    """This rank's layers, and whether they lie in memory of their own; a layer that came in one pair is that pair."""
    by_layer: dict[int, list[_Placed]] = {}
    for part in arrived:
        for at, placed in _placed(part, boxes):
            by_layer.setdefault(at, []).append(placed)
    layers: list[LayerKV] = []
    owned = True
    at = 0
    for box in boxes:
        num_rows = count(box.tokens.stripes(arrived[0].num_tokens))
        every_head = tuple(range(len(box.heads)))
        for _ in range(box.layers.num_layers):
            found = by_layer[at]
            if len(found) == 1 and _is_whole(found[0], every_head, num_rows):
                layers.append(found[0].pair)
                owned = False
            else:
                layers.append(_merged(found, at, len(every_head), num_rows, request_id))
            at += 1
    return layers, owned


def _placed(part: Arrived, boxes: Boxes) -> Iterator[tuple[int, _Placed]]:
    """Each pair of the part with its layer's place among this rank's, and its own place in that."""
    pairs = iter(part.pairs)
    for box, region in zip(part.piece.boxes, part.regions, strict=True):
        whole = box.source_share == box.target_share == ALL_TOKENS
        rows = None if whole else box.target_rows(part.num_tokens)
        first = position_of(region.layers.start, boxes)
        for at in range(first, first + region.layers.num_layers):
            yield at, _Placed(part, next(pairs), box.target_positions, rows)


def _is_whole(one: _Placed, every_head: HeadIds, num_rows: int) -> bool:
    return one.head_positions == every_head and (one.rows is None or is_everything(one.rows, num_rows))


def _merged(found: Sequence[_Placed], at: int, num_heads: int, num_rows: int, request_id: str) -> LayerKV:
    first = found[0]
    for other in found[1:]:
        for mine, theirs in zip(first.pair, other.pair, strict=True):
            if mine.dtype != theirs.dtype or mine.shape[2:] != theirs.shape[2:]:
                difference = f"layer {at}: {_spell_facts(_facts(theirs))} against {_spell_facts(_facts(mine))}"
                raise _misfit(other.part, first.part.piece.source_rank, difference, request_id)
    merged = LayerKV(*(_room_for(tensor, first.rows, num_rows, num_heads) for tensor in first.pair))
    for placed in found:
        for out, tensor in zip(merged, placed.pair, strict=True):
            write_rows(out, tensor, placed.rows, placed.head_positions)
    return merged


def _room_for(like: torch.Tensor, rows: Stripes | None, num_rows: int, num_heads: int) -> torch.Tensor:
    return like.new_empty((like.shape[0] if rows is None else num_rows, num_heads, *like.shape[2:]))
