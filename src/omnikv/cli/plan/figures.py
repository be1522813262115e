"""A plan in figures: what each source rank gives each target rank, in bytes, and the proof's verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnikv.core.boxes import Box, Boxes, Span, checked_boxes
from omnikv.core.partition import Parallel
from omnikv.core.plan import Piece, SharedBox, StageIndex, plan_target, prove, prove_at
from omnikv.core.tokens import count
from omnikv.core.wire_spans import ITEM_SIZES
from omnikv.errors import ConfigError, TopologyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One side of a plan: its parallel sizes, or the KV-head ids of each of its ranks."""

    parallel: Parallel = field(default_factory=Parallel)
    heads: tuple[tuple[int, ...], ...] | None = None

    def boxes(self, num_kv_heads: int, num_layers: int) -> tuple[Boxes, ...]:
        """What each rank holds.

        Raises:
            TopologyError: the sizes do not fit, or a rank's ids are none.
        """
        if self.heads is None:
            return self.parallel.boxes(num_kv_heads, num_layers)
        layers = Span(0, num_layers)
        ranks = ([Box(heads=ids, layers=layers)] for ids in self.heads)
        return tuple(checked_boxes(boxes, f"rank {rank}") for rank, boxes in enumerate(ranks))

    @property
    def title(self) -> str:
        """The layout in a few words: "TP 4 x PP 2"."""
        if self.heads is not None:
            return f"{len(self.heads)} rank{'s' * (len(self.heads) > 1)} by head ids"
        one = self.parallel
        sizes = [f"{name} {size}" for name, size in (("PP", one.pp), ("CP", one.cp), ("TP", one.tp)) if size > 1]
        block = f" in blocks of {one.cp_block}" if one.cp_block and one.cp > 1 else ""
        zigzag = " in zigzag" if one.cp_zigzag and one.cp > 1 else ""
        return (" x ".join(sizes) or "1 rank") + block + zigzag


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Two layouts of one model and the size of one request, checked.

    `tensors` is 2 where a layer has keys and values and 1 where it has one latent; `lost` are source ranks that are
    gone.

    Raises:
        ConfigError: a size is not positive, or a lost rank is none of the source's.
    """

    source: Stage
    target: Stage
    num_kv_heads: int
    num_layers: int
    num_tokens: int
    head_dim: int
    dtype: str
    tensors: int = 2
    lost: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "num_layers", "num_tokens", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.dtype not in ITEM_SIZES:
            raise ConfigError(f"the dtype {self.dtype!r} is none of {', '.join(ITEM_SIZES)}")

    @property
    def title(self) -> str:
        return f"{self.source.title} to {self.target.title}"

    @property
    def element_nbytes(self) -> int:
        """What one token of one head of one layer takes."""
        return self.tensors * self.head_dim * ITEM_SIZES[self.dtype]

    @property
    def cache_title(self) -> str:
        heads = (
            f"{self.num_kv_heads} KV heads of {self.head_dim}" if self.tensors == 2 else f"a latent of {self.head_dim}"
        )
        return f"{self.num_layers} layers, {heads}, {self.dtype}, {self.num_tokens:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one rank sends or receives: `nbytes` with `peers` others."""

    rank: int
    nbytes: int
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """A plan as far as it goes, and `flaw`, what it lacks in words, or None when it is proven."""

    request: PlanRequest
    source: tuple[Boxes, ...]
    target: tuple[Boxes, ...]
    pieces: tuple[Piece, ...]
    flaw: str | None

    def box_nbytes(self, box: SharedBox) -> int:
        tokens = count(box.tokens(self.request.num_tokens))
        return tokens * len(box.heads) * box.layers.num_layers * self.request.element_nbytes

    def piece_nbytes(self, piece: Piece) -> int:
        return sum(map(self.box_nbytes, piece.boxes))

    @property
    def nbytes(self) -> int:
        return sum(map(self.piece_nbytes, self.pieces))

    @property
    def source_loads(self) -> list[Load]:
        return [self._load(rank, (p for p in self.pieces if p.source_rank == rank)) for rank in range(len(self.source))]

    @property
    def target_loads(self) -> list[Load]:
        return [self._load(rank, (p for p in self.pieces if p.target_rank == rank)) for rank in range(len(self.target))]

    def _load(self, rank: int, pieces: Iterable[Piece]) -> Load:
        sizes = [self.piece_nbytes(piece) for piece in pieces]
        return Load(rank=rank, nbytes=sum(sizes), peers=len(sizes))

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "plan": self.request.title,
            "cache": self.request.cache_title,
            "proven": self.flaw is None,
            "flaw": self.flaw,
            "nbytes": self.nbytes,
            "pieces": [
                {
                    "source_rank": piece.source_rank,
                    "target_rank": piece.target_rank,
                    "nbytes": self.piece_nbytes(piece),
                    "boxes": [
                        {
                            "layers": list(box.layers),
                            "heads": list(box.heads),
                            "tokens": [list(stripe) for stripe in box.tokens(self.request.num_tokens)],
                        }
                        for box in piece.boxes
                    ],
                }
                for piece in self.pieces
            ],
        }


def busiest(loads: Sequence[Load]) -> Load:
    """The rank with the most bytes; of equal ones the first."""
    return max(loads, key=lambda load: (load.nbytes, -load.rank))


def make_plan(request: PlanRequest) -> PlanFigures:
    """The plan, and whether it is proven.

    Raises:
        TopologyError: a side's sizes do not fit together.
    """
    source = request.source.boxes(request.num_kv_heads, request.num_layers)
    target = request.target.boxes(request.num_kv_heads, request.num_layers)
    absent = [rank for rank in request.lost if not 0 <= rank < len(source)]
    if absent:
        raise TopologyError(f"lost rank {absent[0]} is none of the source's {len(source)} ranks")
    source = tuple(() if rank in request.lost else boxes for rank, boxes in enumerate(source))
    sources, targets = StageIndex(source), StageIndex(target)
    pieces: list[Piece] = []
    flaw: str | None = None
    for rank, needed in enumerate(target):
        found = plan_target(rank, sources, targets)
        pieces += found
        try:
            # The request's own tokens are named before those of any other.
            prove_at(rank, found, sources, needed, request.num_tokens)
            prove(rank, found, sources, needed)
        except TopologyError as error:
            flaw = flaw or str(error)
    return PlanFigures(request=request, source=source, target=target, pieces=tuple(pieces), flaw=flaw)
