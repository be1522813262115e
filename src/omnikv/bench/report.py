"""What the benchmark says: bars that the measured values must keep, a table to read, and JSON to keep."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from omnikv.bench.measure import Spread
from omnikv.bench.same_host import SizeResult, WakeUpResult

# The size that the bars are set for.
BAR_SIZE_MIB = 256
MAX_PUT_THEN_GET_X = 3.0
MAX_RECEIVER_MEMORY_X = 0.1
MAX_WAKE_UP_US = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A measured value and the most that it may be."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def judge(sizes: Sequence[SizeResult], wake_up: WakeUpResult) -> list[Bar]:
    """The bars that these results can be held to: those on payloads need one of `BAR_SIZE_MIB`."""
    bars = []
    for result in sizes:
        if result.size_mib == BAR_SIZE_MIB:
            received_x = result.receiver_memory.private / result.payload_nbytes
            bars += [
                Bar(
                    name=f"put-then-get of {BAR_SIZE_MIB} MiB",
                    value=result.put_then_get_x.median,
                    limit=MAX_PUT_THEN_GET_X,
                    unit="x memcpy",
                ),
                Bar(
                    name=f"private memory of a receiver of {BAR_SIZE_MIB} MiB",
                    value=received_x,
                    limit=MAX_RECEIVER_MEMORY_X,
                    unit="x payload",
                ),
            ]
    return [*bars, Bar(name="wake-up p50", value=wake_up.p50_us, limit=MAX_WAKE_UP_US, unit="us")]


def to_json(sizes: Sequence[SizeResult], wake_up: WakeUpResult, command: str) -> dict[str, Any]:
    """Everything that was measured, where, and by which command, as JSON values."""
    return {
        "command": command,
        "machine": machine(),
        "sizes": [asdict(result) for result in sizes],
        "wake_up": asdict(wake_up),
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in judge(sizes, wake_up)],
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


def to_text(sizes: Sequence[SizeResult], wake_up: WakeUpResult, command: str) -> str:
    """The same as a table to read: multiples of a warm single-thread memcpy, medians with least and most."""
    lines = [
        f"{command}   (torch threads {torch.get_num_threads()}, CPUs {os.cpu_count()}, load {os.getloadavg()[0]:.1f})",
        "",
        f"{'':34}" + "".join(f"{f'{result.size_mib} MiB':>24}" for result in sizes),
    ]
    for title, values in _rows(sizes):
        lines.append(f"{title:34}" + "".join(f"{value:>24}" for value in values))
    lines += [
        "",
        _spell_wake_up(wake_up),
        "",
        *(spell_bar(bar) for bar in judge(sizes, wake_up)),
    ]
    return "\n".join(lines) + "\n"


def _rows(sizes: Sequence[SizeResult]) -> list[tuple[str, list[str]]]:
    return [
        ("warm memcpy, ms", [_spell(result.memcpy_ms) for result in sizes]),
        ("put-then-get, ms", [_spell(result.put_then_get_ms) for result in sizes]),
        ("put-then-get, x memcpy", [_spell(result.put_then_get_x) for result in sizes]),
        ("  with checksum, x memcpy", [_spell(result.checksum_put_then_get_x) for result in sizes]),
        ("gather alone, x memcpy", [_spell(result.gather_x) for result in sizes]),
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


def _spell_wake_up(wake_up: WakeUpResult) -> str:
    return (
        f"a waiting receiver notices after    p50 {wake_up.p50_us:.0f} us, p90 {wake_up.p90_us:.0f} us, "
        f"max {wake_up.max_us:.0f} us ({wake_up.tries} tries)"
    )


def spell_bar(bar: Bar) -> str:
    """One line: whether the bar is kept, what was measured and what it may be at most."""
    verdict = "pass" if bar.passed else "FAIL"
    return f"{verdict}  {bar.name}: {bar.value:.3g} {bar.unit}, at most {bar.limit:g}"
