"""A run's outcome as a page of text that reads well at 100 columns, with or without a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omnikv.cli.pipeline.result import PictureResult, PipelineResult, RankRow

_ENDINGS = {
    "kept": "keep: every rank has the caches of its branch",
    "fallback": "drop: no rank uses any of it, each understood the condition of its branch by itself",
    "torn down": "a rank was lost: the others left their groups",
}


def print_result(console: Console, result: PipelineResult, picture_path: Path | None) -> None:
    """Nothing; the whole outcome is on `console`."""
    for picture in result.pictures:
        console.print()
        console.print(_table(picture, result.mix))
        console.print(Text(f"picture {picture.number}: {_ENDINGS[picture.ending]}"))
        for cause in dict.fromkeys(words for row in picture.ranks for words in row.causes):
            console.print(Text(f"  {cause}"))
    console.print()
    held = [row.byte_exact for picture in result.pictures for row in picture.ranks if row.byte_exact is not None]
    if held:
        exact = f"byte for byte on {sum(held)} of {len(held)} ranks that hold them"
        console.print(Text(f"caches    {exact}"))
    if picture_path is not None:
        console.print(Text(f"picture   {picture_path}"))
    if result.matches:
        words = f"matches the reference: max difference {result.max_difference:.1e}"
        console.print(Text(f"{words} (at most {result.tolerance:.0e}, {result.total_s:.0f} s)", style="green"))
    else:
        words = f"does not match the reference: max difference {result.max_difference:.1e}"
        console.print(Text(f"{words} (at most {result.tolerance:.0e})", style="bold red"))


def _table(picture: PictureResult, mix: str) -> Padding:
    title = f"{mix}: picture {picture.number} on replica {picture.replica}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rank", "cfg", "sp", "tp"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("part", no_wrap=True)
    for name in ("fetched", "taken", "given", "ms", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("difference", no_wrap=True)
    for row in picture.ranks:
        table.add_row(*_cells(row))
    return Padding(table, 0)


def _cells(row: RankRow) -> list[str]:
    place = [str(row.place[name]) for name in ("cfg", "sp", "tp")]
    traffic = [f"{nbytes:,}" for nbytes in (row.fetched_nbytes, row.taken_nbytes, row.given_nbytes)]
    difference = "-" if row.max_difference is None else f"{row.max_difference:.1e}"
    part = "reader" if row.reader else "follower"
    return [str(row.rank), *place, part, *traffic, f"{row.receive_ms:.1f}", str(row.rounds), row.verdict, difference]
