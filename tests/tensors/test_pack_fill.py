"""Large payloads are written by two threads; a failure of either reaches the caller once both have stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from omnikv.config import MAX_PACK_THREADS
from omnikv.tensors.fill import PACKERS, PARALLEL_NBYTES, fill

WAIT_S = 30.0


class Source:
    """A source that runs `action` when it is written."""

    def __init__(self, action=lambda: None) -> None:
        self.shape = (PARALLEL_NBYTES,)
        self.dtype = torch.uint8
        self.threads: list[int] = []
        self._action = action

    def write_into(self, out: torch.Tensor) -> None:
        self.threads.append(threading.get_ident())
        self._action()
        out.fill_(1)


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def places(count: int) -> list[torch.Tensor]:
    return [torch.zeros(PARALLEL_NBYTES, dtype=torch.uint8) for _ in range(count)]


def run(sources: list[Source], outs: list[torch.Tensor]) -> None:
    fill(list(zip(sources, outs, strict=True)))


@pytest.mark.usefixtures("two_cpus")
def test_two_sources_are_written_at_the_same_time():
    together = threading.Barrier(2, timeout=WAIT_S)
    sources, outs = [Source(together.wait), Source(together.wait)], places(2)
    run(sources, outs)
    assert all(bool(out.all()) for out in outs)
    assert sources[0].threads != sources[1].threads


@pytest.mark.usefixtures("two_cpus")
def test_each_source_is_written_once():
    sources, outs = [Source() for _ in range(16)], places(16)
    run(sources, outs)
    assert [len(source.threads) for source in sources] == [1] * 16
    assert all(bool(out.all()) for out in outs)


def alone(sources: list[Source]) -> bool:
    return {thread for source in sources for thread in source.threads} == {threading.get_ident()}


def test_one_cpu_writes_alone(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    sources = [Source() for _ in range(4)]
    run(sources, places(4))
    assert alone(sources)


@pytest.mark.usefixtures("two_cpus")
def test_small_payloads_are_written_alone():
    sources = [Source() for _ in range(4)]
    run(sources, [torch.zeros(8, dtype=torch.uint8) for _ in range(4)])
    assert alone(sources)


@pytest.mark.usefixtures("two_cpus")
def test_a_caller_with_streams_writes_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    sources = [Source() for _ in range(4)]
    run(sources, places(4))
    assert alone(sources)


@pytest.mark.usefixtures("two_cpus")
def test_a_failure_in_either_thread_reaches_the_caller():
    together = threading.Barrier(2, timeout=WAIT_S)
    caller = threading.get_ident()
    for failing_in_caller in (True, False):

        def fail(failing_in_caller=failing_in_caller):
            together.wait()
            if (threading.get_ident() == caller) == failing_in_caller:
                raise LookupError("this source is gone")

        with pytest.raises(LookupError, match="gone"):
            run([Source(fail), Source(fail)], places(2))


@pytest.mark.usefixtures("two_cpus")
def test_after_a_failure_nothing_is_being_written_any_more():
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def act():
        if threading.get_ident() == caller:
            assert begun.wait(WAIT_S)
            may_end.set()
            raise LookupError("this source is gone")
        begun.set()
        assert may_end.wait(WAIT_S)
        ended.set()

    sources = [Source(act) for _ in range(8)]
    with pytest.raises(LookupError):
        run(sources, places(8))
    assert ended.is_set()
    # The helper finished what it had begun; the rest was never touched.
    assert sum(len(source.threads) for source in sources) == 2


@pytest.mark.usefixtures("two_cpus")
def test_a_busy_pool_does_not_hold_a_caller_up():
    release = threading.Event()
    busy = [PACKERS.submit(lambda: release.wait(WAIT_S)) for _ in range(MAX_PACK_THREADS)]
    sources = [Source() for _ in range(4)]
    try:
        run(sources, places(4))
        assert not release.is_set()
        assert alone(sources)
    finally:
        release.set()
        assert all(task.result(WAIT_S) for task in busy)


def packers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("omnikv-pack")]


def test_a_caller_says_how_many_threads_write(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    together = threading.Barrier(3, timeout=WAIT_S)
    sources = [Source(together.wait) for _ in range(3)]
    fill(list(zip(sources, places(3), strict=True)), 3)
    assert len({thread for source in sources for thread in source.threads}) == 3


@pytest.mark.usefixtures("two_cpus")
def test_one_thread_may_be_asked_for():
    sources = [Source() for _ in range(4)]
    fill(list(zip(sources, places(4), strict=True)), 1)
    assert alone(sources)


@pytest.mark.usefixtures("two_cpus")
def test_the_threads_are_named_and_end_when_they_are_closed():
    run([Source() for _ in range(4)], places(4))
    assert packers()
    PACKERS.close()
    PACKERS.close()
    assert not packers()
    run([Source() for _ in range(4)], places(4))
    assert packers()


FORKING = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
torch.set_num_threads(1)
os.sched_getaffinity = lambda pid: {0, 1}
from omnikv.tensors.fill import PARALLEL_NBYTES, fill
from omnikv.tensors.kv import DenseSource
def use():
    outs = [torch.zeros(PARALLEL_NBYTES, 1, dtype=torch.uint8) for _ in range(8)]
    fill([(DenseSource(torch.ones_like(out)), out) for out in outs])
    return all(bool(out.all()) for out in outs)
assert use()
child = os.fork()
if not child:
    os._exit(0 if use() else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""


def test_a_forked_child_packs_as_its_parent_did():
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
