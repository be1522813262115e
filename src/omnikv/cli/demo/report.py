"""A demo's outcome as a page of text that reads well at 100 columns, with or without a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omnikv.cli.demo.result import DemoResult, RankRow

_LABEL_WIDTH = 12


def print_result(console: Console, result: DemoResult) -> None:
    """Nothing; the whole outcome is on `console`."""
    console.print()
    _print_field(console, "prompt", f"{result.prompt}")
    _print_field(console, "text", result.text)
    if not result.identical:
        _print_field(console, "reference", result.reference_text)
    console.print()
    console.print(_table(result))
    console.print()
    _print_field(console, "verdict", _verdict_text(result))
    _print_field(console, "handoff", _handoff_text(result))
    _print_field(console, "identical", _identity_text(result), style="green" if result.identical else "bold red")


def _print_field(console: Console, label: str, text: str, *, style: str = "") -> None:
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL_WIDTH)
    grid.add_column(ratio=1)
    # As text, never as markup: a prompt may hold brackets.
    grid.add_row(Text(label, style="bold"), Text(text, style=style))
    console.print(grid)


def _table(result: DemoResult) -> Padding:
    title = f"{result.model}: prefill on {result.prefill_tp}, decode on {result.decode_tp}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage")
    for name in ("rank", "heads", "bytes", "send ms", "wake-up ms", "receive ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state")
    for row in result.ranks:
        table.add_row(*_cells(row))
    return Padding(table, 0)


def _cells(row: RankRow) -> list[str]:
    figures = [_ms_text(row.send_ms), _ms_text(row.wake_up_ms), _ms_text(row.receive_ms)]
    return [row.role, str(row.rank), ",".join(map(str, row.heads)), f"{row.nbytes:,}", *figures, row.state]


def _ms_text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


def _verdict_text(result: DemoResult) -> str:
    if result.verdict == "keep":
        return "keep: every decode rank holds its heads of the request"
    # Each cause names its rank already.
    causes = "\n".join(f"decode {cause}" for _, cause in sorted(result.causes.items(), key=lambda entry: int(entry[0])))
    return f"drop: no decode rank uses any of it, each ran the prompt again\n{causes}"


def _handoff_text(result: DemoResult) -> str:
    sent = f"{result.num_prompt_tokens} tokens, {result.payload_bytes:,} bytes sent"
    if result.noticed_ms is not None:
        return f"{sent}; all decode ranks knew {result.noticed_ms:.2f} ms after rank {result.killed_rank} was killed"
    return sent if result.handoff_ms is None else f"{sent}, {result.handoff_ms:.2f} ms from first send to last receive"


def _identity_text(result: DemoResult) -> str:
    if result.identical:
        return f"yes, {len(result.tokens)} tokens as in a single process ({result.total_s:.0f} s in all)"
    return f"no: {result.tokens} against {result.reference_tokens} in a single process"
