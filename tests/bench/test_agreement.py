"""The agreement benchmark: what it makes of the ranks' times, what it says, and a small run with real processes."""

import json

import pytest

from omnikv.bench.__main__ import main
from omnikv.bench.agreement import (
    BLOCKS,
    agreement_to_json,
    agreement_to_text,
    judge_agreement,
    measure_agreement,
    summarise,
)
from omnikv.bench.agreement_rank import BATCH, RankTimes, ballot_of
from omnikv.core.verdict import rule
from omnikv.errors import TransportError

ROUNDS = 10 * BLOCKS


def _times(*, objects=1200.0, all_reduce=600.0, channel=100.0, batch=120.0, late_ms=4.0):
    rounds_us = {"objects": objects, "all_reduce": all_reduce, "channel": channel, "batch": batch}
    rounds_us |= {"bare": 60.0, "bare_batch": 75.0}
    return RankTimes(
        rounds_us={name: [us] * ROUNDS for name, us in rounds_us.items()},
        even_ms=[3.0] * 3,
        late_ms=[late_ms] * 3,
        late_one_ms=[201.0] * 3,
    )


def _passed(**times):
    return [bar.passed for bar in judge_agreement([summarise(2, ROUNDS, [_times(**times)] * 2)])]


def test_good_times_keep_every_bar():
    assert _passed() == [True] * 4


def test_each_bar_is_missed_by_its_own_value():
    assert _passed(objects=599.0) == [False, True, True, True]
    assert _passed(all_reduce=299.0) == [True, False, True, True]
    assert _passed(batch=151.0) == [True, True, False, True]
    assert _passed(late_ms=13.1) == [True, True, True, False]


def test_a_delay_counts_where_it_was_worst():
    result = summarise(2, ROUNDS, [_times(), _times(late_ms=60.0)])
    assert result.delay_ms.median == 57.0


def test_one_busy_block_shows_as_a_range_and_not_as_the_result():
    busy = _times()
    busy.rounds_us["channel"][:10] = [5000.0] * 10
    result = summarise(2, ROUNDS, [busy] * 2)
    assert result.latencies["channel"].p50_us.median == 100.0
    assert result.latencies["channel"].p50_us.most == 5000.0


def test_the_text_and_the_json_show_what_was_measured_and_the_bars():
    result = summarise(4, ROUNDS, [_times(batch=200.0)] * 4)
    text = agreement_to_text([result], "the command")
    assert "the command" in text
    assert "4 ranks" in text
    assert "bare star, share of all-reduce" in text
    assert f"MISSED  4 ranks: {BATCH} votes at once: 2 x one vote, at most 1.5" in text
    said = json.loads(json.dumps(agreement_to_json([result], "the command")))
    assert said["results"][0]["latencies"]["channel"]["p50_us"] == {"median": 100.0, "least": 100.0, "most": 100.0}
    assert said["results"][0]["bare_all_reduce_share"]["median"] == 0.1
    assert said["results"][0]["bare_batch_x"]["median"] == 1.25
    assert [bar["passed"] for bar in said["bars"]] == [True, True, False, True]


def test_what_is_voted_on_is_kept():
    assert rule([ballot_of(3)] * 4).kind == "keep"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agreement", "--ranks", "1"], "must be 2 or more, got 1"),
        (["agreement", "--ranks", "2,x"], "--ranks"),
        (["agreement", "--rounds", "24"], "must be 25 or more, got 24"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_ranks_that_fail_are_an_error_and_not_a_wait(monkeypatch):
    monkeypatch.setattr("omnikv.bench.agreement.sys.executable", "/bin/false")
    with pytest.raises(TransportError, match="of the benchmark failed; their own error output says why"):
        measure_agreement(2, 25)


def test_a_small_run_with_real_ranks_prints_the_table_and_writes_the_json(tmp_path, capsys):
    path = tmp_path / "agreement.json"
    assert main(["agreement", "--ranks", "2", "--rounds", "25", "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert [result["ranks"] for result in said["results"]] == [2]
    assert said["results"][0]["late_one_ms"]["least"] >= 200
    assert len(said["bars"]) == 4
    assert "one gloo all-reduce" in capsys.readouterr().out
