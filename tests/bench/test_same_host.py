"""The command `same-host`: what it measures with two real processes, what it says, and how it exits."""

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from omnikv.bench.__main__ import main
from omnikv.bench.measure import ExtraMemory, Spread
from omnikv.bench.receiver import ReceiveLane
from omnikv.bench.report import SameHost, judge, to_json, to_text
from omnikv.bench.same_host import SizeResult, Times
from omnikv.bench.small import Lateness, SmallResult, StreamResult, measure_small
from omnikv.errors import TransportError

MIB = 1 << 20


def spread(median):
    return Spread(median=median, least=median / 2, most=2 * median)


def times(x_memcpy=1.2, x_gather=1.05):
    return Times(
        put_then_get_ms=spread(30.0),
        put_then_get_x=spread(x_memcpy),
        put_then_get_x_gather=spread(x_gather),
        gather_x=spread(1.1),
    )


def size_result(size_mib=256, *, two=None, one=None, sender=0, receiver=0, content_ok=True):
    return SizeResult(
        size_mib=size_mib,
        payload_nbytes=size_mib * MIB,
        rounds=5,
        memcpy_ms=spread(20.0),
        two_threads=two or times(),
        one_thread=one or times(),
        checksum=times(2.0),
        varied=times(1.2),
        sender_memory=ExtraMemory(private=sender, shared=size_mib * MIB),
        receiver_memory=ExtraMemory(private=receiver, shared=size_mib * MIB),
        content_ok=content_ok,
    )


QUICK = Lateness(tries=200, p50_us=50.0, p90_us=90.0, p99_us=400.0, max_us=900.0)
SMALL = SmallResult(
    handoff=QUICK,
    wake_up=QUICK,
    stream=StreamResult(requests=100, requests_per_s=2500.0, sender_cpu_us=300.0, receiver_cpu_us=200.0),
    waiting_cpu_share=0.0,
    content_ok=True,
)


def run_of(*sizes, small=SMALL, huge_ok=True):
    return SameHost(sizes=sizes, small=small, huge_mib=4224, huge_ok=huge_ok)


def missed(run):
    return [bar.name for bar in judge(run) if not bar.passed]


def test_good_results_meet_every_bar():
    run = run_of(size_result(64), size_result(256), size_result(1024))
    assert missed(run) == []
    assert len(judge(run)) == 3 * 5 + 5 + 1


@pytest.mark.parametrize(
    ("changed", "bar"),
    [
        ({"two": times(x_gather=1.16)}, "256 MiB: put-then-get"),
        ({"two": times(x_memcpy=1.51)}, "256 MiB: put-then-get"),
        ({"one": times(x_memcpy=2.51)}, "256 MiB: put-then-get by one thread"),
        ({"sender": 26 * MIB}, "256 MiB: sender's peak memory"),
        ({"receiver": 13 * MIB}, "256 MiB: receiver's own memory"),
    ],
)
def test_each_bar_on_a_size_is_missed_by_its_own_value(changed, bar):
    assert missed(run_of(size_result(**changed))) == [bar]


@pytest.mark.parametrize(
    ("changed", "bar"),
    [
        ({"handoff": replace(QUICK, p50_us=1001.0)}, "handoff of 64 tensors, p50"),
        ({"wake_up": replace(QUICK, p50_us=101.0)}, "wake-up p50"),
        ({"wake_up": replace(QUICK, p99_us=2001.0)}, "wake-up p99"),
        ({"stream": replace(SMALL.stream, requests_per_s=1999.0)}, "requests of 1 MiB in flight"),
        ({"waiting_cpu_share": 0.002}, "processor time of 64 waiting receivers"),
    ],
)
def test_each_bar_on_small_requests_is_missed_by_its_own_value(changed, bar):
    assert missed(run_of(size_result(), small=replace(SMALL, **changed))) == [bar]


def test_a_payload_over_4_gib_that_was_not_sent_is_not_judged():
    assert missed(run_of(huge_ok=False)) == ["a payload of 4224 MiB comes over"]
    assert not [bar for bar in judge(run_of(huge_ok=None)) if "4224" in bar.name]


def test_sizes_without_bars_are_shown_and_not_judged():
    run = run_of(size_result(16, two=times(x_memcpy=99.0)))
    assert missed(run) == []
    assert "16 MiB" in to_text(run, "the command")


def test_wrong_content_anywhere_is_told():
    assert run_of(size_result()).content_ok
    for run in (
        run_of(size_result(content_ok=False)),
        run_of(small=replace(SMALL, content_ok=False)),
        run_of(huge_ok=False),
    ):
        assert not run.content_ok


def test_the_text_shows_bars_and_wrong_content():
    text = to_text(run_of(size_result(two=times(x_memcpy=3.5), content_ok=False)), "the command")
    assert "the command" in text
    assert "MISSED  256 MiB: put-then-get: 3.5 x memcpy, at most 1.5" in text
    assert "met     wake-up p50: 50 us, at most 100" in text
    assert "met     requests of 1 MiB in flight: 2.5e+03 /s, at least 2000" in text
    assert "WRONG" in text


def test_the_json_holds_what_was_measured_and_how():
    said = json.loads(json.dumps(to_json(run_of(size_result()), "the command")))
    assert said["command"] == "the command"
    assert said["sizes"][0]["two_threads"]["put_then_get_x"] == {"median": 1.2, "least": 0.6, "most": 2.4}
    assert said["huge"] == {"size_mib": 4224, "content_ok": True}
    assert said["bars"][0] == {
        "name": "256 MiB: put-then-get",
        "value": 1.05,
        "limit": 1.15,
        "unit": "x the gather alone",
        "at_least": False,
        "passed": True,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["same-host", "--rounds", "4"], "must be 5 or more, got 4"),
        (["same-host", "--tries", "100"], "must be 200 or more"),
        (["same-host", "--stream", "99"], "must be 100 or more"),
        (["same-host", "--sizes", "0"], "must be 1 or more, got 0"),
        (["same-host", "--sizes", "64,x"], "--sizes"),
        (["same-host", "--sizes", "16", "--check"], "--check needs one of 64, 256, 1024 among --sizes"),
        ([], "required: command"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_a_receiving_process_that_is_gone_is_an_error_and_not_a_wait():
    here, there = multiprocessing.Pipe()
    with here:
        there.close()
        with pytest.raises(TransportError, match="receiving process ended early"):
            measure_small(here, 200, 100)


def test_a_receiving_process_that_ends_while_it_is_waited_for_is_an_error():
    here, there = multiprocessing.Pipe()
    with here, ThreadPoolExecutor(1) as pool:
        measuring = pool.submit(measure_small, here, 200, 100)
        assert isinstance(there.recv(), ReceiveLane)
        there.close()
        with pytest.raises(TransportError, match="receiving process ended early"):
            measuring.result()


def test_a_small_run_with_two_processes_verifies_the_content_and_writes_the_json(tmp_path, capsys):
    path = tmp_path / "bench.json"
    command = ["same-host", "--sizes", "1", "--rounds", "5", "--tries", "200", "--stream", "100", "--no-huge"]
    assert main([*command, "--threads", "1", "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert [size["content_ok"] for size in said["sizes"]] == [True]
    assert [size["payload_nbytes"] for size in said["sizes"]] == [MIB]
    assert said["small"]["content_ok"]
    assert said["small"]["handoff"]["tries"] == 200
    assert said["huge"]["content_ok"] is None
    assert "put-then-get, x memcpy" in capsys.readouterr().out
