"""Real ranks for tests: each a process forked from one that has imported everything, running a function of a test's.

A rank is a function `f(rank, **args)` named as "module:name" of this repository; it may take `channel` to talk with the
test. Its process group is set up before, over gloo, and what it returns is what the test gets.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnikv.cli.pipeline.run import PROGRAMS as PIPELINE_PROGRAMS
from omnikv.cli.ranks.nursery import Nursery
from omnikv.cli.ranks.processes import RANK_ENVIRONMENT, RankProcesses

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.gang_rank"


@dataclass(frozen=True)
class RankTask:
    """What one rank of a gang does."""

    rank: int
    size: int
    store: str
    function: str
    args: dict
    last_event: str = "done"
    program: str = PROGRAM

    @property
    def title(self):
        return f"rank {self.rank}"

    def to_message(self):
        return {
            "rank": self.rank,
            "size": self.size,
            "store": self.store,
            "function": self.function,
            "args": self.args,
        }


class Gang:
    """Some ranks that run one function; ended by pid when the test is over."""

    def __init__(self, processes, size, function, args, folder):
        self._processes = processes
        self.ranks = [
            processes.start(RankTask(rank, size, str(folder / "store"), function, args)) for rank in range(size)
        ]

    def wait_for(self, event, ranks=None):
        chosen = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        self._processes.wait_for(event, chosen)
        return [rank.events[event] for rank in chosen]

    def results(self, ranks=None):
        return [done["result"] for done in self.wait_for("done", ranks)]


class Gangs:
    """Makes gangs, out of one nursery."""

    def __init__(self, nursery):
        self._nursery = nursery

    @contextmanager
    def started(self, function, size, folder, *, within_s=60.0, **args):
        with RankProcesses(folder, deadline=time.monotonic() + within_s, nursery=self._nursery) as processes:
            yield Gang(processes, size, function, args, folder)

    def run(self, function, size, folder, **args):
        """What each rank returned, in rank order."""
        with self.started(function, size, folder, **args) as gang:
            return gang.results()


@contextmanager
def opened_nursery(folder):
    environment = {**RANK_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with Nursery([PROGRAM, *PIPELINE_PROGRAMS], environment, folder / "nursery.log") as nursery:
        yield nursery
