"""Which source rank gives a target rank which part of what it needs: boxes intersected, replicas taking turns.

A plan for one target looks only at what its own boxes meet, so it costs as much as there are such boxes, whatever the
stages' sizes. Where several sources hold the same part, the i-th of N targets that need it reads from the floor(i * S /
N)-th of its S holders: every rank computes the same choice without a word, holders differ by one reader at most, and
neighbours read from neighbours. Sources whose tokens differ are no replicas of each other; a target reads from each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from omnikv.core.boxes import Box, Boxes, HeadIds, Region, Span, regions, spell_stage
from omnikv.core.coverage import Part, find_flaw, segments
from omnikv.core.stripes import meet, rows_of
from omnikv.core.tokens import (
    LastTokens,
    Stripes,
    TokenShare,
    may_meet,
    telling_count,
    without_windows,
)
from omnikv.errors import TopologyError

# How much of a stage a message shows.
_HELD_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBox:
    """Layers, heads and tokens that one source rank gives to one target rank, and where the heads sit in either's own.

    Its tokens are those of both shares. They travel stripe by stripe, as `tokens` lists them for a request.
    """

    layers: Span
    heads: HeadIds
    source_positions: HeadIds
    target_positions: HeadIds
    source_share: TokenShare
    target_share: TokenShare

    def tokens(self, num_tokens: int) -> Stripes:
        """The tokens of a request of `num_tokens` that travel, in their order."""
        return meet(self.source_share.stripes(num_tokens), self.target_share.stripes(num_tokens))

    def source_rows(self, num_tokens: int) -> Stripes:
        """The rows of the source's own tensors that travel, in their order."""
        source = self.source_share.stripes(num_tokens)
        return rows_of(meet(source, self.target_share.stripes(num_tokens)), source)

    def target_rows(self, num_tokens: int) -> Stripes:
        """The rows of the target's own tensors that they become, in the order in which they travel."""
        return rows_of(self.tokens(num_tokens), self.target_share.stripes(num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one source rank sends to one target rank: one payload, made of one box or more."""

    source_rank: int
    target_rank: int
    boxes: tuple[SharedBox, ...]
    # What follows from a piece is kept by it, and each request looks it up.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.source_rank, self.target_rank, self.boxes)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def heads(self) -> HeadIds:
        """The global head ids of all boxes, each once."""
        return tuple(dict.fromkeys(head for box in self.boxes for head in box.heads))


# A rank and the one of its boxes that is meant.
_Holder: TypeAlias = "tuple[int, Box]"
# The same, chosen to give some layers.
_Choice: TypeAlias = "tuple[int, Box, Span]"


class StageIndex:
    """The boxes of all ranks of one stage, found by head."""

    def __init__(self, ranks: Sequence[Boxes]) -> None:
        self.ranks = tuple(ranks)
        self._holders = [(rank, box) for rank, boxes in enumerate(self.ranks) for box in boxes]
        by_head: dict[int, list[int]] = {}
        for at, (_, box) in enumerate(self._holders):
            for head in box.heads:
                by_head.setdefault(head, []).append(at)
        self._by_head = {head: tuple(found) for head, found in by_head.items()}

    def places_of(self, head: int) -> tuple[int, ...]:
        """Where `head` is held; heads with equal places are held alike."""
        return self._by_head.get(head, ())

    def holders(self, places: tuple[int, ...], layers: Span) -> list[_Holder]:
        """Whose boxes at these places have one of `layers`: ranks, ascending, with the box."""
        return [self._holders[at] for at in places if self._holders[at][1].layers.meet(layers)]


def plan_target(target_rank: int, sources: StageIndex, targets: StageIndex) -> tuple[Piece, ...]:
    """What `target_rank` gets of what it needs, by source rank; `prove` says whether that is all of it."""
    pieces: dict[int, list[SharedBox]] = {}
    for need in targets.ranks[target_rank]:
        places = _positions(need.heads)
        for (rank, box, layers), heads in _chosen(target_rank, need, sources, targets).items():
            source_places = _positions(box.heads)
            shared = SharedBox(
                layers=layers,
                heads=tuple(heads),
                source_positions=tuple(source_places[head] for head in heads),
                target_positions=tuple(places[head] for head in heads),
                source_share=box.tokens,
                target_share=need.tokens,
            )
            pieces.setdefault(rank, []).append(shared)
    return tuple(
        Piece(
            source_rank=rank,
            target_rank=target_rank,
            boxes=tuple(sorted(boxes, key=lambda box: (box.layers, box.target_positions))),
        )
        for rank, boxes in sorted(pieces.items())
    )


def _positions(heads: HeadIds) -> dict[int, int]:
    return {head: at for at, head in enumerate(heads)}


def prove(target_rank: int, pieces: Sequence[Piece], sources: StageIndex, needed: Boxes) -> None:
    """Nothing, when the pieces give the target every element of what it needs exactly once, of any number of tokens.

    Raises:
        TopologyError: they do not; the message names layers, heads and tokens.
    """
    shares = {box.tokens for box in needed} | {box.source_share for piece in pieces for box in piece.boxes}
    prove_at(target_rank, pieces, sources, needed, telling_count(shares))
    if any(isinstance(share, LastTokens) for share in shares):
        pieces = [replace(piece, boxes=tuple(map(_without_windows, piece.boxes))) for piece in pieces]
        needed = tuple(replace(box, tokens=without_windows(box.tokens)) for box in needed)
        prove_at(target_rank, pieces, sources, needed, telling_count(map(without_windows, shares)))


def _without_windows(box: SharedBox) -> SharedBox:
    source, target = without_windows(box.source_share), without_windows(box.target_share)
    return replace(box, source_share=source, target_share=target)


def prove_at(target_rank: int, pieces: Sequence[Piece], sources: StageIndex, needed: Boxes, num_tokens: int) -> None:
    """Nothing, when the pieces give the target everything exactly once in a request of `num_tokens`.

    Raises:
        TopologyError: they do not; the message names layers, heads and tokens.
    """
    flaw = find_flaw(regions(needed, num_tokens), parts_of(pieces, num_tokens))
    if flaw is None:
        return
    message = f"{flaw.spell()}, which target rank {target_rank} needs"
    if flaw.tokens is not None:
        message += f" (in a request of {num_tokens} tokens)"
    if flaw.kind == "covered twice":
        raise TopologyError(f"{message}: replicas must hold the same share of tokens, other ranks separate ones")
    held = spell_stage(sources.ranks)
    raise TopologyError(f"{message}; sources hold {held if len(held) <= _HELD_CHARS else held[:_HELD_CHARS] + '...'}")


def parts_of(pieces: Sequence[Piece], num_tokens: int) -> list[Part]:
    """What the pieces carry of a request of `num_tokens`, box by box."""
    return [
        Part(piece.source_rank, Region(box.layers, box.heads, box.tokens(num_tokens)))
        for piece in pieces
        for box in piece.boxes
    ]


def _chosen(target_rank: int, need: Box, sources: StageIndex, targets: StageIndex) -> dict[_Choice, list[int]]:
    """The heads of `need` by where they come from."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for head in need.heads:
        alike.setdefault((sources.places_of(head), targets.places_of(head)), []).append(head)
    chosen: dict[_Choice, list[int]] = {}
    for (source_places, target_places), heads in alike.items():
        holders = sources.holders(source_places, need.layers)
        readers = targets.holders(target_places, need.layers)
        cuts = segments(need.layers, [box.layers for _, box in (*holders, *readers)])
        choices = [
            choice
            for layers in cuts
            for choice in _choose(target_rank, layers, need.tokens, _having(layers, holders), _having(layers, readers))
        ]
        for choice in _joined(choices):
            chosen.setdefault(choice, []).extend(heads)
    # In the target's own order, which groups of heads that are held alike may have left.
    order = _positions(need.heads)
    return {choice: sorted(heads, key=order.__getitem__) for choice, heads in chosen.items()}


def _having(layers: Span, holders: Sequence[_Holder]) -> list[_Holder]:
    return [(rank, box) for rank, box in holders if box.layers.contains(layers)]


def _choose(
    target_rank: int, layers: Span, tokens: TokenShare, holders: Sequence[_Holder], readers: Sequence[_Holder]
) -> Iterator[_Choice]:
    """For each share of tokens that holders have, the one of its replicas whose turn it is."""
    replicas: dict[TokenShare, list[_Holder]] = {}
    for rank, box in holders:
        replicas.setdefault(box.tokens, []).append((rank, box))
    for share, group in replicas.items():
        if may_meet(share, tokens):
            ranks = [rank for rank, box in readers if may_meet(share, box.tokens)]
            rank, box = group[ranks.index(target_rank) * len(group) // len(ranks)]
            yield rank, box, layers


def _joined(choices: Iterable[_Choice]) -> list[_Choice]:
    """The choices, those of one box for neighbouring layers made one."""
    joined: dict[tuple[int, Box], list[Span]] = {}
    for rank, box, layers in choices:
        spans = joined.setdefault((rank, box), [])
        if spans and spans[-1].stop == layers.start:
            layers = Span(spans.pop().start, layers.stop)
        spans.append(layers)
    return [(rank, box, span) for (rank, box), spans in joined.items() for span in spans]
