"""Any layout to any layout between real processes over shared memory: byte for byte, and the ranks agree on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("resharding_nursery.py")
SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def nursery():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *sys.path])
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()
        process.wait(timeout=60)


@pytest.mark.parametrize(
    ("heads", "source", "target"),
    [
        (3, {"tp": 3}, {"tp": 2}),
        (3, {"tp": 2}, {"tp": 3}),
        pytest.param(2, {"tp": 4}, {"tp": 2}, id="d19-x01-replicated"),
        (4, {"pp": 2, "tp": 2}, {"tp": 1}),
        (4, {"tp": 1}, {"pp": 2, "tp": 2}),
        (2, {"cp": 3}, {"tp": 2}),
        (1, {"cp": 2, "cp_block": 4}, {"cp": 3, "cp_zigzag": True}),
    ],
)
def test_every_target_process_gets_its_part_byte_for_byte(nursery, tmp_path, heads, source, target):
    job = {"heads": heads, "source": source, "target": target, "tokens": 37}
    job |= {"namespace": f"reshard-{uuid.uuid4()}", "store": str(tmp_path / "store")}
    nursery.stdin.write(json.dumps(job) + "\n")
    nursery.stdin.flush()
    line = nursery.stdout.readline()
    assert line, "the nursery ended"
    told = json.loads(line)
    targets = [rank for rank in told["ranks"] if rank["side"] == "target"]
    assert targets
    assert [(rank["verdict"], rank["causes"], rank["same"]) for rank in targets] == [("keep", [], True)] * len(targets)
    assert all(rank["left"] == 0 for rank in told["ranks"] if rank["side"] == "source")
    assert set(told["ended"]) == {0}
