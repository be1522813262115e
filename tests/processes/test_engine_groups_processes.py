"""The published receive between real processes over gloo: late shards, missing leaders, killed and stopped ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import ExitStack, suppress
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
# How far past the deadline of its vote a rank may come to its end, by its own clock: what a follower allows for a
# ruling that is under way, and as much again.
BOUND_S = 0.5


class Rank:
    """One rank's process, told what to do over its control socket."""

    def __init__(self, connection):
        connection.settimeout(100)
        self.connection = connection
        self.lines = connection.makefile("rw")
        born = self.hear("born")
        self.rank, self.pid = born["rank"], born["pid"]

    def hear(self, *states):
        """What the rank says next in one of these states; rounds that nobody asks for are passed over."""
        while True:
            line = self.lines.readline()
            assert line, "the rank ended: its stacks are on its error output"
            heard = json.loads(line)
            if heard["state"] in states:
                return heard
            assert heard["state"] == "round", heard

    def hear_round(self, words):
        """Nothing; returns when a round ended in which these words were true."""
        while words not in self.hear("round")["words"]:
            pass

    def receive(self, request_id, companions=None):
        self.lines.write(json.dumps({"request_id": request_id, "companions": companions or {}}) + "\n")
        self.lines.flush()

    def end(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.lines.close()
        self.connection.close()


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

    def ask(self, *request_ids, companions=None):
        """Every rank begins to receive; one id for all of them, or one a rank."""
        ids = request_ids if len(request_ids) > 1 else request_ids * len(self.ranks)
        for rank, request_id in zip(self.ranks, ids, strict=True):
            rank.receive(request_id, companions)

    def receive(self, *request_ids):
        """What every rank answers."""
        self.ask(*request_ids)
        return [rank.hear("done") for rank in self.ranks]


@pytest.fixture(scope="module")
def nursery():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen([sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, env=environment, text=True) as process:
        yield process
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def start(nursery, tmp_path):
    with ExitStack() as given_back:

        def start_ranks(roles):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(tmp_path / "control"))
                listener.listen(len(roles))
                listener.settimeout(60)
                for role in roles:
                    nursery.stdin.write(json.dumps({**role, "control": listener.getsockname()}) + "\n")
                nursery.stdin.flush()
                ranks = []
                for _ in roles:
                    ranks.append(Rank(listener.accept()[0]))
                    given_back.callback(ranks[-1].end)
            return sorted(ranks, key=lambda rank: rank.rank)

        def start_senders(connector, tp):
            for rank in range(tp):
                with patch(SENDER, return_value=rank):
                    settings = OmniKVCacheConfig(
                        connector, from_stage="0", to_stage="1", need_send_cache=True, from_tp=tp, to_tp=tp
                    )
                    sender = OmniKVTransferManager(settings)
                given_back.callback(sender.close)
                yield sender

        def start_stage(*, objects_only=False, hosts=None, tells_rounds=False, settings=None, **sizes):
            connector = {"type": "shm", "namespace": f"groups-{uuid.uuid4().hex[:12]}"}
            config = {"recv_timeout": RECV_TIMEOUT_S, "kv_vote_timeout": 20.0, **(settings or {})}
            shared = {
                "config": {**config, "connector_config": connector},
                "world": math.prod(sizes.values()),
                "sizes": sizes,
                "store": str(tmp_path / "store"),
                "objects_only": objects_only,
                "tells_rounds": tells_rounds,
            }
            hosts = hosts or [None] * shared["world"]
            ranks = start_ranks([{**shared, "rank": rank, "host": host} for rank, host in enumerate(hosts)])
            senders = list(start_senders(connector, sizes.get("tp", 1)))
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
    stage = start(tp=2, settings={"kv_vote_timeout": VOTE_TIMEOUT_S}, **way)
    stage.send("r1")
    assert outcomes(stage.receive("r1")) == [True, True]
    stage.send("r2")
    os.kill(stage.ranks[victim].pid, signal_number)
    survivor = stage.ranks[1 - victim]
    survivor.receive("r2")
    answer = survivor.hear("done")
    assert answer["outcome"] in (False, "VerdictInDoubt")
    # Without its leader a follower never takes its own deadline for a drop.
    assert victim == 1 or answer["outcome"] == "VerdictInDoubt"
    assert answer["late_s"] < BOUND_S


@pytest.mark.parametrize(
    ("way", "signal_number", "victim"),
    [
        (CHANNEL, signal.SIGKILL, 1),
        (CHANNEL, signal.SIGSTOP, 0),
        (CHANNEL, signal.SIGSTOP, 1),
        (PUBLISHED, signal.SIGKILL, 0),
    ],
)
def test_d01_a_rank_that_dies_before_the_first_vote_of_its_group_leaves_no_peer_waiting(
    start, way, signal_number, victim
):
    stage = start(tp=2, settings={"kv_vote_timeout": VOTE_TIMEOUT_S}, **way)
    stage.send("r1")
    os.kill(stage.ranks[victim].pid, signal_number)
    survivor = stage.ranks[1 - victim]
    survivor.receive("r1")
    answer = survivor.hear("done")
    # Nobody can tell what the other would have voted, unless rank 0 hears that it is gone.
    assert answer["outcome"] in ((False, "VerdictInDoubt") if victim == 1 else ("VerdictInDoubt",))
    assert answer["late_s"] < BOUND_S


def test_x14_a_leader_that_is_killed_leaves_none_of_the_others_waiting_or_with_kv(start):
    stage = start(tp=2, cfg=2, settings={"kv_vote_timeout": VOTE_TIMEOUT_S})
    stage.send("r1")
    assert outcomes(stage.receive("r1")) == [True] * 4
    stage.send("r2")
    os.kill(stage.ranks[1].pid, signal.SIGKILL)
    survivors = [stage.ranks[rank] for rank in (0, 2, 3)]
    for rank in survivors:
        rank.receive("r2")
    answers = [rank.hear("done") for rank in survivors]
    assert outcomes(answers) == [False, False, "VerdictInDoubt"]
    assert max(answer["late_s"] for answer in answers) < BOUND_S


# Rounds


PATIENT = {"recv_timeout": 60.0, "kv_round_timeout": 0.1}


@pytest.mark.parametrize("late", ["primary", "cfg_text"])
def test_d01_a_shard_that_is_late_on_one_rank_is_fetched_again_alone(start, late):
    stage, companions = start(tp=2, tells_rounds=True, settings=PATIENT), {"cfg_text": "c1"}
    for request_id, role in (("r1", "primary"), ("c1", "cfg_text")):
        stage.send(request_id, sources=[0] if role == late else [0, 1])
    stage.ask("r1", companions=companions)
    for rank in stage.ranks:
        rank.hear_round(f"rank 1 lacks {late}")
    stage.send("r1" if late == "primary" else "c1", sources=[1])
    answers = [rank.hear("done") for rank in stage.ranks]
    assert outcomes(answers) == [True, True]
    assert [answer["head"] for answer in answers] == [0.0, 1.0]
    assert [answer["roles"] for answer in answers] == [["cfg_text"]] * 2
    assert answers[0]["refetched"] == 0
    assert answers[1]["refetched"] >= 1
    # Every payload moved once, so nothing beyond the late shard did.
    assert [answer["moved"]["gets"] for answer in answers] == [2, 2]
    assert len({answer["moved"]["bytes_transferred"] for answer in answers}) == 1


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_d01_a_rank_that_dies_between_rounds_leaves_no_peer_waiting(start, signal_number, victim):
    settings = {**PATIENT, "recv_timeout": 3.0, "kv_vote_timeout": 0.5}
    stage = start(tp=2, tells_rounds=True, settings=settings)
    # The channel is formed by the first vote, which takes its time on a busy machine.
    stage.send("r0")
    assert outcomes(stage.receive("r0")) == [True, True]
    stage.send("r1", sources=[0])
    stage.ask("r1")
    survivor = stage.ranks[1 - victim]
    survivor.hear_round("rank 1 lacks primary")
    os.kill(stage.ranks[victim].pid, signal_number)
    answer = survivor.hear("done")
    assert answer["outcome"] == (False if victim == 1 else "VerdictInDoubt")
    assert answer["head"] is None
    assert answer["late_s"] < BOUND_S


# Several hosts


def own_address():
    """An address of this machine other than loopback, None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing.
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but loopback")
def test_ranks_of_several_hosts_vote_over_a_channel_at_the_address_that_is_set(start):
    settings = {"kv_channel_address": own_address(), "kv_agreement_over": "channel"}
    stage = start(tp=2, hosts=("one", "two"), settings=settings)
    stage.send("r1")
    answers = stage.receive("r1")
    assert outcomes(answers) == [True, True]
    # Nothing went over the group's object methods.
    assert [answer["tp_calls"] for answer in answers] == [0, 0]


def test_ranks_of_several_hosts_without_an_address_vote_over_the_engines_group_and_say_so(start):
    stage = start(tp=2, hosts=("one", "two"))
    stage.send("r1")
    answers = stage.receive("r1")
    assert outcomes(answers) == [True, True]
    assert all(answer["tp_calls"] > 0 for answer in answers)
    assert all("kv_channel_address" in answer["words"][0] for answer in answers)
