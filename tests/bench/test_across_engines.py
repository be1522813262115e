"""The benchmark of engines: what it calls met and missed, what it says, and one small run of it."""

import pytest

from omnikv.bench.across import SmallResult
from omnikv.bench.across_engines import EngineDeath, EngineResult, engines_here, measure_engine, measure_engine_death
from omnikv.bench.across_report import Across, across_to_json, across_to_text, judge_across
from omnikv.bench.measure import Spread


def run_with(rate, content_ok=True):
    one = Spread.of([10.0])
    result = EngineResult(
        engine="mooncake",
        size_mib=64,
        rounds=5,
        bare_ms=one,
        ours_ms=one,
        rate_x=Spread.of([rate]),
        content_ok=content_ok,
    )
    small = SmallResult(requests=100, requests_per_s=1000.0, death_noticed_ms=one)
    return Across(sizes=[], small=small, engines=[result], engine_deaths=[EngineDeath(engine="nixl", noticed_ms=one)])


@pytest.mark.parametrize(("rate", "is_met"), [(0.9, True), (0.89, False)])
def test_the_bar_is_a_least_rate_of_the_bare_engine(rate, is_met):
    (bar,) = judge_across(run_with(rate))
    assert (bar.name, bar.passed) == ("mooncake, 64 MiB", is_met)


def test_the_text_and_the_json_say_what_was_measured():
    text = across_to_text(run_with(0.95), "python -m omnikv.bench across")
    assert "mooncake, 64 MiB: bare 10.0 (10.0-10.0) ms, ours 10.0 (10.0-10.0) ms, 0.95 (0.95-0.95) x bare" in text
    assert "nixl: a killed sender is known after 10.0 (10.0-10.0) ms" in text
    assert across_to_json(run_with(0.95), "")["engines"][0]["rate_x"]["median"] == 0.95


def test_wrong_content_is_no_rate():
    run = run_with(1.0, content_ok=False)
    assert not run.content_ok
    assert "WRONG CONTENT x bare" in across_to_text(run, "")


@pytest.mark.slow
def test_a_small_run_over_every_engine_here_finds_the_content_right(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    engines = engines_here()
    if not engines:
        pytest.skip("no engine is installed")
    for engine in engines:
        result = measure_engine(engine, 4, 5)
        assert result.content_ok
        assert result.rate_x.least > 0
        assert measure_engine_death(engine, 1).noticed_ms.median > 0
