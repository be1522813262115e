"""Writes the table of docs/pipeline.md from runs of every mix of roles: python docs/pipeline.py."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from omnikv.cli.pipeline.command import DEFAULT_PROMPT
from omnikv.cli.pipeline.plan import PipelineRequest
from omnikv.cli.pipeline.result import PipelineResult, RankRow
from omnikv.cli.pipeline.run import run_pipeline, started_nursery
from omnikv.cli.ranks.nursery import Nursery

PAGE = Path(__file__).with_name("pipeline.md")
MIXES: tuple[dict[str, int | bool], ...] = (
    {"ar_tp": 2, "dit_tp": 2, "cfg": 1},
    {"ar_tp": 2, "dit_tp": 1, "cfg": 3},
    {"ar_tp": 2, "dit_tp": 2, "cfg": 3},
    {"ar_tp": 1, "dit_tp": 2, "cfg": 2},
    {"ar_tp": 2, "dit_tp": 1, "cfg": 1, "sp": 2},
    {"ar_tp": 2, "dit_tp": 2, "cfg": 2, "sp": 2},
    {"ar_tp": 2, "dit_tp": 1, "cfg": 2, "replicas": 2},
    {"ar_tp": 2, "dit_tp": 1, "cfg": 2, "shared_prefix": True},
)
COLUMNS = ("mix", "fetch", "agree", "hand on", "bytes fetched", "bytes handed on", "ms")


def run_mix(mix: dict[str, int | bool], nursery: Nursery) -> PipelineResult:
    """What a run of these sizes came to, with everything else as the command has it."""
    return run_pipeline(PipelineRequest(prompt=DEFAULT_PROMPT, **mix), lambda step: None, nursery=nursery)  # type: ignore[arg-type]


def row_of(result: PipelineResult) -> list[str]:
    """One mix as a row of the table: what each kind of rank did in the first picture of the run."""
    ranks = result.pictures[0].ranks
    readers = [row for row in ranks if row.reader]
    return [
        result.mix,
        _named(readers),
        f"{_named(readers)}, then {_named(ranks)}",
        _hand_on(ranks),
        f"{sum(row.fetched_nbytes for row in ranks):,}",
        f"{sum(row.given_nbytes for row in ranks):,}",
        f"{max(picture.handoff_ms for picture in result.pictures):.0f}",
    ]


def _hand_on(ranks: Sequence[RankRow]) -> str:
    cfg, sp = (max(row.place[name] for row in ranks) for name in ("cfg", "sp"))
    senders = [row for row in ranks if row.reader and cfg]
    sharers = [row for row in ranks if row.place["sp"] == 0 and sp]
    parts = [_said(senders, "send", f"{cfg} part{'s' * (cfg > 1)}"), _said(sharers, "broadcast", f"to {sp} more")]
    return "; ".join(filter(None, parts)) or "nobody"


def _said(rows: Sequence[RankRow], verb: str, what: str) -> str:
    if len(rows) > 1:
        return f"{_named(rows)} {verb} {what} each"
    return f"{_named(rows)} {verb}s {what}" if rows else ""


def _named(rows: Sequence[RankRow]) -> str:
    ranks = [row.rank for row in rows]
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def describe(page: str, rows: Iterable[list[str]]) -> str:
    """The page with its table made of `rows`."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * 4 + ["---:"] * 3, *rows)]
    return re.sub(
        r"(<!-- table: mixes -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join(lines) + "\n" + found[2],
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    """Run every mix and write the page."""
    with tempfile.TemporaryDirectory() as folder, started_nursery(Path(folder) / "nursery.log") as nursery:
        results = [run_mix(mix, nursery) for mix in MIXES]
    if not all(result.matches for result in results):
        sys.exit(f"does not match: {[result.mix for result in results if not result.matches]}")
    PAGE.write_text(describe(PAGE.read_text(), [row_of(result) for result in results]))


if __name__ == "__main__":
    main()
