"""A plan as a page of text: who sends what to whom, the busiest ranks, and the proof's verdict."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omnikv.cli.plan.figures import Load, PlanFigures, busiest
from omnikv.core.plan import SharedBox
from omnikv.core.tokens import Stripe

_LABEL_WIDTH = 12
_RUNS_SHOWN = 2
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_plan(console: Console, figures: PlanFigures) -> None:
    """Nothing; the whole plan is on `console`."""
    console.print()
    console.print(Text(figures.request.title, style="bold"))
    console.print(Text(figures.request.cache_title))
    console.print()
    console.print(_table(figures))
    console.print()
    _print_field(console, "in all", f"{in_units(figures.nbytes)} in {len(figures.pieces)} payloads")
    if figures.pieces:
        senders, receivers = busiest(figures.source_loads), busiest(figures.target_loads)
        _print_field(console, "busiest", f"{_spell_load('source', senders)}; {_spell_load('target', receivers)}")
    if figures.flaw is None:
        ranks = len(figures.target)
        proof = f"every element of {f'all {ranks} target ranks' if ranks > 1 else 'the target rank'} comes exactly once"
        _print_field(console, "proof", proof, style="green")
    else:
        _print_field(console, "proof", f"does not hold: {figures.flaw}", style="bold red")


def _table(figures: PlanFigures) -> Padding:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("from", "to"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("layers", "heads", "tokens"):
        table.add_column(name)
    table.add_column("bytes", justify="right", no_wrap=True)
    for piece in figures.pieces:
        for box in piece.boxes:
            ranks = (str(piece.source_rank), str(piece.target_rank))
            table.add_row(*ranks, *spell_box(box, figures.request.num_tokens), in_units(figures.box_nbytes(box)))
    return Padding(table, 0)


def spell_box(box: SharedBox, num_tokens: int) -> tuple[str, str, str]:
    """The layers, the heads and the tokens of a box in words."""
    return _ranges(range(*box.layers)), _ranges(box.heads), _spell_tokens(box.tokens(num_tokens), num_tokens)


def _spell_tokens(stripes: tuple[Stripe, ...], num_tokens: int) -> str:
    if stripes == (Stripe.of(0, num_tokens),):
        return "all"
    runs = sum(stripe.times for stripe in stripes)
    first = [run for stripe in stripes for run, _ in zip(stripe.runs(), range(_RUNS_SHOWN), strict=False)]
    shown = ", ".join(_ranges(range(*run)) for run in sorted(first)[:_RUNS_SHOWN])
    more = runs - _RUNS_SHOWN
    return (shown or "none") + (f" and {more} runs more" if more > 0 else "")


def _ranges(numbers: range | tuple[int, ...]) -> str:
    """Numbers in their order, neighbours as ranges: "0-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _spell_load(side: str, load: Load) -> str:
    verb = "to" if side == "source" else "from"
    return f"{side} rank {load.rank} with {in_units(load.nbytes)} {verb} {load.peers} rank{'s' * (load.peers != 1)}"


def in_units(nbytes: int) -> str:
    """The size in the largest unit of which there is one: "1.5 MiB"."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size == int(size) else f"{size:.1f} {_UNITS[unit]}"


def _print_field(console: Console, label: str, text: str, *, style: str = "") -> None:
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL_WIDTH)
    grid.add_column(ratio=1)
    grid.add_row(Text(label, style="bold"), Text(text, style=style))
    console.print(grid)
