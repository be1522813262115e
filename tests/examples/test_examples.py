"""Every example runs as a program of its own and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "omni_pipeline/draw_together.py": (
        "rank 0: reader, keep primary, heads [0, 1]",
        "rank 3: follower, keep cfg_text, heads [2, 3]",
        "matches the reference: max difference ",
    ),
    "lockstep.py": (
        "rank 0: whole: keep cfg_text, primary",
        "rank 1: no companion: keep primary",
        "rank 0: given up: recompute, because rank 0 lacks",
        "rank 1: given up: recompute, because rank 1 lacks",
        "prefill ran out of memory",
    ),
    "two_processes_shm.py": ("received 40 tokens, 4 layers, metadata {'first_token': 17}", "nobody took: 0"),
    "tp_resize.py": ("TP 4 -> 2, rank 1: heads (4, 5, 6, 7), keep, bit-exact: True", "TP 2 -> 4, rank 3"),
    "custom_transport.py": ("passed: threads_share_an_end", "refused: signed: ", "a forged one was refused"),
}


def _run(name):
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize("name", sorted(SAID))
def test_the_example_runs_and_says_what_it_promises(name):
    done = _run(name)
    assert done.returncode == 0, done.stderr
    # Transports may warn there; nothing may go wrong quietly.
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    for promise in SAID[name]:
        assert promise in done.stdout


def test_no_example_is_left_untested():
    assert {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")} == set(SAID)
