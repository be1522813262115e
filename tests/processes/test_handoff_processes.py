"""Handoffs between real processes over shared memory: what arrives, and what every rank does when one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("rank_program.py")
pytestmark = pytest.mark.timeout(240)


class Rank:
    """One rank's process; ended by pid when the test is over."""

    def __init__(self, **role):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(role)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self, state):
        line = self.process.stdout.readline()
        assert line, f"the rank ended: {self.process.stderr.read()}"
        heard = json.loads(line)
        assert heard["state"] == state, heard
        return heard

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@pytest.fixture
def start(tmp_path):
    ranks = []

    def start_stages(from_tp, to_tp, *, timeout_s=120.0):
        shared = {"from": from_tp, "to": to_tp, "namespace": f"proc-{uuid.uuid4()}", "timeout_s": timeout_s}
        store = str(tmp_path / "store") if to_tp > 1 else None
        targets = [Rank(side="target", rank=rank, store=store, **shared) for rank in range(to_tp)]
        sources = [Rank(side="source", rank=rank, store=None, **shared) for rank in range(from_tp)]
        ranks.extend([*sources, *targets])
        for rank in ranks:
            rank.hear("ready")
        return sources, targets

    yield start_stages
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


@pytest.mark.parametrize(("from_tp", "to_tp"), [(3, 1), (1, 3)])
def test_every_rank_gets_its_heads_bit_for_bit(start, from_tp, to_tp):
    sources, targets = start(from_tp, to_tp)
    for source in sources:
        source.go()
    for target in targets:
        done = target.hear("done")
        assert (done["verdict"], done["same"], done["metadata"]) == ("keep", True, {"first_token": 7})
    for source in sources:
        assert source.hear("sent")["left"] == 0


def test_a_killed_sender_is_noticed_at_once_and_every_receiver_drops(start):
    (first, second), targets = start(2, 2, timeout_s=200.0)
    first.go()
    os.kill(second.process.pid, signal.SIGKILL)
    done = [target.hear("done") for target in targets]
    assert [entry["verdict"] for entry in done] == ["drop", "drop"]
    assert done[0]["causes"] == done[1]["causes"]
    assert done[0]["causes"].startswith("rank 1 lacks primary: ProducerFailed")
    # Far from the deadline: the closed connection said it, not the clock.
    assert max(entry["waited_s"] for entry in done) < 100
