"""Ranks are heard, and ended on every path."""

import os
import socket
import subprocess
import sys
import time

import pytest

from omnikv.cli.demo.plan import RankJob
from omnikv.cli.ranks.channel import ORPHANED_EXIT_STATUS, LineReader, encode_line
from omnikv.cli.ranks.errors import RunFailed
from omnikv.cli.ranks.processes import RankProcesses


def a_reference_job(model_dir):
    return RankJob(
        role="reference",
        rank=0,
        model_dir=str(model_dir),
        prompt="w3 w4",
        max_tokens=4,
        num_layers=2,
        num_kv_heads=3,
        head_dim=8,
        prefill_tp=1,
        decode_tp=1,
        namespace="unused",
        group_file="unused",
        receive_timeout_s=1.0,
        timeout_s=60.0,
    )


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_messages_come_out_whole_however_the_bytes_were_cut():
    messages = [{"event": "ready"}, {"event": "sent", "text": "a\nb"}]
    stream = b"".join(map(encode_line, messages))
    reader = LineReader()

    assert [message for at in range(len(stream)) for message in reader.feed(stream[at : at + 1])] == messages
    assert LineReader().feed(stream) == messages


def test_a_rank_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    missing = tmp_path / "no-model"
    with (
        pytest.raises(RunFailed, match=r"reference ended early \(exit status 1\)") as failure,
        RankProcesses(tmp_path, deadline=time.monotonic() + 60) as processes,
    ):
        processes.wait_for("finished", [processes.start(a_reference_job(missing))])

    assert str(missing) in str(failure.value)
    assert f"logs in {tmp_path}" in str(failure.value)


def test_a_rank_that_is_too_slow_is_named_and_ended(tmp_path):
    with RankProcesses(tmp_path, deadline=time.monotonic()) as processes:
        rank = processes.start(a_reference_job(tmp_path))
        with pytest.raises(RunFailed, match=r"time ran out \(--timeout-s\) waiting for reference to be 'finished'"):
            processes.wait_for("finished", [rank])

    assert not is_running(rank.pid)


def test_an_interruption_ends_every_rank(tmp_path):
    ranks = []

    def interrupted():
        with RankProcesses(tmp_path, deadline=time.monotonic() + 60) as processes:
            ranks.extend(processes.start(a_reference_job(tmp_path)) for _ in range(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert not any(is_running(rank.pid) for rank in ranks)


def test_a_rank_whose_orchestrator_is_gone_ends_itself():
    program = (
        "import sys, time; from omnikv.cli.ranks.channel import RankChannel; "
        "RankChannel(int(sys.argv[1])).tell('ready'); time.sleep(60)"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        assert LineReader().feed(ours.recv(1000)) == [{"event": "ready"}]

    assert process.wait(timeout=30) == ORPHANED_EXIT_STATUS
