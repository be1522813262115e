"""Ranks forked from a nursery live, tell, and end as ranks started alone do."""

import signal
import time

import pytest

from omnikv.cli.ranks.errors import RunFailed
from omnikv.cli.ranks.nursery import Nursery
from omnikv.cli.ranks.processes import RankProcesses

HERE = "tests.cli.ranks.test_nursery"


def greet(rank):
    return f"rank {rank} was here"


def explode(rank):
    raise RuntimeError(f"rank {rank} ran out of memory")


def stay(rank, channel):
    channel.tell("here")
    channel.next_message()


def test_ranks_are_processes_of_their_own(gangs, tmp_path):
    with gangs.started(f"{HERE}:greet", 2, tmp_path) as gang:
        assert gang.results() == ["rank 0 was here", "rank 1 was here"]
        assert len({rank.pid for rank in gang.ranks}) == 2


def test_a_rank_that_dies_is_reported_with_the_end_of_its_log(gangs, tmp_path):
    with (
        pytest.raises(RunFailed, match=r"rank 0 ended early \(exit status 1\)") as failure,
        gangs.started(f"{HERE}:explode", 1, tmp_path) as gang,
    ):
        gang.results()
    assert "RuntimeError: rank 0 ran out of memory" in str(failure.value)


def test_a_killed_rank_says_so_by_its_status_and_leaving_ends_the_rest(gangs, tmp_path):
    with gangs.started(f"{HERE}:stay", 2, tmp_path) as gang:
        gang.wait_for("here")
        first, second = gang.ranks
        assert second.exit_status(0) is None
        first.kill()
        assert first.exit_status(30) == -signal.SIGKILL
        first.kill()
        assert first.exit_status(0) == -signal.SIGKILL
    assert second.exit_status(0) == -signal.SIGKILL


def test_a_nursery_that_cannot_import_says_why(tmp_path):
    with Nursery(["no_such_program"], {}, tmp_path / "log") as nursery:
        processes = RankProcesses(tmp_path, deadline=time.monotonic() + 30, nursery=nursery)
        with processes, pytest.raises(RunFailed, match="No module named 'no_such_program'"):
            processes.start(_Job())


def test_a_nursery_whose_orchestrator_is_gone_ends(tmp_path):
    nursery = Nursery([], {}, tmp_path / "log")
    with nursery:
        nursery._socket.close()
        assert nursery._process.wait(30) == 0


class _Job:
    title, program, last_event = "nobody", "no_such_program", "never"

    def to_message(self):
        return {}
