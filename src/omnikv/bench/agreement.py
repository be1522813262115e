"""What agreeing costs: the channel beside the published exchange of objects and one all-reduce, over real processes.

Beside it stands also the least that a vote can cost here, `omnikv.bench.agreement_star`: what the channel takes beyond
that is its own, what it takes up to there is the sockets' and the machine's.

The times of all ranks count alike: a verdict is there when the last rank knows it. Rounds are cut into blocks; a block
gives a p50 of each subject and their ratios, and what is reported is the median of the blocks with the least and the
most, so that a moment in which the machine was busy shows as a range and not as a result.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from omnikv.bench.agreement_rank import BATCH, LATE_BY_S, RankTask, RankTimes
from omnikv.bench.measure import Spread
from omnikv.bench.report import Bar, machine, spell_bar
from omnikv.errors import TransportError

MAX_OBJECTS_SHARE = 1 / 6
MAX_ALL_REDUCE_SHARE = 1 / 3
MAX_BATCH_X = 1.5
MAX_DELAY_MS = 10.0
BLOCKS = 5
FLIGHTS = 7
_GIVE_UP_AFTER_S = 300.0
_SUBJECTS = {
    "objects": "objects over gloo",
    "all_reduce": "one gloo all-reduce",
    "bare": "bare star",
    "bare_batch": f"bare star, {BATCH} votes at once",
    "channel": "channel",
    "batch": f"channel, {BATCH} votes at once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One subject's time to the verdict, in microseconds: the p50 over blocks, and the p99 of all."""

    p50_us: Spread
    p99_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementResult:
    """What one number of ranks took. `_share` and `_x` are ratios of p50s within a block; `bare_` is the bare star's.

    `delay_ms` is how much later all other requests in flight were ruled because one rank cast one vote late; it is
    over the tries, on the rank where it was worst. `late_one_ms` is when that one was ruled.
    """

    ranks: int
    rounds: int
    latencies: dict[str, Latency]
    objects_share: Spread
    all_reduce_share: Spread
    batch_x: Spread
    bare_all_reduce_share: Spread
    bare_batch_x: Spread
    in_flight_ms: Spread
    delay_ms: Spread
    late_one_ms: Spread


def measure_agreement(ranks: int, rounds: int) -> AgreementResult:
    """What a verdict costs among `ranks` processes, over `rounds` rounds.

    Raises:
        TransportError: a rank failed; its own output says why.
    """
    with tempfile.TemporaryDirectory(prefix="omnikv-bench-") as folder, _rank_processes(ranks, rounds, folder) as files:
        times = [msgspec.json.decode(file.read_bytes(), type=RankTimes) for file in files]
    return summarise(ranks, rounds, times)


def summarise(ranks: int, rounds: int, times: Sequence[RankTimes]) -> AgreementResult:
    """The result that the ranks' times come to."""
    blocks = {name: [_block(times, name, at, rounds) for at in range(BLOCKS)] for name in _SUBJECTS}
    p50s = {name: [statistics.median(block) for block in of_subject] for name, of_subject in blocks.items()}
    even_ms = statistics.median(max(tried) for tried in zip(*(rank.even_ms for rank in times), strict=True))
    late_ms = [max(tried) for tried in zip(*(rank.late_ms for rank in times), strict=True)]
    return AgreementResult(
        ranks=ranks,
        rounds=rounds,
        latencies={
            name: Latency(
                p50_us=Spread.of(p50s[name]),
                p99_us=statistics.quantiles([us for block in blocks[name] for us in block], n=100)[98],
            )
            for name in _SUBJECTS
        },
        objects_share=_ratios(p50s["channel"], p50s["objects"]),
        all_reduce_share=_ratios(p50s["channel"], p50s["all_reduce"]),
        batch_x=_ratios(p50s["batch"], p50s["channel"]),
        bare_all_reduce_share=_ratios(p50s["bare"], p50s["all_reduce"]),
        bare_batch_x=_ratios(p50s["bare_batch"], p50s["bare"]),
        in_flight_ms=Spread.of(late_ms),
        delay_ms=Spread.of([max(ms - even_ms, 0.0) for ms in late_ms]),
        late_one_ms=Spread.of([max(tried) for tried in zip(*(rank.late_one_ms for rank in times), strict=True)]),
    )


def _block(times: Sequence[RankTimes], name: str, at: int, rounds: int) -> list[float]:
    start, end = rounds * at // BLOCKS, rounds * (at + 1) // BLOCKS
    return [us for rank in times for us in rank.rounds_us[name][start:end]]


def _ratios(values: Sequence[float], bases: Sequence[float]) -> Spread:
    return Spread.of([value / base for value, base in zip(values, bases, strict=True)])


@contextmanager
def _rank_processes(ranks: int, rounds: int, folder: str) -> Iterator[list[Path]]:
    """The files that the ranks wrote, after all ended well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    files = [Path(folder) / f"rank-{rank}.json" for rank in range(ranks)]
    processes = []
    try:
        for rank, file in enumerate(files):
            task = RankTask(
                rank=rank,
                size=ranks,
                store=str(Path(folder) / "store"),
                output=str(file),
                rounds=rounds,
                flights=FLIGHTS,
                give_up_after_s=_GIVE_UP_AFTER_S,
            )
            command = [sys.executable, "-m", "omnikv.bench.agreement_rank", msgspec.json.encode(task).decode()]
            processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        _await_all(processes)
        yield files
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _await_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Nothing; returns when all ended well.

    Raises:
        TransportError: one did not; the others, which would wait for it, are not waited for.
    """
    while True:
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            raise TransportError(f"ranks {failed} of the benchmark failed; their own error output says why")
        if all(status == 0 for status in statuses):
            return
        time.sleep(0.05)


def judge_agreement(results: Sequence[AgreementResult]) -> list[Bar]:
    """The bars that these results are held to, at every number of ranks."""
    return [bar for result in results for bar in _bars(result)]


def _bars(result: AgreementResult) -> list[Bar]:
    where = f"{result.ranks} ranks"
    return [
        Bar(
            name=f"{where}: channel p50",
            value=result.objects_share.median,
            limit=MAX_OBJECTS_SHARE,
            unit="of the exchange of objects",
        ),
        Bar(
            name=f"{where}: channel p50",
            value=result.all_reduce_share.median,
            limit=MAX_ALL_REDUCE_SHARE,
            unit="of one all-reduce",
        ),
        Bar(name=f"{where}: {BATCH} votes at once", value=result.batch_x.median, limit=MAX_BATCH_X, unit="x one vote"),
        Bar(
            name=f"{where}: {BATCH - 1} votes beside one that is {LATE_BY_S * 1e3:.0f} ms late",
            value=result.delay_ms.median,
            limit=MAX_DELAY_MS,
            unit="ms later",
        ),
    ]


def agreement_to_json(results: Sequence[AgreementResult], command: str) -> dict[str, Any]:
    """Everything that was measured, where, and by which command, as JSON values."""
    return {
        "command": command,
        "machine": machine(),
        "results": [asdict(result) for result in results],
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in judge_agreement(results)],
    }


def agreement_to_text(results: Sequence[AgreementResult], command: str) -> str:
    """The same as a table to read: microseconds to the verdict, medians with least and most over the blocks."""
    lines = [
        command,
        f"CPUs {os.cpu_count()}, load {os.getloadavg()[0]:.1f}, {results[0].rounds} rounds in {BLOCKS} blocks",
        "",
        f"{'p50, us (p99)':36}" + "".join(f"{f'{result.ranks} ranks':>30}" for result in results),
    ]
    for name, title in _SUBJECTS.items():
        lines.append(f"{title:36}" + "".join(f"{_spell(result.latencies[name]):>30}" for result in results))
    rows = {
        "channel, share of objects": [result.objects_share for result in results],
        "channel, share of all-reduce": [result.all_reduce_share for result in results],
        "bare star, share of all-reduce": [result.bare_all_reduce_share for result in results],
        f"channel, {BATCH} at once, x one": [result.batch_x for result in results],
        f"bare star, {BATCH} at once, x one": [result.bare_batch_x for result in results],
        f"{BATCH - 1} others in flight, ms": [result.in_flight_ms for result in results],
        "  delayed by, ms": [result.delay_ms for result in results],
        "  the late one, ms": [result.late_one_ms for result in results],
    }
    for title, spreads in rows.items():
        lines.append(f"{title:36}" + "".join(f"{_spell_spread(spread):>30}" for spread in spreads))
    return "\n".join([*lines, "", *(spell_bar(bar) for bar in judge_agreement(results))]) + "\n"


def _spell(latency: Latency) -> str:
    spread = latency.p50_us
    return f"{spread.median:.0f} ({spread.least:.0f}-{spread.most:.0f}) ({latency.p99_us:.0f})"


def _spell_spread(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.least:.3g}-{spread.most:.3g})"
