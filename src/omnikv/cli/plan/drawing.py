"""A plan as a picture: each rank a map of the whole cache with its own part filled in, and bands for what moves.

On the left every source rank has a colour; on the right each target's part is made of the colours of those that send
it, and what nobody sends is hatched in red. A band is as thick as its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from omnikv.cli.plan.figures import PlanFigures, busiest
from omnikv.cli.plan.table import in_units
from omnikv.core.boxes import HeadIds, Region, Span, regions
from omnikv.core.tokens import Cyclic, Stripes, TokenShare

_MARGIN = 28
_HEADER = 92
_FOOTER = 56
_CARD_WIDTH, _CARD_GAP = 280, 14
_CARD_HEIGHT, _SMALL_CARD_HEIGHT, _MANY_RANKS = 84, 44, 16
_MAP_WIDTH, _MAP_INSET = 150, 10
_BANDS_WIDTH = 330
_WIDTH = 2 * (_MARGIN + _CARD_WIDTH) + _BANDS_WIDTH
_PERIODS_DRAWN = 4
# Runs of tokens that are nearer than this are drawn as a tint: nobody tells them apart, and there may be millions.
_FINEST = 0.5

_COLOURS = (
    "#3b6fb6", "#e08a2e", "#3f9b6c", "#a34d7d", "#7d62b0", "#2f9fae", "#c76ba0", "#8b8f3a", "#8a6347", "#5d7fd6",
)  # fmt: skip
_STYLE = """
  text { font-family: Inter, "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2933; }
  .title { font-size: 20px; font-weight: 600; }
  .note { font-size: 13px; fill: #52606d; }
  .rank { font-size: 14px; font-weight: 600; }
  .small { font-size: 11.5px; fill: #52606d; }
"""
_GAP_PATTERN = """<defs><pattern id="gap" width="7" height="7" patternUnits="userSpaceOnUse"
  patternTransform="rotate(45)"><rect width="7" height="7" fill="#fbe3e3"/>
  <rect width="2.6" height="7" fill="#d33a3a"/></pattern></defs>"""


class _Card(NamedTuple):
    """Where one rank is drawn."""

    x: float
    y: float
    height: float


class _Maps(NamedTuple):
    """What the maps of the cache span: heads and their tokens along x, layers along y."""

    num_heads: int
    num_layers: int
    num_tokens: int


def as_svg(figures: PlanFigures) -> str:
    """The picture as an SVG document."""
    ranks = max(len(figures.source), len(figures.target))
    card = _CARD_HEIGHT if ranks <= _MANY_RANKS else _SMALL_CARD_HEIGHT
    height = _HEADER + ranks * (card + _CARD_GAP) - _CARD_GAP + _FOOTER
    sources = _column(len(figures.source), ranks, card, _MARGIN)
    targets = _column(len(figures.target), ranks, card, _WIDTH - _MARGIN - _CARD_WIDTH)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<style>{_STYLE}</style>",
        _GAP_PATTERN,
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#fbfcfd"/>',
        *_header(figures),
        *_bands(figures, sources, targets),
        *_stage_cards(figures, sources, targets),
        *_footer(figures, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _column(count: int, ranks: int, card: float, x: float) -> list[_Card]:
    """The cards of a stage, in the middle of the height that the larger stage takes."""
    top = _HEADER + (ranks - count) * (card + _CARD_GAP) / 2
    return [_Card(x, top + at * (card + _CARD_GAP), card) for at in range(count)]


def _header(figures: PlanFigures) -> Iterator[str]:
    proven = figures.flaw is None
    yield _text(_MARGIN, 38, figures.request.title, "title")
    yield _text(_MARGIN, 60, figures.request.cache_title, "note")
    yield f'<text x="{_WIDTH - _MARGIN}" y="72" text-anchor="end" class="small">{_axes(figures)}</text>'
    verdict = "proven: every element comes exactly once" if proven else "not proven: the red parts do not come"
    colour = "#2f855a" if proven else "#c53030"
    width = 7.1 * len(verdict) + 28
    x = _WIDTH - _MARGIN - width
    yield f'<rect x="{x:.1f}" y="22" width="{width:.1f}" height="28" rx="14" fill="{colour}"/>'
    style = 'text-anchor="middle" style="font-size:13px;fill:#fff"'
    yield f'<text x="{x + width / 2:.1f}" y="40.5" {style}>{verdict}</text>'


def _footer(figures: PlanFigures, height: float) -> Iterator[str]:
    y = height - 22
    words = f"{in_units(figures.nbytes)} in {len(figures.pieces)} payloads"
    if figures.pieces:
        source, target = busiest(figures.source_loads), busiest(figures.target_loads)
        words += f"; busiest: source rank {source.rank} ({in_units(source.nbytes)}), "
        words += f"target rank {target.rank} ({in_units(target.nbytes)})"
    yield _text(_MARGIN, y, words, "note")


def _axes(figures: PlanFigures) -> str:
    """What the maps show, in words."""
    if len(_shares(figures)) == 1:
        return "each map: KV heads to the right, layers downwards"
    words = "each map: KV heads and in them tokens to the right, layers downwards"
    tokens = _drawn_tokens(figures)
    return words if tokens == figures.request.num_tokens else f"{words}, as of {tokens:,} tokens"


def _shares(figures: PlanFigures) -> set[TokenShare]:
    return {box.tokens for boxes in (*figures.source, *figures.target) for box in boxes}


def _drawn_tokens(figures: PlanFigures) -> int:
    """How many tokens the maps show: of interleaved ones a few periods, since the eye cannot tell more apart."""
    periods = [share.period for share in _shares(figures) if isinstance(share, Cyclic)]
    return (
        min(figures.request.num_tokens, _PERIODS_DRAWN * math.lcm(*periods)) if periods else figures.request.num_tokens
    )


def _bands(figures: PlanFigures, sources: Sequence[_Card], targets: Sequence[_Card]) -> Iterator[str]:
    """One band a piece, each at its own place on either card's edge, in the order of the ranks on the other side."""
    room = sources[0].height - 2 * _MAP_INSET
    most = max((load.nbytes for load in (*figures.source_loads, *figures.target_loads)), default=0) or 1
    scale = room / most
    left, right = (
        [card.y + card.height / 2 - load.nbytes * scale / 2 for card, load in zip(cards, loads, strict=True)]
        for cards, loads in ((sources, figures.source_loads), (targets, figures.target_loads))
    )
    # Pieces come by target and then by source, so both edges are filled from the top without crossings.
    for piece in figures.pieces:
        thickness = max(figures.piece_nbytes(piece) * scale, 0.6)
        start, end = left[piece.source_rank], right[piece.target_rank]
        left[piece.source_rank] += thickness
        right[piece.target_rank] += thickness
        yield _band(sources[0].x + _CARD_WIDTH, start, targets[0].x, end, thickness, _colour(piece.source_rank))


def _band(x0: float, y0: float, x1: float, y1: float, thickness: float, colour: str) -> str:
    mid = (x0 + x1) / 2
    upper = f"M{x0} {y0:.1f} C{mid} {y0:.1f} {mid} {y1:.1f} {x1} {y1:.1f}"
    y0, y1 = y0 + thickness, y1 + thickness
    lower = f"L{x1} {y1:.1f} C{mid} {y1:.1f} {mid} {y0:.1f} {x0} {y0:.1f} Z"
    return f'<path d="{upper} {lower}" fill="{colour}" fill-opacity="0.5"/>'


def _stage_cards(figures: PlanFigures, sources: Sequence[_Card], targets: Sequence[_Card]) -> Iterator[str]:
    heads = [head for boxes in (*figures.source, *figures.target) for box in boxes for head in box.heads]
    maps = _Maps(max(heads, default=0) + 1, figures.request.num_layers, _drawn_tokens(figures))
    for rank, (card, load) in enumerate(zip(sources, figures.source_loads, strict=True)):
        own = [(region, _colour(rank)) for region in regions(figures.source[rank], maps.num_tokens)]
        yield from _card(card, f"source {rank}", "gone" if not own else f"sends {in_units(load.nbytes)}", own, maps)
    for rank, (card, load) in enumerate(zip(targets, figures.target_loads, strict=True)):
        # Under what comes, so that what does not is left to see.
        needed = [] if figures.flaw is None else regions(figures.target[rank], maps.num_tokens)
        gaps = [(region, "url(#gap)") for region in needed]
        got = [
            (Region(box.layers, box.heads, box.tokens(maps.num_tokens)), _colour(piece.source_rank))
            for piece in figures.pieces
            if piece.target_rank == rank
            for box in piece.boxes
        ]
        yield from _card(
            card,
            f"target {rank}",
            f"gets {in_units(load.nbytes)}",
            [*gaps, *got],
            maps,
        )


def _card(card: _Card, title: str, note: str, filled: Sequence[tuple[Region, str]], maps: _Maps) -> Iterator[str]:
    yield (
        f'<rect x="{card.x}" y="{card.y:.1f}" width="{_CARD_WIDTH}" height="{card.height}" rx="8" fill="#fff" '
        'stroke="#cbd2d9"/>'
    )
    middle = card.y + card.height / 2
    yield _text(card.x + 14, middle - 3, title, "rank")
    yield _text(card.x + 14, middle + 14, note, "small")
    x, y = card.x + _CARD_WIDTH - _MAP_WIDTH - _MAP_INSET, card.y + _MAP_INSET
    height = card.height - 2 * _MAP_INSET
    yield f'<rect x="{x}" y="{y:.1f}" width="{_MAP_WIDTH}" height="{height}" fill="#eef1f4"/>'
    for region, colour in filled:
        top, tall = _scaled(region.layers, maps.num_layers, height)
        for start, stop, share in _stretches(region, maps):
            wide = (stop - start) * _MAP_WIDTH
            tint = f' opacity="{share:.3f}"' if share < 1 else ""
            yield (
                f'<rect x="{x + start * _MAP_WIDTH:.2f}" y="{y + top:.2f}" width="{wide:.2f}" height="{tall:.2f}" '
                f'fill="{colour}"{tint}/>'
            )
    yield from _grid(x, y, height, maps)


def _grid(x: float, y: float, height: float, maps: _Maps) -> Iterator[str]:
    """Lines between heads, where there are few enough to tell apart."""
    if maps.num_heads <= 32:
        for head in range(1, maps.num_heads):
            at = x + head / maps.num_heads * _MAP_WIDTH
            yield f'<path d="M{at:.2f} {y:.1f} v{height}" stroke="#fff" stroke-width="1"/>'


def _scaled(layers: Span, num_layers: int, height: float) -> tuple[float, float]:
    return layers.start / num_layers * height, layers.num_layers / num_layers * height


def _stretches(region: Region, maps: _Maps) -> Iterator[tuple[float, float, float]]:
    """The region's stretches along x, as fractions of the map, and how much of each is the region's.

    Heads, and within each its runs of tokens.
    """
    runs = list(_runs(region.tokens, maps))
    if runs == [(0.0, 1.0, 1.0)]:
        for start, stop in _head_runs(region.heads):
            yield start / maps.num_heads, stop / maps.num_heads, 1.0
        return
    for head in region.heads:
        for low, high, share in runs:
            yield (head + low) / maps.num_heads, (head + high) / maps.num_heads, share


def _runs(tokens: Stripes, maps: _Maps) -> Iterator[tuple[float, float, float]]:
    """Runs of tokens as fractions of the request, and how much of each is held: all, but where a stripe is fine."""
    for stripe in tokens:
        if stripe.times > 1 and stripe.stride * _MAP_WIDTH < _FINEST * maps.num_tokens * maps.num_heads:
            yield stripe.start / maps.num_tokens, stripe.stop / maps.num_tokens, stripe.length / stripe.stride
            continue
        for start, stop in stripe.runs():
            yield start / maps.num_tokens, stop / maps.num_tokens, 1.0


def _head_runs(heads: HeadIds) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for head in sorted(heads):
        if runs and runs[-1][1] == head:
            runs[-1] = (runs[-1][0], head + 1)
        else:
            runs.append((head, head + 1))
    return runs


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'
