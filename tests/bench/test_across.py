"""The benchmark across hosts: what it calls met and missed, what it says, and one small run of it."""

import json
import re

import pytest

from omnikv.bench.__main__ import EXIT_OK, main
from omnikv.bench.across import AcrossResult, LaneResult, SmallResult, new_lane, rounds_at
from omnikv.bench.across_peer import order_of
from omnikv.bench.across_report import (
    CHECKED,
    CONTIGUOUS,
    GIVEN_SECRET,
    PAGED,
    Across,
    across_to_text,
    judge_across,
)
from omnikv.bench.measure import Spread


def run_with(contiguous=1.0, paged=1.0, secret=1.0, content_ok=True):
    def lane(name, *rates):
        times = tuple(10.0 / rate for rate in rates)
        return LaneResult(
            name=name, ms=Spread.of(times), rate_x=Spread.of(rates), content_ok=content_ok, round_ms=times
        )

    # Whatever one round is like, the lanes of it see the same machine.
    rounds = (0.5, 1.0, 2.0)
    lanes = (
        lane(CONTIGUOUS, *(contiguous * rate for rate in rounds)),
        lane(GIVEN_SECRET, *(secret * contiguous * rate for rate in rounds)),
        lane(PAGED, paged),
        lane(CHECKED, 0.5),
    )
    size = AcrossResult(size_mib=64, rounds=3, bare_ms=Spread.of([10.0]), lanes=lanes)
    small = SmallResult(requests=100, requests_per_s=1000.0, death_noticed_ms=Spread.of([5.0]))
    return Across(sizes=[size], small=small)


def test_bars_are_least_rates_of_the_bare_loop():
    assert all(bar.passed for bar in judge_across(run_with(contiguous=0.95, paged=0.9, secret=0.95)))


@pytest.mark.parametrize(
    ("rates", "missed"),
    [
        ({"contiguous": 0.94}, "tcp, 64 MiB contiguous"),
        ({"paged": 0.89}, "tcp, 64 MiB paged"),
        ({"secret": 0.9}, "given secret, 64 MiB"),
    ],
)
def test_a_rate_below_its_bar_is_a_miss(rates, missed):
    assert [bar.name for bar in judge_across(run_with(**rates)) if not bar.passed] == [missed]


def test_the_text_says_what_was_measured_and_which_bars_are_met():
    text = across_to_text(run_with(paged=0.5), "python -m omnikv.bench across")
    assert re.search(r"tcp, contiguous +1.00 \(0.50-2.00\)", text)
    assert re.search(r"given secret, x contiguous +1.00 \(1.00-1.00\)", text)
    assert "MISSED  tcp, 64 MiB paged: 0.5 x bare, at least 0.9" in text
    assert "a killed sender is known after 5.0 ms" in text


def test_small_payloads_take_more_rounds_than_large_ones():
    assert [rounds_at(size, 9) for size in (4, 64, 256, 1024, 2048)] == [45, 45, 36, 9, 9]


def test_every_round_takes_all_ways_in_an_order_that_both_ends_know():
    lanes = [new_lane(name) for name in "abcd"]
    orders = [order_of(number, lanes) for number in range(20)]
    assert all({way and way.name for way in order} == {None, *"abcd"} for order in orders)
    assert orders == [order_of(number, lanes) for number in range(20)]
    assert len({tuple(way and way.name for way in order) for order in orders}) > 1


def test_wrong_content_is_no_rate():
    run = run_with(content_ok=False)
    assert not run.content_ok
    assert "WRONG CONTENT" in across_to_text(run, "")


@pytest.mark.slow
def test_a_small_run_measures_every_lane_and_finds_the_content_right(tmp_path, capsys):
    written = tmp_path / "across.json"
    options = ["--sizes", "4", "--rounds", "5", "--stream", "100", "--deaths", "1", "--json", str(written)]
    assert main(["across", *options]) == EXIT_OK
    measured = json.loads(written.read_text())
    (size,) = measured["sizes"]
    assert {CONTIGUOUS, GIVEN_SECRET, PAGED, CHECKED} <= {lane["name"] for lane in size["lanes"]}
    assert all(lane["content_ok"] and lane["rate_x"]["least"] > 0 for lane in size["lanes"])
    assert measured["small"]["requests_per_s"] > 0
    assert "bare socket loop, ms" in capsys.readouterr().out
