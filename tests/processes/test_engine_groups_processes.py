"""The published receive between real processes over gloo: late shards, missing leaders, killed and stopped ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from omnikv.integrations.vllm_omni.manager import OmniKVCacheConfig, OmniKVTransferManager

PROGRAM = Path(__file__).with_name("engine_rank_program.py")
SENDER = "omnikv.integrations.vllm_omni.manager.get_local_tp_rank"
pytestmark = pytest.mark.timeout(120)
# What carries the vote: the channel of a real process group, or the published exchange over object methods.
CHANNEL, PUBLISHED = {"objects_only": False}, {"objects_only": True}
RECV_TIMEOUT_S, VOTE_TIMEOUT_S = 0.5, 2.0
# What a busy machine may add to a deadline, far below any wait for a peer.
SLACK_S = 2.0


class Rank:
    """One rank's process; ended by pid when the test is over."""

    def __init__(self, **role):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(role)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
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

    def receive(self, request_id):
        self.process.stdin.write(f"{request_id}\n")
        self.process.stdin.flush()


class Stage:
    """A stage of real processes and, in this process, the senders that it receives from."""

    def __init__(self, ranks, senders):
        self.ranks, self._senders = ranks, senders

    def send(self, request_id, *, sources=None, tokens=(6, 6)):
        """Each source rank's cache holds its own number everywhere."""
        for rank, sender in enumerate(self._senders):
            if sources is None or rank in sources:
                cache = torch.full((2, 4, 4, 2, 8), float(rank))
                finished = {request_id: {"block_ids": [2, 0], "seq_len": tokens[rank]}}
                assert sender.handle_finished_requests_kv_transfer(finished, [cache], 4, "float32") == [request_id]
                assert sender.counters["send_failed"] == 0

    def receive(self, *request_ids):
        """What every rank answers; one id for all of them, or one a rank."""
        ids = request_ids if len(request_ids) > 1 else request_ids * len(self.ranks)
        for rank, request_id in zip(self.ranks, ids, strict=True):
            rank.receive(request_id)
        return [rank.hear("done") for rank in self.ranks]


@pytest.fixture
def start(tmp_path):
    with ExitStack() as given_back:

        def start_stage(*, objects_only=False, recv_timeout=RECV_TIMEOUT_S, kv_vote_timeout=20.0, **sizes):
            connector = {"type": "shm", "namespace": f"groups-{uuid.uuid4().hex[:12]}"}
            config = {"connector_config": connector, "recv_timeout": recv_timeout, "kv_vote_timeout": kv_vote_timeout}
            world, tp = math.prod(sizes.values()), sizes.get("tp", 1)
            shared = {"world": world, "sizes": sizes, "store": str(tmp_path / "store"), "objects_only": objects_only}
            ranks = [Rank(rank=rank, config=config, **shared) for rank in range(world)]
            for rank in ranks:
                given_back.callback(rank.process.communicate)
                given_back.callback(rank.process.kill)
            senders = []
            for rank in range(tp):
                with patch(SENDER, return_value=rank):
                    settings = OmniKVCacheConfig(
                        connector, from_stage="0", to_stage="1", need_send_cache=True, from_tp=tp, to_tp=tp
                    )
                    senders.append(OmniKVTransferManager(settings))
                given_back.callback(senders[-1].close)
            for rank in ranks:
                rank.hear("ready")
            return Stage(ranks, senders)

        yield start_stage


def outcomes(answers):
    return [answer["outcome"] for answer in answers]


@pytest.mark.parametrize("way", [CHANNEL, PUBLISHED])
def test_d01_one_rank_that_misses_its_shard_makes_both_drop_and_a_retry_works(start, way):
    stage = start(tp=2, **way)
    stage.send("r1", sources=[0])
    answers = stage.receive("r1")
    assert outcomes(answers) == [False, False]
    assert [answer["head"] for answer in answers] == [None, None]
    assert any("rank 1 lacks primary" in line for line in answers[0]["words"])
    # What rank 0 had was given back, so only the late shard is sent again.
    stage.send("r1", sources=[1])
    assert outcomes(stage.receive("r1")) == [True, True]
    stage.send("r2")
    answers = stage.receive("r2")
    assert outcomes(answers) == [True, True]
    assert [answer["head"] for answer in answers] == [0.0, 1.0]
    assert [answer["world_calls"] for answer in answers] == [0, 0]


@pytest.mark.parametrize("objects_only", [False, True])
def test_x14_a_leader_that_missed_leaves_four_ranks_without_and_the_next_request_works(start, objects_only):
    stage = start(tp=2, cfg=2, objects_only=objects_only)
    stage.send("r1", sources=[1])
    answers = stage.receive("r1")
    assert outcomes(answers) == [False] * 4
    assert [answer["head"] for answer in answers] == [None] * 4
    stage.send("r2")
    answers = stage.receive("r2")
    assert outcomes(answers) == [True] * 4
    assert [answer["head"] for answer in answers] == [0.0, 1.0, 0.0, 1.0]
    assert [answer["world_calls"] for answer in answers] == [0] * 4


def test_d03_a_replica_that_warms_up_is_not_touched(start):
    stage = start(tp=2, dp=2, objects_only=True)
    stage.send("r1")
    answers = stage.receive("r1", "r1", "dummy_req_id", "dummy_req_id")
    assert outcomes(answers) == [True, True, False, False]
    assert [answer["tp_calls"] for answer in answers[2:]] == [0, 0]
    assert [answer["world_calls"] for answer in answers] == [0] * 4


def test_x12_ranks_of_a_real_process_group_compare_contents_by_themselves(start):
    stage = start(tp=2)
    stage.send("r1", tokens=(6, 5))
    answers = stage.receive("r1")
    assert outcomes(answers) == [False, False]
    assert any("rank 1 lacks primary: differs: tokens 5 here, 6 on rank 0" in line for line in answers[1]["words"])


@pytest.mark.parametrize(
    ("way", "signal_number", "victim"),
    [
        (CHANNEL, signal.SIGKILL, 0),
        (CHANNEL, signal.SIGKILL, 1),
        (CHANNEL, signal.SIGSTOP, 0),
        (CHANNEL, signal.SIGSTOP, 1),
        (PUBLISHED, signal.SIGKILL, 1),
        (PUBLISHED, signal.SIGSTOP, 0),
    ],
)
def test_d01_a_rank_that_dies_before_its_vote_leaves_no_peer_waiting(start, way, signal_number, victim):
    stage = start(tp=2, kv_vote_timeout=VOTE_TIMEOUT_S, **way)
    stage.send("r1")
    assert outcomes(stage.receive("r1")) == [True, True]
    stage.send("r2")
    os.kill(stage.ranks[victim].process.pid, signal_number)
    survivor = stage.ranks[1 - victim]
    survivor.receive("r2")
    answer = survivor.hear("done")
    assert answer["outcome"] in (False, "VerdictInDoubt")
    # Without its leader a follower never takes its own deadline for a drop.
    assert victim == 1 or answer["outcome"] == "VerdictInDoubt"
    assert answer["waited_s"] < RECV_TIMEOUT_S + VOTE_TIMEOUT_S + SLACK_S


def test_x14_a_leader_that_is_killed_leaves_none_of_the_others_waiting_or_with_kv(start):
    stage = start(tp=2, cfg=2, kv_vote_timeout=VOTE_TIMEOUT_S)
    stage.send("r1")
    assert outcomes(stage.receive("r1")) == [True] * 4
    stage.send("r2")
    os.kill(stage.ranks[1].process.pid, signal.SIGKILL)
    survivors = [stage.ranks[rank] for rank in (0, 2, 3)]
    for rank in survivors:
        rank.receive("r2")
    answers = [rank.hear("done") for rank in survivors]
    assert outcomes(answers) == [False, False, "VerdictInDoubt"]
    assert max(answer["waited_s"] for answer in answers) < RECV_TIMEOUT_S + 2 * VOTE_TIMEOUT_S + SLACK_S
