"""The benchmark's command: what it measures with two real processes, what it says, and how it exits."""

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from omnikv.bench.__main__ import main
from omnikv.bench.measure import ExtraMemory, Spread
from omnikv.bench.receiver import NoticeWakeUps
from omnikv.bench.report import judge, to_json, to_text
from omnikv.bench.same_host import SizeResult, WakeUpResult, measure_wake_up
from omnikv.errors import TransportError

ONE = Spread(median=1.0, least=0.5, most=2.0)
QUICK = WakeUpResult(tries=200, p50_us=50.0, p90_us=90.0, max_us=400.0)


def _result(size_mib=256, *, put_x=1.5, private=1 << 20, content_ok=True):
    return SizeResult(
        size_mib=size_mib,
        payload_nbytes=size_mib << 20,
        rounds=5,
        memcpy_ms=ONE,
        put_then_get_ms=ONE,
        put_then_get_x=Spread(median=put_x, least=put_x, most=put_x),
        gather_x=ONE,
        checksum_put_then_get_x=ONE,
        sender_memory=ExtraMemory(private=0, shared=size_mib << 20),
        receiver_memory=ExtraMemory(private=private, shared=size_mib << 20),
        content_ok=content_ok,
    )


def _verdicts(sizes, wake_up=QUICK):
    return {bar.name.split()[0]: bar.passed for bar in judge(sizes, wake_up)}


def test_good_results_keep_every_bar():
    assert _verdicts([_result(64), _result()]) == {"put-then-get": True, "private": True, "wake-up": True}


def test_each_bar_is_missed_by_its_own_value():
    slow = WakeUpResult(tries=200, p50_us=1001.0, p90_us=2000.0, max_us=2000.0)
    assert not _verdicts([_result(put_x=3.01)])["put-then-get"]
    assert not _verdicts([_result(private=26 << 20)])["private"]
    assert not _verdicts([_result()], slow)["wake-up"]


def test_without_the_size_of_the_bars_only_the_wake_up_is_judged():
    assert _verdicts([_result(64, put_x=99.0)]) == {"wake-up": True}


def test_the_text_shows_bars_and_wrong_content():
    text = to_text([_result(put_x=3.5, content_ok=False)], QUICK, "the command")
    assert "the command" in text
    assert "FAIL  put-then-get of 256 MiB: 3.5 x memcpy, at most 3" in text
    assert "pass  wake-up p50: 50 us" in text
    assert "WRONG" in text


def test_the_json_holds_what_was_measured_and_how():
    said = json.loads(json.dumps(to_json([_result()], QUICK, "the command")))
    assert said["command"] == "the command"
    assert said["sizes"][0]["put_then_get_x"] == {"median": 1.5, "least": 1.5, "most": 1.5}
    assert said["bars"][0] == {
        "name": "put-then-get of 256 MiB",
        "value": 1.5,
        "limit": 3.0,
        "unit": "x memcpy",
        "passed": True,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["same-host", "--rounds", "4"], "must be 5 or more, got 4"),
        (["same-host", "--wake-ups", "100"], "must be 200 or more"),
        (["same-host", "--sizes", "0"], "must be 1 or more, got 0"),
        (["same-host", "--sizes", "64,x"], "--sizes"),
        (["same-host", "--sizes", "64", "--check"], "--check needs 256 among --sizes"),
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
            measure_wake_up(here, 200)


def test_a_receiving_process_that_ends_while_it_is_waited_for_is_an_error():
    here, there = multiprocessing.Pipe()
    with here, ThreadPoolExecutor(1) as pool:
        measuring = pool.submit(measure_wake_up, here, 200)
        assert isinstance(there.recv(), NoticeWakeUps)
        there.close()
        with pytest.raises(TransportError, match="receiving process ended early"):
            measuring.result()


def test_a_small_run_with_two_processes_verifies_the_content_and_writes_the_json(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert main(["same-host", "--sizes", "1", "--rounds", "5", "--threads", "1", "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert [size["content_ok"] for size in said["sizes"]] == [True]
    assert [size["payload_nbytes"] for size in said["sizes"]] == [1 << 20]
    assert said["wake_up"]["tries"] == 300
    assert "put-then-get, x memcpy" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["absent/bench.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, name):
    with pytest.raises(SystemExit) as caught:
        main(["same-host", "--sizes", "1", "--json", str(tmp_path / name)])
    assert caught.value.code == 2
    assert "cannot be written" in capsys.readouterr().err
