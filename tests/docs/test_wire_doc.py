"""The examples of docs/wire.md run, in order, and its tables name what the code knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omnikv.core.wire_spans import ITEM_SIZES
from omnikv.errors import WireReason

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_example_runs(text):
    names: dict[str, object] = {}
    found = list(BLOCK.finditer(text))
    for block in found:
        line = text.count("\n", 0, block.start(1))
        # Blank lines before it make a failure point at the page's own line.
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    assert len(found) >= 8


def test_the_table_of_refusals_is_complete(text):
    refusals = text.split("| reason | the payload |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", refusals, re.MULTILINE) == [reason.value for reason in WireReason]


def test_the_dtypes_are_all_named(text):
    stated = text.split("`d` MUST be one of `")[1].split("`")[0]
    assert stated.split() == list(ITEM_SIZES)
