"""How long planning takes: one target's plan among many ranks, proven for a long request, and how that grows.

A plan is made once a route, not once a request. What is timed is what one rank would need for itself: an index of both
stages' boxes, its plan, and the proof for a request of `NUM_TOKENS` tokens and for any other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from omnikv.bench.measure import Spread
from omnikv.bench.report import Bar, machine, spell_bar
from omnikv.core.boxes import Boxes
from omnikv.core.partition import Parallel
from omnikv.core.plan import StageIndex, plan_target, prove, prove_at

NUM_LAYERS, NUM_KV_HEADS, NUM_TOKENS = 80, 128, 128 << 10
MAX_PLAN_MS = 10.0
# Of the time a box takes where a target meets few, at most this where it meets many.
MAX_GROWTH_X = 1.0

_STAGES: dict[str, tuple[Parallel, Parallel]] = {
    "TP 64 to TP 48": (Parallel(tp=64), Parallel(tp=48)),
    "PP 4 x TP 16 to PP 4 x TP 12": (Parallel(pp=4, tp=16), Parallel(pp=4, tp=12)),
    "PP 8 x TP 8 to PP 6 x TP 8": (Parallel(pp=8, tp=8), Parallel(pp=6, tp=8)),
    "CP 64 to CP 48": (Parallel(cp=64), Parallel(cp=48)),
    "CP 64 to CP 48 in blocks of 16": (Parallel(cp=64, cp_block=16), Parallel(cp=48, cp_block=16)),
}
# Among equally many source ranks, targets that meet ever more of them.
_GROWING = (32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """One pair of layouts: how many boxes the slowest target meets, and what its plan takes, in milliseconds."""

    name: str
    source_ranks: int
    target_ranks: int
    boxes: int
    index_ms: Spread
    plan_ms: Spread
    proof_ms: Spread

    @property
    def whole_ms(self) -> float:
        return self.index_ms.median + self.plan_ms.median + self.proof_ms.median


def measure_plans(rounds: int) -> tuple[list[PlanResult], list[PlanResult]]:
    """The plans of the stages of 64 and 48 ranks, and those of targets that meet 2, 4, ... 64 boxes."""
    sizes = [_measure(name, *stages, rounds) for name, stages in _STAGES.items()]
    growing = [_measure(f"TP 64 to TP {size}", Parallel(tp=64), Parallel(tp=size), rounds) for size in _GROWING]
    return sizes, growing


def _measure(name: str, source: Parallel, target: Parallel, rounds: int) -> PlanResult:
    held, needed = (stage.boxes(NUM_KV_HEADS, NUM_LAYERS) for stage in (source, target))
    index = StageIndex(held), StageIndex(needed)
    boxes = [sum(len(piece.boxes) for piece in plan_target(rank, *index)) for rank in range(len(needed))]
    busiest = max(range(len(boxes)), key=boxes.__getitem__)
    timings = [_time_round(held, needed, busiest) for _ in range(rounds)]
    index_ms, plan_ms, proof_ms = (Spread.of(values) for values in zip(*timings, strict=True))
    return PlanResult(
        name=name,
        source_ranks=len(held),
        target_ranks=len(needed),
        boxes=boxes[busiest],
        index_ms=index_ms,
        plan_ms=plan_ms,
        proof_ms=proof_ms,
    )


def _time_round(held: tuple[Boxes, ...], needed: tuple[Boxes, ...], rank: int) -> tuple[float, float, float]:
    at = [time.perf_counter()]
    sources, targets = StageIndex(held), StageIndex(needed)
    at.append(time.perf_counter())
    pieces = plan_target(rank, sources, targets)
    at.append(time.perf_counter())
    prove_at(rank, pieces, sources, needed[rank], NUM_TOKENS)
    prove(rank, pieces, sources, needed[rank])
    at.append(time.perf_counter())
    index, plan, proof = (1e3 * (end - start) for start, end in pairwise(at))
    return index, plan, proof


def judge_plans(sizes: Sequence[PlanResult], growing: Sequence[PlanResult]) -> list[Bar]:
    """The bars that these results are held to."""
    few, many = growing[0], growing[-1]
    # The least of many rounds: what other processes take meanwhile is no growth.
    growth = (many.plan_ms.least + many.proof_ms.least) / (few.plan_ms.least + few.proof_ms.least)
    bars = [
        Bar(name=f"one target's plan, {result.name}", value=result.whole_ms, limit=MAX_PLAN_MS, unit="ms")
        for result in sizes
    ]
    name = f"{many.boxes} boxes against {few.boxes}, over their numbers"
    return [*bars, Bar(name=name, value=growth * few.boxes / many.boxes, limit=MAX_GROWTH_X, unit="x")]


def plans_to_json(sizes: Sequence[PlanResult], growing: Sequence[PlanResult], command: str) -> dict[str, Any]:
    """Everything that was measured, where, and by which command, as JSON values."""
    return {
        "command": command,
        "machine": machine(),
        "layers": NUM_LAYERS,
        "kv_heads": NUM_KV_HEADS,
        "tokens": NUM_TOKENS,
        "sizes": [asdict(result) for result in sizes],
        "growing": [asdict(result) for result in growing],
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in judge_plans(sizes, growing)],
    }


def plans_to_text(sizes: Sequence[PlanResult], growing: Sequence[PlanResult], command: str) -> str:
    """The same as a table to read: milliseconds, medians with least and most."""
    lines = [
        command,
        f"CPUs {os.cpu_count()}, load {os.getloadavg()[0]:.1f}",
        f"{NUM_LAYERS} layers, {NUM_KV_HEADS} KV heads, {NUM_TOKENS:,} tokens",
        "",
        f"{'one target, ms':34}{'boxes':>6}{'index':>20}{'plan':>20}{'proof':>20}",
    ]
    for result in (*sizes, *growing):
        spreads = "".join(f"{_spell(spread):>20}" for spread in (result.index_ms, result.plan_ms, result.proof_ms))
        lines.append(f"{result.name:34}{result.boxes:>6}{spreads}")
    return "\n".join([*lines, "", *(spell_bar(bar) for bar in judge_plans(sizes, growing))]) + "\n"


def _spell(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.least:.2f}-{spread.most:.2f})"
