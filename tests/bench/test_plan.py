"""The planning benchmark: what it says, and what its bars mean."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from omnikv.bench.__main__ import main
from omnikv.bench.measure import Spread
from omnikv.bench.plan import PlanResult, judge_plans


def result(boxes, plan_ms):
    spread, nothing = Spread.of([plan_ms]), Spread.of([0.0])
    return PlanResult(
        name="a to b", source_ranks=64, target_ranks=48, boxes=boxes, index_ms=nothing, plan_ms=spread, proof_ms=nothing
    )


@pytest.mark.parametrize(("plan_ms", "passed"), [(9.0, True), (11.0, False)])
def test_a_plan_that_takes_too_long_misses_its_bar(plan_ms, passed):
    growing = [result(2, 1.0), result(64, 32.0)]
    assert [bar.passed for bar in judge_plans([result(2, plan_ms)], growing)] == [passed, True]


def test_a_plan_that_grows_faster_than_its_boxes_misses_its_bar():
    few, many = result(2, 1.0), result(64, 40.0)
    assert [bar.passed for bar in judge_plans([], [few, many])] == [False]
    assert judge_plans([], [few, replace(many, plan_ms=Spread.of([16.0]))])[0].value == 0.5


def test_a_small_run_tells_and_writes_every_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", "--rounds", "5", "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    assert [one["boxes"] for one in told["growing"]] == [2, 4, 8, 16, 32, 64]
    assert {(one["source_ranks"], one["target_ranks"]) for one in told["sizes"]} == {(64, 48)}
    assert len(told["bars"]) == len(told["sizes"]) + 1
    shown = capsys.readouterr().out
    assert all(one["name"] in shown for one in told["sizes"])
