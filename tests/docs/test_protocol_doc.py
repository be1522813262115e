"""The tables of docs/protocol.md are what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "protocol.py"


def test_the_tables_are_up_to_date():
    spec = importlib.util.spec_from_file_location("protocol_page", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert page == script.describe(page), "run: python docs/protocol.py"
