"""The README's program runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_ten_lines_run(tmp_path):
    [program] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(program.strip().splitlines()) <= 12
    (tmp_path / "readme.py").write_text(program.replace('"prefill", "decode"', f'"prefill", "decode {tmp_path}"'))
    done = subprocess.run([sys.executable, tmp_path / "readme.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert target.startswith("http") or (README.parent / target).exists(), target
