"""Every kind of group gives all ranks the same ballots, and says in doubt when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.threads import ThreadGroup
from omnikv.groups.torch_dist import EngineGroup, TorchDistGroup


def far() -> float:
    return time.monotonic() + 30


def soon() -> float:
    return time.monotonic() + 0.2


def exchange_everywhere(groups, ballots, deadline):
    with ThreadPoolExecutor(len(groups)) as pool:
        jobs = [
            pool.submit(group.exchange, ballot, deadline=deadline)
            for group, ballot in zip(groups, ballots, strict=True)
        ]
        return [job.result() for job in jobs]


def test_every_thread_gets_every_ballot_in_rank_order_round_after_round():
    groups = ThreadGroup.create(4)
    for number in range(20):
        ballots = [f"{number}/{rank}".encode() for rank in range(4)]
        assert exchange_everywhere(groups, ballots, far()) == [ballots] * 4
    assert groups[0]._meeting.rounds == {}


def test_a_thread_whose_peer_never_votes_is_in_doubt_and_the_group_stays_broken():
    first, second, _absent = ThreadGroup.create(3)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(group.exchange, b"x", deadline=soon()) for group in (first, second)]
        for job in jobs:
            with pytest.raises(VerdictInDoubt, match="ranks \\[2\\]"):
                job.result()
    with pytest.raises(VerdictInDoubt, match="tear this group down"):
        first.exchange(b"y", deadline=far())


def test_a_complete_round_is_an_answer_even_past_the_deadline():
    first, second = ThreadGroup.create(2)
    waiting = threading.Thread(target=first.exchange, args=(b"a",), kwargs={"deadline": far()})
    waiting.start()
    while 0 not in second._meeting.rounds.get(0, {}):
        os.sched_yield()
    assert second.exchange(b"b", deadline=time.monotonic() - 1) == [b"a", b"b"]
    waiting.join()


def test_a_group_without_ranks_is_refused():
    with pytest.raises(ConfigError, match="at least one rank"):
        ThreadGroup.create(0)


class _Coordinator:
    """An engine's group coordinator between threads, with the published object methods."""

    def __init__(self, rank, mailboxes):
        self.rank_in_group, self.world_size, self._boxes = rank, len(mailboxes), mailboxes

    def send_object(self, obj, dst):
        self._boxes[dst].put((self.rank_in_group, obj))

    def recv_object(self, src):
        kept = []
        while True:
            sender, obj = self._boxes[self.rank_in_group].get(timeout=20)
            if sender == src:
                for entry in kept:
                    self._boxes[self.rank_in_group].put(entry)
                return obj
            kept.append((sender, obj))

    def broadcast_object(self, obj=None, src=0):
        if self.rank_in_group == src:
            for rank in range(self.world_size):
                if rank != src:
                    self.send_object(obj, rank)
            return obj
        return self.recv_object(src)


def engine_groups(size):
    import queue

    boxes = [queue.Queue() for _ in range(size)]
    return [EngineGroup(_Coordinator(rank, boxes)) for rank in range(size)]


def test_an_engines_group_exchanges_ballots_by_its_object_methods():
    ballots = [b"zero", b"one", b"two"]
    assert exchange_everywhere(engine_groups(3), ballots, far()) == [ballots] * 3


def test_an_engines_group_that_blocks_is_given_up_at_the_deadline():
    first, _absent = engine_groups(2)
    with pytest.raises(VerdictInDoubt, match="did not answer by the deadline"):
        first.exchange(b"x", deadline=soon())
    with pytest.raises(VerdictInDoubt, match="failed before"):
        first.exchange(b"y", deadline=far())


def test_an_engines_group_may_be_waited_for_without_end():
    assert exchange_everywhere(engine_groups(2), [b"a", b"b"], float("inf")) == [[b"a", b"b"]] * 2


def test_an_engines_error_in_the_exchange_is_in_doubt_with_its_cause():
    class Torn(_Coordinator):
        def recv_object(self, src):
            raise OSError("connection reset")

    with pytest.raises(VerdictInDoubt, match="connection reset"):
        EngineGroup(Torn(0, [None, None])).exchange(b"x", deadline=far())


def test_an_object_without_the_published_methods_is_no_group():
    with pytest.raises(ConfigError, match="lacks rank_in_group, world_size"):
        EngineGroup(object())


def test_torch_distributed_must_be_initialised_first():
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchDistGroup()


RANK_PROGRAM = textwrap.dedent(
    """
    import sys, time
    import torch, torch.distributed as dist
    from omnikv.errors import VerdictInDoubt
    from omnikv.groups.torch_dist import TorchDistGroup

    torch.set_num_threads(1)
    rank, size, store, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = TorchDistGroup()
    for number in range(5):
        ballots = [f"{number} from {r}".encode() * (1 + 400 * (number == 3)) for r in range(size)]
        assert group.exchange(ballots[rank], deadline=time.monotonic() + 60) == ballots
    if mode == "interrupted":
        def interrupt(*arguments):
            raise KeyboardInterrupt
        whole, group._all_gather = group._all_gather, interrupt
        try:
            group.exchange(b"cut short", deadline=time.monotonic() + 60)
        except KeyboardInterrupt:
            group._all_gather = whole
        try:
            group.exchange(b"again", deadline=time.monotonic() + 60)
        except VerdictInDoubt as error:
            assert "interrupted" in str(error), error
            print("in doubt")
    if mode == "missing":
        if rank == size - 1:
            sys.stdin.read()
        else:
            started = time.monotonic()
            try:
                group.exchange(b"alone", deadline=time.monotonic() + 1.0)
            except VerdictInDoubt as error:
                assert time.monotonic() - started < 20, "the deadline did not hold"
                print("in doubt", flush=True)
                try:
                    group.exchange(b"again", deadline=time.monotonic() + 60)
                except VerdictInDoubt:
                    print("still in doubt", flush=True)
    print("done", flush=True)
    import os
    os._exit(0)
    """
)


def run_ranks(tmp_path, size, mode):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(size), str(tmp_path / "store"), mode],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [process.communicate(timeout=90) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def test_real_gloo_ranks_exchange_short_and_long_ballots(tmp_path):
    for out, err in run_ranks(tmp_path, 3, "all"):
        assert out == "done\n", err


def test_a_gloo_rank_that_was_interrupted_in_an_exchange_does_not_use_its_group_again(tmp_path):
    ((out, err),) = run_ranks(tmp_path, 1, "interrupted")
    assert out.splitlines() == ["in doubt", "done"], err


def test_real_gloo_ranks_are_in_doubt_when_one_never_votes(tmp_path):
    outputs = run_ranks(tmp_path, 3, "missing")
    for out, err in outputs[:2]:
        assert out.splitlines() == ["in doubt", "still in doubt", "done"], err


def test_an_exchange_that_is_interrupted_leaves_an_engines_group_unusable(monkeypatch):
    coordinator = SimpleNamespace(
        rank_in_group=0, world_size=1, send_object=None, recv_object=None, broadcast_object=lambda obj, src: obj
    )
    group = EngineGroup(coordinator)
    assert group.exchange(b"x", deadline=far()) == [b"x"]

    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("omnikv.groups.torch_dist.run_until", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.exchange(b"x", deadline=far())
    monkeypatch.undo()
    with pytest.raises(VerdictInDoubt, match="interrupted"):
        group.exchange(b"x", deadline=far())
