"""The order of events of a pipeline, from the first process to the last picture, with what is to go wrong in it.

Every replica of the receiving stage draws a picture of its own. Nothing is sent before all of its ranks wait for it and
the reference is drawn: only then do the times say something about the handoff. A replica that lost a rank is told to
leave, and its picture goes to the next replica.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omnikv.cli.pipeline.plan import FAULTY_ROLE, PipelineRequest, Stage, StageJob
from omnikv.cli.pipeline.result import PictureResult, PipelineResult, Rank, make_picture, make_result
from omnikv.cli.ranks.errors import RunFailed
from omnikv.cli.ranks.nursery import Nursery
from omnikv.cli.ranks.processes import RANK_ENVIRONMENT, RankProcesses

Say = Callable[[str], None]
# What a nursery imports: the ranks' programs, and what torch's tensor parallelism loads when it is first used.
PROGRAMS = (*(f"omnikv.cli.pipeline.{stage}_rank" for stage in ("ar", "dit", "reference")), "torch._dynamo")
# Far longer than anything here takes: only a fault that nobody notices ends it. A missing companion is such a one.
RECEIVE_TIMEOUT_S, MISSING_TIMEOUT_S = 30.0, 2.0
# Several rounds of a receive, each of which votes on what is missing.
LATE_S = 0.7


@contextmanager
def started_nursery(log_path: Path) -> Iterator[Nursery]:
    """A nursery for the ranks of pipelines."""
    # torch makes a directory for compiled code when it is imported, whether it compiles or not.
    environment = {**RANK_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": str(log_path.with_name("torch"))}
    with Nursery(PROGRAMS, environment, log_path) as nursery:
        yield nursery


def run_pipeline(
    request: PipelineRequest, say: Say, *, picture_path: Path | None = None, nursery: Nursery | None = None
) -> PipelineResult:
    """What happened; `say` is told each step in words. The first picture is written to `picture_path`.

    Raises:
        RunFailed: a rank died or the deadline passed. Its logs are kept, and every process is gone.
    """
    started_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="omnikv-pipeline-"))
    keeps_logs = False
    try:
        with ExitStack() as ends:
            if nursery is None:
                nursery = ends.enter_context(started_nursery(folder / "nursery.log"))
            processes = RankProcesses(folder, deadline=started_s + request.timeout_s, nursery=nursery)
            run = _Run(request, folder, ends.enter_context(processes), say)
            pictures = run.draw_all()
            result = make_result(request, pictures, run.understanding, total_s=time.monotonic() - started_s)
        if picture_path is not None:
            shutil.copyfile(folder / "picture-0.png", picture_path)
    except RunFailed:
        keeps_logs = True
        raise
    finally:
        if not keeps_logs:
            shutil.rmtree(folder, ignore_errors=True)
    return result


class _Run:
    """The processes of one run, and the orders that they are given."""

    def __init__(self, request: PipelineRequest, folder: Path, processes: RankProcesses, say: Say) -> None:
        self._request, self._processes, self._say = request, processes, say
        namespace = f"pipeline-{uuid.uuid4().hex[:16]}"
        timeout_s = MISSING_TIMEOUT_S if request.fault == "missing" else RECEIVE_TIMEOUT_S

        def start(stage: Stage, rank: int) -> Rank:
            return processes.start(
                StageJob(
                    stage=stage,
                    rank=rank,
                    request=request,
                    namespace=namespace,
                    folder=str(folder),
                    receive_timeout_s=timeout_s,
                )
            )

        say(f"Starting {request.ar_tp} + {request.num_receiving} processes ({request.mix}), and one for the reference")
        self.understanding = [start("ar", rank) for rank in range(request.ar_tp)]
        self._drawing = [start("dit", rank) for rank in range(request.num_receiving)]
        self._reference = start("reference", 0)
        self._lost_replicas: list[int] = []

    def draw_all(self) -> list[PictureResult]:
        """Every picture as every replica that was given it had it, in the order of events."""
        self._processes.wait_for("ready", [*self.understanding, *self._drawing])
        self._say("Every condition is understood; waiting for the reference")
        self._processes.wait_for("finished", [self._reference])
        pictures = range(self._request.replicas)
        # All replicas wait at once, and all are served at once, unless the last one is served late or by fewer.
        for number in pictures:
            self._receive(number, number)
        if self._request.fault in ("slow-replica", "kill-ar"):
            results = [self._served(number) for number in pictures]
        else:
            for number in pictures:
                self._send(number, number)
            results = [self._drawn(number, number) for number in pictures]
        if self._lost_replicas:
            results.append(self._taken_over())
        self._leave()
        return results

    def _served(self, number: int) -> PictureResult:
        self._send(number, number)
        return self._drawn(number, number)

    def _taken_over(self) -> PictureResult:
        lost = self._lost_replicas[0]
        other = next(replica for replica in range(self._request.replicas) if replica not in self._lost_replicas)
        self._say(f"Replica {other} takes over picture {lost} of replica {lost}")
        self._receive(lost, other)
        self._send(lost, other)
        return self._drawn(lost, other)

    def _receive(self, number: int, replica: int) -> None:
        for rank in self._ranks(replica):
            rank.order("receive", number=number)
        self._processes.wait_for(f"waiting {number}", self._ranks(replica))

    def _send(self, number: int, replica: int) -> None:
        request = self._request
        is_hit = number == request.replicas - 1 and replica == number
        if is_hit and request.fault == "kill-dit":
            victim = self._ranks(replica)[request.fault_rank]
            self._say(f"Killing {victim.job.title} (process {victim.pid}) while it waits")
            victim.kill()
            self._lost_replicas.append(replica)
        self._say(f"Handing over the caches of picture {number}")
        senders = []
        for rank in self.understanding:
            if is_hit and request.fault == "kill-ar" and rank.job.rank == request.fault_rank:
                self._say(f"Killing {rank.job.title} (process {rank.pid}) before it sends")
                rank.kill()
                continue
            faulty = is_hit and request.fault in ("late", "missing", "failed") and rank.job.rank == request.fault_rank
            fates = {FAULTY_ROLE: request.fault} if faulty else {}
            rank.order("send", number=number, replica=replica, fates=fates, late_s=LATE_S)
            senders.append(rank)
        self._processes.wait_for(f"sent {number}", senders)

    def _drawn(self, number: int, replica: int) -> PictureResult:
        ranks = self._ranks(replica)
        alive = [rank for rank in ranks if rank.killed_at_s is None]
        self._processes.wait_for(f"outcome {number}", alive)
        if len(alive) == len(ranks):
            self._say(f"Drawing picture {number}")
            for rank in ranks:
                rank.order("draw", number=number)
            self._processes.wait_for(f"finished {number}", ranks)
        else:
            # Its groups have lost a member, whatever the verdict was.
            self._tell_to_leave(alive)
        return make_picture(number, replica, ranks, self.understanding)

    def _leave(self) -> None:
        everyone = [*self.understanding, *self._drawing, self._reference]
        self._tell_to_leave([rank for rank in everyone if rank.killed_at_s is None and "left" not in rank.events])

    def _tell_to_leave(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.order("leave", lost_replicas=self._lost_replicas)
        self._processes.wait_for("left", ranks)

    def _ranks(self, replica: int) -> list[Rank]:
        size = self._request.replica_size
        return self._drawing[replica * size : (replica + 1) * size]
