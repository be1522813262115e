"""Who sends which KV heads to whom, from explicit global head ids; the plan is proven before a byte moves.

Each rank of both stages states the global KV-head ids that it holds, in the order in which it holds them. Nothing is
derived from a count or a divisibility rule, so 3 heads on 2 ranks (2 + 1) and replicated heads need no special case: a
target reads each head it needs from exactly one source rank that holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from omnikv.core.keys import Edge
from omnikv.errors import TopologyError

HeadIds = tuple[int, ...]

MAX_FACT_CHARS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one source rank sends to one target rank: global head ids, and where they sit in either rank's own order."""

    source_rank: int
    target_rank: int
    heads: HeadIds
    source_positions: HeadIds
    target_positions: HeadIds


def split_heads(num_kv_heads: int, tp_size: int) -> tuple[HeadIds, ...]:
    """The head ids of each rank when `num_kv_heads` are spread over `tp_size` ranks as engines do.

    Consecutive heads, the first ranks take one more when they do not divide evenly; with more ranks than heads each
    head is replicated on neighbouring ranks.

    Raises:
        TopologyError: a count is not positive, or more ranks than heads are no multiple of the heads.
    """
    if type(num_kv_heads) is not int or type(tp_size) is not int or num_kv_heads <= 0 or tp_size <= 0:
        raise TopologyError(f"num_kv_heads and tp_size must be positive integers, got {num_kv_heads!r} and {tp_size!r}")
    if tp_size <= num_kv_heads:
        base, extra = divmod(num_kv_heads, tp_size)
        starts = [rank * base + min(rank, extra) for rank in range(tp_size + 1)]
        return tuple(tuple(range(starts[rank], starts[rank + 1])) for rank in range(tp_size))
    if tp_size % num_kv_heads:
        raise TopologyError(
            f"{num_kv_heads} KV heads cannot be replicated evenly over {tp_size} ranks: tp_size must be divisible by "
            "num_kv_heads; state each rank's head ids instead"
        )
    copies = tp_size // num_kv_heads
    return tuple((rank // copies,) for rank in range(tp_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Both ends of a handoff: the edge between two stages, and the global KV-head ids that every rank of each holds.

    `source_heads[r]` and `target_heads[r]` are the ids of rank `r`, in the order of its tensors' head axis. Both stages
    must state the same route; peers compare it when they meet.

    Raises:
        TopologyError: a stage without ranks, a rank without heads, a negative or repeated id, or a head that a target
            needs and no source holds.
    """

    edge: Edge
    source_heads: tuple[HeadIds, ...]
    target_heads: tuple[HeadIds, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.edge, Edge):
            raise TopologyError(f"a route needs an Edge between two stages, got {self.edge!r}")
        object.__setattr__(self, "source_heads", _checked_heads(self.source_heads, "source"))
        object.__setattr__(self, "target_heads", _checked_heads(self.target_heads, "target"))
        plan_heads(self.source_heads, self.target_heads)

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
        """The route of two tensor-parallel stages that spread heads as `split_heads` does."""
        return cls(
            edge=Edge(from_stage=from_stage, to_stage=to_stage, namespace=namespace, replica=replica),
            source_heads=split_heads(num_kv_heads, from_tp),
            target_heads=split_heads(num_kv_heads, to_tp),
        )

    @property
    def num_source_ranks(self) -> int:
        return len(self.source_heads)

    @property
    def num_target_ranks(self) -> int:
        return len(self.target_heads)

    def pieces(self) -> tuple[Piece, ...]:
        """Every piece of the handoff, ordered by target and then by source rank."""
        return plan_heads(self.source_heads, self.target_heads)

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
        return tuple(piece for piece in self.pieces() if piece.target_rank == target_rank)

    def facts(self) -> dict[str, str]:
        """What both peers must state alike, as text by name; compared when they meet."""
        return {"source_heads": _digest(self.source_heads), "target_heads": _digest(self.target_heads)}


def plan_heads(source_heads: Sequence[HeadIds], target_heads: Sequence[HeadIds]) -> tuple[Piece, ...]:
    """The pieces that give every target rank each of its heads exactly once.

    Of several sources that hold a head, a target takes the one it already reads from, then the one that serves the
    fewest heads so far, so that replicas share the load.

    Raises:
        TopologyError: no source holds a head that a target needs.
    """
    holders: dict[int, list[int]] = {}
    for rank, heads in enumerate(source_heads):
        for head in heads:
            holders.setdefault(head, []).append(rank)
    load = [0] * len(source_heads)
    pieces: list[Piece] = []
    for target_rank, needed in enumerate(target_heads):
        chosen: dict[int, list[int]] = {}
        for head in needed:
            if head not in holders:
                raise TopologyError(
                    f"no source holds head {head}, which target rank {target_rank} needs; sources hold "
                    f"{_spell(source_heads)}"
                )
            source = min(holders[head], key=lambda rank: (rank not in chosen, load[rank], rank))
            chosen.setdefault(source, []).append(head)
            load[source] += 1
        pieces += [
            _piece(source, target_rank, tuple(heads), source_heads[source], needed)
            for source, heads in sorted(chosen.items())
        ]
    return tuple(pieces)


def _piece(source_rank: int, target_rank: int, heads: HeadIds, source_order: HeadIds, target_order: HeadIds) -> Piece:
    return Piece(
        source_rank=source_rank,
        target_rank=target_rank,
        heads=heads,
        source_positions=tuple(source_order.index(head) for head in heads),
        target_positions=tuple(target_order.index(head) for head in heads),
    )


def _checked_heads(stage: Sequence[Sequence[int]], side: str) -> tuple[HeadIds, ...]:
    if not stage:
        raise TopologyError(f"the {side} stage has no ranks: give one list of KV-head ids a rank")
    try:
        ranks = tuple(tuple(heads) for heads in stage)
    except TypeError as error:
        raise TopologyError(f"the {side} stage must be one list of KV-head ids a rank, got {stage!r}") from error
    for rank, heads in enumerate(ranks):
        if not heads:
            raise TopologyError(f"{side} rank {rank} holds no KV heads: state at least one global head id")
        if any(type(head) is not int or head < 0 for head in heads):
            raise TopologyError(f"{side} rank {rank} has head ids that are no integers of at least 0: {list(heads)}")
        if len(set(heads)) != len(heads):
            raise TopologyError(f"{side} rank {rank} names a head twice: {list(heads)}")
    return ranks


def _require_rank(rank: int, size: int, side: str) -> None:
    if type(rank) is not int:
        raise TopologyError(f"a rank is an integer, got {rank!r} for the {side} stage")
    if not 0 <= rank < size:
        raise TopologyError(f"rank {rank} is outside the {side} stage, which has {size} ranks, 0 to {size - 1}")


def _digest(stage: Sequence[HeadIds]) -> str:
    """The stage's head ids as text that no other stage has, in full where that is short: a greeting has its limits."""
    text = _spell(stage)
    if len(text) <= MAX_FACT_CHARS:
        return text
    return f"{len(stage)} ranks, digest {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _spell(stage: Sequence[HeadIds]) -> str:
    return " | ".join(",".join(map(str, heads)) for heads in stage)
