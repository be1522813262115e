"""Writes docs/structure.md, one line a module, from what each module says of itself: python docs/structure.py."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
HEADING = """# Structure

One line a module, from its own first sentence (`python docs/structure.py` writes this page). Imports point one way:

    errors <- core <- tensors <- (transports | groups) <- handoff <- (integrations | cli | bench)

`config` stands beside core; `testing` may import everything and nothing imports it. To follow a payload, read
`handoff/api.py` from the top: each step is one call deeper, and no step calls back up.
"""
ORDER = (
    ".",
    "core",
    "tensors",
    "transports",
    "groups",
    "handoff",
    "integrations",
    "testing",
    "bench",
    "cli",
)


def describe() -> str:
    """The page's text, as the code is now."""
    source = ROOT / "src" / "omnikv"
    rooms: dict[str, list[str]] = {room: [] for room in ORDER}
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source)
        sentence = ast.get_docstring(ast.parse(path.read_text())) or ""
        room = module.parts[0] if len(module.parts) > 1 else "."
        rooms[room].append(f"- `{module}`: {' '.join(sentence.split(chr(10) * 2)[0].split())}")
    parts = [f"## {'omnikv' if room == '.' else room}\n\n" + "\n".join(lines) for room, lines in rooms.items()]
    return "\n\n".join([HEADING.rstrip(), *parts]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(describe())
