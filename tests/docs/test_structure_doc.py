"""docs/structure.md has one line for every module, and no line for a module that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_has_its_line():
    stated = re.findall(r"^- `([\w/]+\.py)`: \S", (ROOT / "docs" / "structure.md").read_text(), re.MULTILINE)
    source = ROOT / "src" / "omnikv"
    modules = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if path.name != "__init__.py" or path.stat().st_size
    ]
    assert sorted(stated) == sorted(modules)
