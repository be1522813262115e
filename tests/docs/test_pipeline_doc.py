"""The table of docs/pipeline.md says what a run really does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "pipeline.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pipeline_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written_rows(script):
    lines = script.PAGE.read_text().split("<!-- table: mixes -->\n")[1].split("<!-- end -->")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_mix_has_its_row(script):
    columns, _, *rows = written_rows(script)
    assert tuple(columns) == script.COLUMNS
    assert len(rows) == len(script.MIXES)
    assert script.describe(script.PAGE.read_text(), rows) == script.PAGE.read_text()


@pytest.mark.parametrize("number", [1, 5])
def test_ranks_and_bytes_are_those_of_a_run(script, nursery, number):
    said = written_rows(script)[2 + number]
    found = script.row_of(script.run_mix(script.MIXES[number], nursery))
    # The last column is a time, and the machine's.
    assert found[:-1] == said[:-1], "run: python docs/pipeline.py"
