"""Which source rank gives a target rank which part of what it needs: boxes intersected, replicas taking turns.

A plan for one target looks only at what its own boxes meet, so it costs as much as there are such boxes, whatever the
stages' sizes. Where several sources hold the same part, the i-th of N targets that need it reads from the floor(i * S /
N)-th of its S holders: every rank computes the same choice without a word, holders differ by one reader at most, and
neighbours read from neighbours. Sources whose tokens differ are no replicas of each other; a target reads from each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from omnikv.core.boxes import Box, Boxes, HeadIds, Region, Span, regions, spell_stage
from omnikv.core.coverage import Part, find_flaw, segments
from omnikv.core.tokens import Stripes, TokenShare, may_meet, meet, rows_of
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

    @property
    def heads(self) -> HeadIds:
        """The global head ids of all boxes, each once."""
        return tuple(dict.fromkeys(head for box in self.boxes for head in box.heads))


class StageIndex:
    """The boxes of all ranks of one stage, found by head."""

    def __init__(self, ranks: Sequence[Boxes]) -> None:
        self.ranks = tuple(ranks)
        self._by_head: dict[int, list[tuple[int, Box]]] = {}
        for rank, boxes in enumerate(self.ranks):
            for box in boxes:
                for head in box.heads:
                    self._by_head.setdefault(head, []).append((rank, box))

    def holders(self, head: int, layers: Span) -> list[tuple[int, Box]]:
        """Whose boxes have `head` in one of `layers`: ranks, ascending, with the box."""
        return [(rank, box) for rank, box in self._by_head.get(head, ()) if box.layers.meet(layers)]


# A rank and the one of its boxes that is meant.
_Holder: TypeAlias = "tuple[int, Box]"
# The same, chosen to give some layers.
_Choice: TypeAlias = "tuple[int, Box, Span]"


def plan_target(target_rank: int, sources: StageIndex, targets: StageIndex) -> tuple[Piece, ...]:
    """What `target_rank` gets of what it needs, by source rank; `prove` says whether that is all of it."""
    pieces: dict[int, list[SharedBox]] = {}
    for need in targets.ranks[target_rank]:
        for (rank, box, layers), heads in _chosen(target_rank, need, sources, targets).items():
            shared = SharedBox(
                layers=layers,
                heads=tuple(heads),
                source_positions=tuple(map(box.heads.index, heads)),
                target_positions=tuple(map(need.heads.index, heads)),
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


def prove(target_rank: int, pieces: Sequence[Piece], sources: StageIndex, needed: Boxes, num_tokens: int) -> None:
    """Nothing, when the pieces give the target every element of what it needs of `num_tokens` exactly once.

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
    chosen: dict[_Choice, list[int]] = {}
    for head in need.heads:
        holders, readers = (stage.holders(head, need.layers) for stage in (sources, targets))
        cuts = [box.layers for _, box in (*holders, *readers)]
        for choice in _joined(
            choice
            for segment in segments(need.layers, cuts)
            for choice in _choose(
                target_rank,
                segment,
                need.tokens,
                [(rank, box) for rank, box in holders if box.layers.contains(segment)],
                [(rank, box) for rank, box in readers if box.layers.contains(segment)],
            )
        ):
            chosen.setdefault(choice, []).append(head)
    return chosen


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
