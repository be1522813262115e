"""What the benchmark says: bars that the measured values must keep, a table to read, and JSON to keep."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from omnikv.bench.measure import Spread
from omnikv.bench.same_host import SizeResult
from omnikv.bench.small import WAITING, Lateness, SmallResult

# The sizes that the bars are set for; what is fixed about a handoff outweighs the bytes of smaller ones.
BAR_SIZES_MIB = (64, 256, 1024)
MAX_X_GATHER = 1.15
MAX_X_MEMCPY = 1.5
MAX_X_MEMCPY_ONE_THREAD = 2.5
MAX_SENDER_MEMORY_X = 1.1
MAX_RECEIVER_MEMORY_X = 0.05
MAX_HANDOFF_US = 1000.0
MAX_WAKE_UP_P50_US = 100.0
MAX_WAKE_UP_P99_US = 2000.0
MIN_REQUESTS_PER_S = 2000.0
MAX_WAITING_CPU_SHARE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A measured value and the most that it may be, or the least where `at_least` is set."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SameHost:
    """Everything that a run measured. `huge_ok` is whether a payload over 4 GiB came over, None where none was sent."""

    sizes: Sequence[SizeResult]
    small: SmallResult
    huge_mib: int
    huge_ok: bool | None

    @property
    def content_ok(self) -> bool:
        """Whether every payload that was compared held what was sent."""
        return all(result.content_ok for result in self.sizes) and self.small.content_ok and self.huge_ok is not False


def judge(run: SameHost) -> list[Bar]:
    """The bars that this run can be held to."""
    bars = [bar for result in run.sizes if result.size_mib in BAR_SIZES_MIB for bar in _size_bars(result)]
    small = run.small
    bars += [
        Bar(name="handoff of 64 tensors, p50", value=small.handoff.p50_us, limit=MAX_HANDOFF_US, unit="us"),
        Bar(name="wake-up p50", value=small.wake_up.p50_us, limit=MAX_WAKE_UP_P50_US, unit="us"),
        Bar(name="wake-up p99", value=small.wake_up.p99_us, limit=MAX_WAKE_UP_P99_US, unit="us"),
        Bar(
            name="requests of 1 MiB in flight",
            value=small.stream.requests_per_s,
            limit=MIN_REQUESTS_PER_S,
            unit="/s",
            at_least=True,
        ),
        Bar(
            name=f"processor time of {WAITING} waiting receivers",
            value=small.waiting_cpu_share,
            limit=MAX_WAITING_CPU_SHARE,
            unit="of a core",
        ),
    ]
    if run.huge_ok is not None:
        name = f"a payload of {run.huge_mib} MiB comes over"
        bars.append(Bar(name=name, value=float(run.huge_ok), limit=1.0, unit="(1: bit for bit)", at_least=True))
    return bars


def _size_bars(result: SizeResult) -> list[Bar]:
    size, payload = f"{result.size_mib} MiB", result.payload_nbytes
    two, one = result.two_threads, result.one_thread
    measured = [
        ("put-then-get", two.put_then_get_x_gather.median, MAX_X_GATHER, "x the gather alone"),
        ("put-then-get", two.put_then_get_x.median, MAX_X_MEMCPY, "x memcpy"),
        ("put-then-get by one thread", one.put_then_get_x.median, MAX_X_MEMCPY_ONE_THREAD, "x memcpy"),
        ("sender's peak memory", result.sender_memory.total / payload, MAX_SENDER_MEMORY_X, "x payload"),
        ("receiver's own memory", result.receiver_memory.private / payload, MAX_RECEIVER_MEMORY_X, "x payload"),
    ]
    return [Bar(name=f"{size}: {name}", value=value, limit=limit, unit=unit) for name, value, limit, unit in measured]


def to_json(run: SameHost, command: str) -> dict[str, Any]:
    """Everything that was measured, where, and by which command, as JSON values."""
    return {
        "command": command,
        "machine": machine(),
        "sizes": [asdict(result) for result in run.sizes],
        "small": asdict(run.small),
        "huge": {"size_mib": run.huge_mib, "content_ok": run.huge_ok},
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in judge(run)],
    }


def machine() -> dict[str, Any]:
    """What ran the benchmark, as JSON values."""
    return {
        "cpu_count": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "load_average_1_min": os.getloadavg()[0],
    }


def to_text(run: SameHost, command: str) -> str:
    """The same as a table to read: medians with least and most."""
    lines = [
        f"{command}   (torch threads {torch.get_num_threads()}, CPUs {os.cpu_count()}, load {os.getloadavg()[0]:.1f})",
        "",
        f"{'':36}" + "".join(f"{f'{result.size_mib} MiB':>24}" for result in run.sizes),
    ]
    for title, values in _rows(run.sizes):
        lines.append(f"{title:36}" + "".join(f"{value:>24}" for value in values))
    lines += ["", *_small_lines(run.small), "", *(spell_bar(bar) for bar in judge(run))]
    return "\n".join(lines) + "\n"


def _rows(sizes: Sequence[SizeResult]) -> list[tuple[str, list[str]]]:
    return [
        ("warm memcpy, ms", [_spell(result.memcpy_ms) for result in sizes]),
        ("put-then-get, ms", [_spell(result.two_threads.put_then_get_ms) for result in sizes]),
        ("put-then-get, x memcpy", [_spell(result.two_threads.put_then_get_x) for result in sizes]),
        ("  x the gather alone", [_spell(result.two_threads.put_then_get_x_gather) for result in sizes]),
        ("  lengths that differ, x the gather", [_spell(result.varied.put_then_get_x_gather) for result in sizes]),
        ("  by one thread, x memcpy", [_spell(result.one_thread.put_then_get_x) for result in sizes]),
        ("  with checksum, x memcpy", [_spell(result.checksum.put_then_get_x) for result in sizes]),
        ("gather alone, x memcpy", [_spell(result.two_threads.gather_x) for result in sizes]),
        ("  by one thread, x memcpy", [_spell(result.one_thread.gather_x) for result in sizes]),
        ("sender, private, x payload", [_share(result.sender_memory.private, result) for result in sizes]),
        ("sender, shared pool, x payload", [_share(result.sender_memory.shared, result) for result in sizes]),
        ("receiver, private, x payload", [_share(result.receiver_memory.private, result) for result in sizes]),
        ("receiver, shared pool, x payload", [_share(result.receiver_memory.shared, result) for result in sizes]),
        ("content", ["verified" if result.content_ok else "WRONG" for result in sizes]),
    ]


def _spell(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.least:.2f}-{spread.most:.2f})"


def _share(nbytes: int, result: SizeResult) -> str:
    return f"{nbytes / result.payload_nbytes:.3f}"


def _small_lines(small: SmallResult) -> list[str]:
    stream = small.stream
    cpu = f"processor time of one: sender {stream.sender_cpu_us:.0f} us, receiver {stream.receiver_cpu_us:.0f} us"
    return [
        f"64 tensors of one token, put-then-get {_spell_lateness(small.handoff)}",
        f"1 MiB, from put returned to usable    {_spell_lateness(small.wake_up)}",
        f"1 MiB in flight                       {stream.requests_per_s:.0f} requests/s ({stream.requests}); {cpu}",
        f"content of small requests             {'verified' if small.content_ok else 'WRONG'}",
    ]


def _spell_lateness(lateness: Lateness) -> str:
    return (
        f"p50 {lateness.p50_us:.0f} us, p90 {lateness.p90_us:.0f} us, p99 {lateness.p99_us:.0f} us, "
        f"max {lateness.max_us:.0f} us ({lateness.tries} tries)"
    )


def spell_bar(bar: Bar) -> str:
    """One line: whether the bar is met, what was measured and what it may be."""
    verdict = "met   " if bar.passed else "MISSED"
    return f"{verdict}  {bar.name}: {bar.value:.3g} {bar.unit}, at {'least' if bar.at_least else 'most'} {bar.limit:g}"
