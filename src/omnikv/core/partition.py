"""How engines cut a KV cache over the ranks of a stage: tensor, pipeline and context parallel sizes into boxes.

Ranks are numbered as engines number them: tensor-parallel ranks are neighbours, then context, then pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from omnikv.core.boxes import EVERY_LAYER, Box, Boxes, HeadIds, Span, checked_layers
from omnikv.core.tokens import ALL_TOKENS, Chunks, Cyclic, TokenShare, are_integers
from omnikv.errors import TopologyError


def split_heads(num_kv_heads: int, tp_size: int) -> tuple[HeadIds, ...]:
    """The head ids of each rank when `num_kv_heads` are spread over `tp_size` ranks as engines do.

    Consecutive heads, the first ranks take one more when they do not divide evenly; with more ranks than heads each
    head is replicated on neighbouring ranks, as evenly as can be.

    Raises:
        TopologyError: a count is no positive integer.
    """
    if type(num_kv_heads) is not int or type(tp_size) is not int or num_kv_heads <= 0 or tp_size <= 0:
        raise TopologyError(f"num_kv_heads and tp_size must be positive integers, got {num_kv_heads!r} and {tp_size!r}")
    if tp_size <= num_kv_heads:
        return tuple(tuple(range(*span)) for span in _split(num_kv_heads, tp_size))
    return tuple((rank * num_kv_heads // tp_size,) for rank in range(tp_size))


def split_layers(num_layers: int, pp_size: int) -> tuple[Span, ...]:
    """The layers of each pipeline stage: consecutive ones, the first stages take one more when they do not divide.

    Raises:
        TopologyError: a count is no positive integer, or there are more stages than layers.
    """
    if type(num_layers) is not int or type(pp_size) is not int or not 0 < pp_size <= num_layers:
        raise TopologyError(
            f"num_layers and pp_size must be positive integers and each stage needs a layer, got {num_layers!r} layers "
            f"on {pp_size!r} stages"
        )
    return tuple(Span(*span) for span in _split(num_layers, pp_size))


def _split(total: int, size: int) -> list[tuple[int, int]]:
    base, extra = divmod(total, size)
    starts = [rank * base + min(rank, extra) for rank in range(size + 1)]
    return list(pairwise(starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """Layers that are not cut as the others are: a latent, a state, a window, parts that every rank holds whole.

    `num_heads` counts the units along the second axis of their tensors, which tensor-parallel ranks share unless
    `split` is off. `tokens` is what every context-parallel rank keeps of them; None: its share, as of other layers.

    Raises:
        TopologyError: no layers, or no heads.
    """

    layers: Span
    num_heads: int
    split: bool = True
    tokens: TokenShare | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", checked_layers(self.layers, "a rule must be"))
        if not are_integers(self.num_heads) or self.num_heads < 1:
            raise TopologyError(f"num_heads must be a positive integer, got {self.num_heads!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The parallel sizes of one stage, which `boxes` turns into what each of its ranks holds.

    `pp_layers` are the numbers of layers of each pipeline stage where they are not as equal as can be. With `cp_block`,
    context parallelism deals blocks of so many tokens in turn; else each rank has one consecutive chunk, or with
    `cp_zigzag` two, one from either end.

    Raises:
        TopologyError: a size is no positive integer, or the options contradict each other.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    pp_layers: tuple[int, ...] | None = None
    cp_block: int | None = None
    cp_zigzag: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "cp_block"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "cp_block" and value is None):
                raise TopologyError(f"{name} must be a positive integer, got {value!r}")
        if self.cp_zigzag and self.cp_block is not None:
            raise TopologyError("cp_zigzag and cp_block are two ways to share tokens; choose one")
        if self.pp_layers is not None:
            counts = tuple(self.pp_layers) if isinstance(self.pp_layers, Sequence) else ()
            if len(counts) != self.pp or not are_integers(*counts) or min(counts) < 1:
                raise TopologyError(f"pp_layers must be {self.pp} positive counts, one a stage, got {self.pp_layers!r}")
            object.__setattr__(self, "pp_layers", counts)

    @property
    def num_ranks(self) -> int:
        return self.pp * self.cp * self.tp

    def boxes(
        self, num_kv_heads: int, num_layers: int | None = None, rules: Sequence[LayerRule] = ()
    ) -> tuple[Boxes, ...]:
        """What each rank holds of a cache with so many heads and layers, but for the layers that `rules` name.

        Raises:
            TopologyError: a count is not positive, `num_layers` is absent where it is needed or not the sum of
                `pp_layers`, or two rules name one layer.
        """
        if not are_integers(num_kv_heads) or num_kv_heads < 1:
            raise TopologyError(f"num_kv_heads must be a positive integer, got {num_kv_heads!r}")
        stages = self._layers(num_layers)
        runs = [(rule, _rank_heads(rule, self.tp)) for rule in _rule_runs(num_kv_heads, num_layers, rules)]
        return tuple(
            tuple(
                Box(heads=heads[tp], layers=layers, tokens=rule.tokens or self._share(cp))
                for rule, heads in runs
                if (layers := rule.layers.meet(stage)) is not None
            )
            for stage in stages
            for cp in range(self.cp)
            for tp in range(self.tp)
        )

    def _layers(self, num_layers: int | None) -> tuple[Span, ...]:
        if num_layers is None:
            if self.pp > 1:
                raise TopologyError(f"num_layers must be given to spread layers over {self.pp} pipeline stages")
            return (EVERY_LAYER,)
        if not are_integers(num_layers):
            raise TopologyError(f"num_layers must be a positive integer, got {num_layers!r}")
        if self.pp_layers is None:
            return split_layers(num_layers, self.pp)
        if sum(self.pp_layers) != num_layers:
            raise TopologyError(f"pp_layers {list(self.pp_layers)} add up to {sum(self.pp_layers)}, not {num_layers}")
        starts = [sum(self.pp_layers[:at]) for at in range(self.pp + 1)]
        return tuple(Span(*span) for span in pairwise(starts))

    def _share(self, rank: int) -> TokenShare:
        if self.cp == 1:
            return ALL_TOKENS
        if self.cp_block is not None:
            return Cyclic(self.cp_block, self.cp, rank)
        if self.cp_zigzag:
            return Chunks(2 * self.cp, (rank, 2 * self.cp - 1 - rank))
        return Chunks(self.cp, (rank,))


def _rank_heads(rule: LayerRule, tp_size: int) -> tuple[HeadIds, ...]:
    return split_heads(rule.num_heads, tp_size) if rule.split else (tuple(range(rule.num_heads)),) * tp_size


def _rule_runs(num_kv_heads: int, num_layers: int | None, rules: Sequence[LayerRule]) -> list[LayerRule]:
    """The rules and, between them, the plain layers as rules of their own, ascending."""
    total = EVERY_LAYER.stop if num_layers is None else num_layers
    if not isinstance(rules, Sequence) or not all(isinstance(rule, LayerRule) for rule in rules):
        raise TopologyError(f"rules must be a list of LayerRule, got {rules!r}")
    if rules and num_layers is None:
        raise TopologyError("num_layers must be given where some layers have rules of their own")
    runs: list[LayerRule] = []
    end = 0
    for rule in sorted(rules, key=lambda rule: rule.layers):
        if rule.layers.start < end or rule.layers.stop > total or rule.layers.start >= rule.layers.stop:
            raise TopologyError(
                f"a rule for layers {rule.layers.start}-{rule.layers.stop - 1} is outside the {total} layers, or "
                "another rule names one of them"
            )
        if end < rule.layers.start:
            runs.append(LayerRule(layers=Span(end, rule.layers.start), num_heads=num_kv_heads))
        runs.append(rule)
        end = rule.layers.stop
    if end < total:
        runs.append(LayerRule(layers=Span(end, total), num_heads=num_kv_heads))
    return runs
