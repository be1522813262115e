"""Both ends of a handoff, whatever their layouts: who holds what, who sends what to whom, and proof that it is all.

Each rank of both stages states what it holds as boxes over layers, KV heads and tokens (`omnikv.core.boxes`). Nothing
is derived from a count or a divisibility rule, so uneven and replicated heads, pipeline stages, context parallelism, a
latent that every rank holds, and states that are cut by rules of their own need no special case: what moves is the
intersection of what a target needs with what sources hold (`omnikv.core.plan`), and a route is made only if every
element of every target comes exactly once (`omnikv.core.coverage`), for any number of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnikv.core.boxes import EVERY_LAYER, Box, Boxes, HeadIds, Span, are_plain, checked_boxes, spell_stage
from omnikv.core.keys import Edge
from omnikv.core.partition import LayerRule, Parallel, split_heads
from omnikv.core.plan import Piece, SharedBox, StageIndex, plan_target, prove
from omnikv.errors import TopologyError

__all__ = ["HeadIds", "LayerRule", "Parallel", "Piece", "Route", "SharedBox", "split_heads"]

MAX_FACT_CHARS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Both ends of a handoff: the edge between two stages, and what every rank of each holds.

    A stage is given by its ranks' global KV-head ids, in the order of their tensors' head axis, when each rank holds
    every token of every layer; else by its ranks' boxes, from which the heads follow. `parallel` makes the boxes of the
    usual layouts. Both stages must state the same route; peers compare it when they meet.

    Raises:
        TopologyError: a stage without ranks, a rank without heads, a box that is none, or something that a target needs
            and that no source holds, or two at once do.
    """

    edge: Edge
    source_heads: tuple[HeadIds, ...] = ()
    target_heads: tuple[HeadIds, ...] = ()
    source_boxes: tuple[Boxes, ...] = ()
    target_boxes: tuple[Boxes, ...] = ()
    # Whether every rank holds all tokens of all layers, however many: then a payload has no more to say than its heads.
    is_plain: bool = field(init=False, repr=False, compare=False)
    # By target rank.
    _pieces: tuple[tuple[Piece, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.edge, Edge):
            raise TopologyError(f"a route needs an Edge between two stages, got {self.edge!r}")
        source = _checked_stage(self.source_heads, self.source_boxes, "source")
        target = _checked_stage(self.target_heads, self.target_boxes, "target")
        source, target = _with_layers_closed(source, target)
        object.__setattr__(self, "source_boxes", source)
        object.__setattr__(self, "target_boxes", target)
        object.__setattr__(self, "source_heads", tuple(map(_heads_of, source)))
        object.__setattr__(self, "target_heads", tuple(map(_heads_of, target)))
        object.__setattr__(self, "is_plain", are_plain([*source, *target]))
        object.__setattr__(self, "_pieces", _proven_pieces(source, target))

    @classmethod
    def tp(
        cls,
        from_stage: str,
        to_stage: str,
        *,
        num_kv_heads: int,
        from_tp: int,
        to_tp: int,
        namespace: str = "default",
        replica: int = 0,
    ) -> Route:
        """The route of two tensor-parallel stages that spread heads as `split_heads` does.

        Raises:
            TopologyError: a size is no positive integer.
        """
        return cls(
            edge=Edge(from_stage=from_stage, to_stage=to_stage, namespace=namespace, replica=replica),
            source_heads=split_heads(num_kv_heads, from_tp),
            target_heads=split_heads(num_kv_heads, to_tp),
        )

    @classmethod
    def parallel(
        cls,
        edge: Edge,
        *,
        num_kv_heads: int,
        source: Parallel,
        target: Parallel,
        num_layers: int | None = None,
        rules: Sequence[LayerRule] = (),
    ) -> Route:
        """The route of two stages that run one model under the parallel sizes `source` and `target`.

        A latent that is not cut along heads (MLA) has `num_kv_heads=1`. `num_layers` may stay open where neither stage
        has pipeline stages nor `rules`. Data-parallel copies of a stage are edges of their own (`Edge.replica`).

        Raises:
            TopologyError: sizes, layers and rules do not fit together, or the stages keep different tokens.
        """
        for side, sizes in (("source", source), ("target", target)):
            if not isinstance(sizes, Parallel):
                raise TopologyError(f"{side} must be the parallel sizes of that stage, got {sizes!r}")
        return cls(
            edge=edge,
            source_boxes=source.boxes(num_kv_heads, num_layers, rules),
            target_boxes=target.boxes(num_kv_heads, num_layers, rules),
        )

    @property
    def num_source_ranks(self) -> int:
        return len(self.source_boxes)

    @property
    def num_target_ranks(self) -> int:
        return len(self.target_boxes)

    def pieces(self) -> tuple[Piece, ...]:
        """Every piece of the handoff, ordered by target and then by source rank."""
        return tuple(piece for pieces in self._pieces for piece in pieces)

    def pieces_from(self, source_rank: int) -> tuple[Piece, ...]:
        """What `source_rank` sends, by target rank.

        Raises:
            TopologyError: there is no such rank in the sending stage.
        """
        _require_rank(source_rank, self.num_source_ranks, "source")
        return tuple(piece for piece in self.pieces() if piece.source_rank == source_rank)

    def pieces_to(self, target_rank: int) -> tuple[Piece, ...]:
        """What `target_rank` needs, by source rank.

        Raises:
            TopologyError: there is no such rank in the receiving stage.
        """
        _require_rank(target_rank, self.num_target_ranks, "target")
        return self._pieces[target_rank]

    def facts(self) -> dict[str, str]:
        """What both peers must state alike, as text by name; compared when they meet."""
        kind = "heads" if self.is_plain else "boxes"
        return {f"source_{kind}": _digest(self.source_boxes), f"target_{kind}": _digest(self.target_boxes)}


def _proven_pieces(source: tuple[Boxes, ...], target: tuple[Boxes, ...]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each target rank.

    Raises:
        TopologyError: some target would not get exactly what it needs, for some number of tokens.
    """
    sources, targets = StageIndex(source), StageIndex(target)
    pieces = tuple(plan_target(rank, sources, targets) for rank in range(len(target)))
    for rank, needed in enumerate(target):
        prove(rank, pieces[rank], sources, needed)
    return pieces


def _checked_stage(heads: Iterable[Any], boxes: Sequence[Any], side: str) -> tuple[Boxes, ...]:
    """The boxes of each rank of a stage that is given by heads, by boxes, or by both alike."""
    if not isinstance(boxes, Sequence):
        raise TopologyError(f"the {side} stage must be given as a list of boxes a rank, got {boxes!r}")
    if not boxes:
        boxes = [[Box(heads=ids)] for ids in _rank_lists(heads, side)]
        heads = ()
    if not boxes:
        raise TopologyError(f"the {side} stage has no ranks: give one list of KV-head ids a rank")
    checked = tuple(checked_boxes(rank_boxes, f"{side} rank {rank}") for rank, rank_boxes in enumerate(boxes))
    if heads and tuple(heads) != tuple(map(_heads_of, checked)):
        raise TopologyError(f"{side}_heads and {side}_boxes contradict each other: give only one of them")
    return checked


def _rank_lists(stage: Iterable[Any], side: str) -> list[HeadIds]:
    try:
        return [tuple(heads) for heads in stage]
    except TypeError as error:
        raise TopologyError(f"the {side} stage must be one list of KV-head ids a rank, got {stage!r}") from error


def _heads_of(boxes: Boxes) -> HeadIds:
    return tuple(dict.fromkeys(head for box in boxes for head in box.heads))


def _with_layers_closed(*stages: tuple[Boxes, ...]) -> list[tuple[Boxes, ...]]:
    """The stages, open layers ending where the others' last layer does, if any rank names layers at all."""
    stops = {box.layers.stop for stage in stages for boxes in stage for box in boxes} - {EVERY_LAYER.stop}
    if not stops:
        return list(stages)

    def closed(box: Box) -> Box:
        if box.layers.stop != EVERY_LAYER.stop:
            return box
        return Box(heads=box.heads, layers=Span(box.layers.start, max(stops)), tokens=box.tokens)

    return [tuple(tuple(map(closed, boxes)) for boxes in stage) for stage in stages]


def _require_rank(rank: int, size: int, side: str) -> None:
    if type(rank) is not int:
        raise TopologyError(f"a rank is an integer, got {rank!r} for the {side} stage")
    if not 0 <= rank < size:
        raise TopologyError(f"rank {rank} is outside the {side} stage, which has {size} ranks, 0 to {size - 1}")


def _digest(stage: tuple[Boxes, ...]) -> str:
    """The stage as text that no other stage has, in full where that is short: a greeting has its limits."""
    text = spell_stage(stage)
    if len(text) <= MAX_FACT_CHARS:
        return text
    return f"{len(stage)} ranks, digest {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
