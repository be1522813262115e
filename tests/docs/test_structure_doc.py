"""docs/structure.md is what the modules say of themselves, and every module says something."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "structure.py"


def load_script():
    spec = importlib.util.spec_from_file_location("structure_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    script = load_script()
    assert script.PAGE.read_text() == script.describe(), "run: python docs/structure.py"


def test_every_module_says_what_it_is():
    assert re.findall(r"^- `([\w/]+\.py)`: $", load_script().describe(), re.MULTILINE) == []
