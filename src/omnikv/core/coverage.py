"""The proof that a rank gets what it needs: every element of it exactly once, and nothing else.

One function judges a plan, before a byte moves, and a receive, from nothing but what really arrived: both are parts in
the face of a need. Layers are cut where some part begins or ends; within such a segment the heads that come in the
same parts are judged together; and the parts of one head must hold its tokens exactly once: each lies within the need,
no two meet, and together they are as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from omnikv.core.boxes import HeadIds, Region, Span, spell_region
from omnikv.core.stripes import first_gap, meet
from omnikv.core.tokens import Stripes, count


class Part(NamedTuple):
    """A region that comes from one source rank."""

    source_rank: int
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Where a need and its parts do not fit: layers, heads and a run of tokens (None: all that the rank needs)."""

    kind: Literal["not covered", "covered twice", "not needed"]
    layers: Span
    heads: HeadIds
    tokens: tuple[int, int] | None
    source_ranks: tuple[int, ...] = ()

    def spell(self) -> str:
        """The flaw in words."""
        where = spell_region(self.layers, self.heads, self.tokens)
        ranks = " and ".join(map(str, self.source_ranks))
        return {
            "not covered": f"no source holds {where}",
            "covered twice": f"source ranks {ranks} both give {where}",
            "not needed": f"source rank {ranks} gives {where}, which is not needed",
        }[self.kind]


def find_flaw(needed: Sequence[Region], parts: Sequence[Part]) -> Flaw | None:
    """Where the parts are not exactly what is needed, or None: then every element of it comes exactly once."""
    wanted = [(need.layers, frozenset(need.heads)) for need in needed]
    for part in parts:
        flaw = _flaw_outside(wanted, part)
        if flaw is not None:
            return flaw
    for need in needed:
        met = [part for part in parts if part.region.layers.meet(need.layers)]
        judged: dict[tuple[int, ...], _TokenFlaw | None] = {}
        for segment in segments(need.layers, (part.region.layers for part in met)):
            here = [at for at, part in enumerate(met) if part.region.layers.contains(segment)]
            for heads, holders in _heads_alike(need.heads, here, met):
                if holders not in judged:
                    judged[holders] = _token_flaw(need.tokens, [met[at] for at in holders])
                found = judged[holders]
                if found is not None:
                    kind, tokens, ranks = found
                    return Flaw(kind=kind, layers=segment, heads=heads, tokens=tokens, source_ranks=ranks)
    return None


def segments(layers: Span, others: Iterable[Span]) -> list[Span]:
    """`layers`, cut wherever one of `others` begins or ends."""
    cuts = sorted({layers.start, layers.stop, *(at for other in others for at in other)})
    inside = [at for at in cuts if layers.start <= at <= layers.stop]
    return [Span(start, stop) for start, stop in pairwise(inside)]


def _flaw_outside(wanted: Sequence[tuple[Span, frozenset[int]]], part: Part) -> Flaw | None:
    """What of the part lies in layers or heads that nobody asked for."""
    layers, heads, _ = part.region
    for segment in segments(layers, (span for span, _ in wanted)):
        known = next((ids for span, ids in wanted if span.contains(segment)), frozenset())
        surplus = tuple(head for head in heads if head not in known)
        if surplus:
            return Flaw(kind="not needed", layers=segment, heads=surplus, tokens=None, source_ranks=(part.source_rank,))
    return None


def _heads_alike(heads: HeadIds, here: Sequence[int], parts: Sequence[Part]) -> list[tuple[HeadIds, tuple[int, ...]]]:
    """The heads in groups that come in the same parts, with those parts' numbers."""
    holders: dict[int, list[int]] = {head: [] for head in heads}
    for at in here:
        for head in parts[at].region.heads:
            if head in holders:
                holders[head].append(at)
    groups: dict[tuple[int, ...], list[int]] = {}
    for head in heads:
        groups.setdefault(tuple(holders[head]), []).append(head)
    return [(tuple(members), parts_of) for parts_of, members in groups.items()]


_TokenFlaw = tuple[Literal["not covered", "covered twice", "not needed"], "tuple[int, int] | None", tuple[int, ...]]


def _token_flaw(needed: Stripes, parts: Sequence[Part]) -> _TokenFlaw | None:
    held = [part.region.tokens for part in parts]
    for at, part in enumerate(parts):
        surplus = None if meet(part.region.tokens, needed) == held[at] else first_gap(held[at], [needed])
        if surplus is not None:
            return "not needed", surplus, (part.source_rank,)
        for before in range(at):
            twice = meet(held[before], held[at])
            if twice:
                return "covered twice", next(twice[0].runs()), (parts[before].source_rank, part.source_rank)
    if sum(map(count, held)) == count(needed):
        return None
    # With no part at all, naming the tokens would hide that the head itself is absent.
    return "not covered", first_gap(needed, held) if parts else None, ()
