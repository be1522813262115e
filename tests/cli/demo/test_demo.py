"""The whole demo, with real processes, real tensor parallelism and a tiny model."""

import json
import os
import signal
import subprocess
import sys

import pytest

NUM_TOKENS = 6
# Per token and head: key and value of 8 float32 in each of 3 layers.
NBYTES_A_HEAD_AND_TOKEN = 2 * 8 * 4 * 3


def run_demo(model_dir, tmp_path, *options):
    """The exit status, the outcome as JSON and the page."""
    json_file = tmp_path / "outcome.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "omnikv.cli", "demo", "--model", str(model_dir), "--prompt", "w7 w21 w3 w40"),
            *("--max-tokens", str(NUM_TOKENS), "--timeout-s", "100", "--json", str(json_file), *options),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    outcome = json.loads(json_file.read_text(encoding="utf-8")) if json_file.exists() else None
    return done, outcome


def rows(outcome, role):
    return [row for row in outcome["ranks"] if row["role"] == role]


HEADS = {1: [[0, 1, 2]], 2: [[0, 1], [2]], 3: [[0], [1], [2]]}


SLOW = pytest.mark.slow
SIZES = [(3, 1), (2, 3), pytest.param(1, 3, marks=SLOW), pytest.param(3, 2, marks=SLOW)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_the_text_is_that_of_a_single_process(tiny_model_dir, tmp_path, prefill_tp, decode_tp):
    options = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp))
    done, outcome = run_demo(tiny_model_dir, tmp_path, *options)

    assert done.returncode == 0, done.stderr
    assert "identical   yes" in done.stdout
    assert outcome["identical"] is True
    assert outcome["tokens"] == outcome["reference_tokens"]
    assert len(outcome["tokens"]) == NUM_TOKENS
    assert outcome["verdict"] == "keep"
    assert [row["state"] for row in outcome["ranks"]] == ["sent"] * prefill_tp + ["kept"] * decode_tp
    assert [row["heads"] for row in rows(outcome, "prefill")] == HEADS[prefill_tp]
    assert [row["heads"] for row in rows(outcome, "decode")] == HEADS[decode_tp]
    assert outcome["payload_bytes"] == sum(row["nbytes"] for row in rows(outcome, "decode"))
    assert outcome["payload_bytes"] > 3 * outcome["num_prompt_tokens"] * NBYTES_A_HEAD_AND_TOKEN
    assert outcome["handoff_ms"] > 0


def test_when_a_prefill_rank_is_killed_every_decode_rank_recomputes(tiny_model_dir, tmp_path):
    done, outcome = run_demo(tiny_model_dir, tmp_path, "--decode-tp", "3", "--kill-rank", "1")

    assert done.returncode == 0, done.stderr
    assert "killed before it sent" in done.stdout
    assert outcome["identical"] is True
    assert len(outcome["tokens"]) == NUM_TOKENS
    assert (outcome["verdict"], outcome["fallback"]) == ("drop", "recompute")
    assert [row["state"] for row in rows(outcome, "prefill")] == ["sent", "killed before it sent", "sent"]
    assert [row["state"] for row in rows(outcome, "decode")] == ["dropped, recomputed the prompt"] * 3
    assert any("ProducerFailed" in cause for cause in outcome["causes"].values())


def test_more_ranks_than_query_heads_are_refused_before_anything_starts(tiny_model_dir, tmp_path):
    done, outcome = run_demo(tiny_model_dir, tmp_path, "--prefill-tp", "10")

    assert done.returncode == 2
    assert outcome is None
    assert "--prefill-tp 10 leaves ranks of this model without a query head" in " ".join(done.stderr.split())
    assert "Starting" not in done.stderr


def test_a_directory_without_a_model_is_refused(tmp_path):
    done, _ = run_demo(tmp_path, tmp_path)

    assert done.returncode == 2
    assert "holds no model" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_outcome_that_could_not_be_written_is_refused_before_anything_starts(tiny_model_dir, tmp_path):
    done, _ = run_demo(tiny_model_dir, tmp_path, "--json", str(tmp_path / "absent" / "outcome.json"))

    assert done.returncode == 2
    assert "is no writable directory" in " ".join(done.stderr.split())


def test_an_outcome_in_place_of_a_directory_is_refused_before_anything_starts(tiny_model_dir, tmp_path):
    done, _ = run_demo(tiny_model_dir, tmp_path, "--json", str(tmp_path))

    assert done.returncode == 2
    assert "it is a directory; name a file" in " ".join(done.stderr.split())
    assert "Starting" not in done.stderr


@pytest.fixture
def heeds_signals():
    """Children heed SIGINT even where this process was started in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_nothing_behind(tiny_model_dir, tmp_path, number):
    command = [sys.executable, "-m", "omnikv.cli", "demo", "--model", str(tiny_model_dir)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr.readline().startswith("Starting")
        process.send_signal(number)
        process.communicate(timeout=60)

    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
