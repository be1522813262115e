"""What one rank holds of a KV cache: boxes over layers, KV heads and tokens.

Layers are a half-open range, heads are global ids in the order of the rank's own head axis, tokens are a share
(`omnikv.core.tokens`). A rank's boxes never name a layer twice, so its layers, ascending, are the order in which it
lists its tensors. A layer here is an entry of the cache: where a model's layer keeps several tensors under different
rules, each is an entry of its own; where layers share one cache, they share one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from omnikv.core.tokens import (
    ALL_TOKENS,
    Chunks,
    Cyclic,
    LastTokens,
    State,
    Stripes,
    TokenShare,
    are_integers,
)
from omnikv.errors import TopologyError

HeadIds: TypeAlias = "tuple[int, ...]"

# Heads that a message lists before it shortens.
_HEADS_SHOWN = 8


class Span(NamedTuple):
    """The layers from `start` to before `stop`."""

    start: int
    stop: int

    def meet(self, other: Span) -> Span | None:
        """The layers of both, or None."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def contains(self, other: Span) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    @property
    def num_layers(self) -> int:
        return self.stop - self.start


# However many layers a request has.
EVERY_LAYER = Span(0, 1 << 62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a KV cache: some layers, of each some heads, of each some tokens.

    Heads are global ids in the order of a tensor's head axis. `layers` may stay open where every rank of both stages
    holds all of them, and `tokens` is a share of whatever a request has.
    """

    heads: HeadIds
    layers: Span = EVERY_LAYER
    tokens: TokenShare = ALL_TOKENS


# One rank's boxes, ascending by layer.
Boxes: TypeAlias = "tuple[Box, ...]"


class Region(NamedTuple):
    """A box of one request, its tokens counted."""

    layers: Span
    heads: HeadIds
    tokens: Stripes


def checked_boxes(boxes: object, who: str) -> Boxes:
    """The boxes of the rank `who`, ascending by layer.

    Raises:
        TopologyError: there is none, one is not a proper box, or two name the same layer.
    """
    if not isinstance(boxes, Sequence) or not all(isinstance(box, Box) for box in boxes):
        raise TopologyError(f"{who} must be given as a list of Box, got {boxes!r}")
    if not boxes:
        raise TopologyError(f"{who} holds nothing: give it at least one box")
    checked = sorted((_checked(box, who) for box in boxes), key=lambda box: box.layers)
    for one, other in pairwise(checked):
        if one.layers.meet(other.layers):
            raise TopologyError(
                f"{who} names layer {other.layers.start} in two boxes; put all of its heads and tokens into one"
            )
    return tuple(checked)


def _checked(box: Box, who: str) -> Box:
    heads = checked_head_ids(box.heads, who)
    layers = checked_layers(box.layers, f"{who} has a box")
    if not isinstance(box.tokens, Chunks | Cyclic | LastTokens | State):
        raise TopologyError(f"{who} has a box whose tokens are no share of omnikv.core.tokens: {box.tokens!r}")
    return Box(heads=heads, layers=layers, tokens=box.tokens)


def checked_layers(layers: object, whose: str) -> Span:
    """The layers as a span.

    Raises:
        TopologyError: they are no two integers, or no layer is among them.
    """
    ends = tuple(layers) if isinstance(layers, Sequence) else ()
    if len(ends) != 2 or not are_integers(*ends) or not 0 <= ends[0] < ends[1]:
        spelled = f"{ends[0]!r} to {ends[1]!r}" if len(ends) == 2 else repr(layers)
        raise TopologyError(f"{whose} of layers {spelled}: a range has a layer or more, from 0 on")
    return Span(*ends)


def checked_head_ids(heads: object, who: str) -> HeadIds:
    """The head ids of the rank `who`, as a tuple.

    Raises:
        TopologyError: there is none, or one is negative, no integer, or named twice.
    """
    if not isinstance(heads, Sequence):
        raise TopologyError(f"{who} must be given its KV heads as a list of global ids, got {heads!r}")
    ids = tuple(heads)
    if not ids:
        raise TopologyError(f"{who} holds no KV heads: state at least one global head id")
    if any(type(head) is not int or head < 0 for head in ids):
        raise TopologyError(f"{who} has head ids that are no integers of at least 0: {list(ids)}")
    if len(set(ids)) != len(ids):
        raise TopologyError(f"{who} names a head twice: {list(ids)}")
    return ids


def regions(boxes: Boxes, num_tokens: int) -> list[Region]:
    """The boxes in a request of `num_tokens`."""
    return [Region(box.layers, box.heads, box.tokens.stripes(num_tokens)) for box in boxes]


def num_layers(boxes: Boxes) -> int | None:
    """How many layers the boxes hold, or None where that depends on the request."""
    if any(box.layers.stop == EVERY_LAYER.stop for box in boxes):
        return None
    return sum(box.layers.num_layers for box in boxes)


def position_of(layer: int, boxes: Boxes) -> int:
    """Where `layer`, one of these boxes', stands in the rank's own order of layers."""
    before = 0
    for box in boxes:
        if layer < box.layers.stop:
            break
        before += box.layers.num_layers
    return before + layer - box.layers.start


def spell_region(layers: Span, heads: Sequence[int], tokens: tuple[int, int] | None) -> str:
    """The region in words: "head 3 of layers 0-7, tokens 512-1023"; what is everything is left out."""
    shown = ", ".join(map(str, heads[:_HEADS_SHOWN])) + ", ..." * (len(heads) > _HEADS_SHOWN)
    words = f"head{'s' * (len(heads) > 1)} {shown}"
    if layers.stop != EVERY_LAYER.stop:
        words += f" of layer{_range(layers.start, layers.stop)}"
    elif layers.start:
        words += f" of layers from {layers.start} on"
    return words if tokens is None else f"{words}, token{_range(*tokens)}"


def _range(start: int, stop: int) -> str:
    return f" {start}" if stop - start == 1 else f"s {start}-{stop - 1}"


def are_plain(ranks: Sequence[Boxes]) -> bool:
    """Whether each of the ranks holds all tokens of the same layers, from 0 on, so that only heads tell them apart."""
    layers = ranks[0][0].layers
    return not layers.start and all(boxes == (Box(heads=boxes[0].heads, layers=layers),) for boxes in ranks)


def spell_stage(stage: Sequence[Boxes]) -> str:
    """What the ranks hold, as text that no other stage has: head ids, and what else is not everything."""
    return " | ".join(" + ".join(map(_spell_box, boxes)) or "nothing" for boxes in stage)


def _spell_box(box: Box) -> str:
    text = ",".join(map(str, box.heads))
    if box.layers != EVERY_LAYER:
        text += f" in layer{_range(*box.layers)}"
    return text if box.tokens == ALL_TOKENS else f"{text} for {box.tokens}"
