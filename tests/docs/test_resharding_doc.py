"""The examples of docs/resharding.md run, in order, and its picture is the one that its command draws."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from omnikv.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "resharding.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_example_runs():
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    found = list(BLOCK.finditer(text))
    for block in found:
        # Blank lines before it make a failure point at the page's own line.
        exec(compile("\n" * text.count("\n", 0, block.start(1)) + block[1], str(PAGE), "exec"), names)
    assert len(found) == 3


def test_the_picture_is_what_its_command_draws(tmp_path):
    [command] = re.findall(r"Drawn by `omnikv (.*?)`", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    *options, target = shlex.split(command)
    drawn = tmp_path / "drawn.svg"
    assert CliRunner().invoke(app, [*options, str(drawn)]).exit_code == 0
    assert drawn.read_text() == (DOCS.parent / target).read_text(), "run: omnikv " + command
