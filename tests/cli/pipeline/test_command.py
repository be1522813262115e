"""`omnikv pipeline` as a newcomer runs it."""

import json
import os
import signal
import subprocess
import sys


def run_command(*options):
    command = [sys.executable, "-m", "omnikv.cli", "pipeline", "--timeout-s", "100", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_says_that_the_picture_matches_and_writes_what_it_was_asked_for(tmp_path):
    picture, outcome = tmp_path / "image.png", tmp_path / "outcome.json"
    done = run_command(
        *("--ar-tp", "1", "--dit-tp", "1", "--cfg", "2", "--steps", "2"),
        *("--out", str(picture), "--json", str(outcome)),
    )
    assert done.returncode == 0, done.stderr
    assert "matches the reference: max difference " in done.stdout
    assert "byte for byte on 2 of 2 ranks" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = json.loads(outcome.read_text(encoding="utf-8"))
    assert (told["matches"], told["mix"]) == (True, "TP 1 -> TP 1 x CFG 2")
    assert [row["reader"] for row in told["pictures"][0]["ranks"]] == [True, False]


def test_d07_a_shared_cache_for_three_ranks_is_an_error_that_names_them(tmp_path):
    done = run_command("--cfg", "3", "--shared-prefix")
    assert done.returncode == 2
    assert "ranks 1, 2 of the guidance group of 3 would run without KV" in done.stderr
    assert "Starting" not in done.stderr


def test_a_picture_that_could_not_be_written_is_refused_before_anything_starts(tmp_path):
    done = run_command("--out", str(tmp_path / "absent" / "image.png"))
    assert done.returncode == 2
    assert "is no writable directory" in " ".join(done.stderr.split())


def test_a_run_that_is_stopped_leaves_no_process_and_no_file_behind(tmp_path):
    command = [sys.executable, "-m", "omnikv.cli", "pipeline"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        heard = process.stderr.readline()
        assert heard.startswith("Starting")
        # As far as the first rank's start: the ranks have logs then.
        while not list(tmp_path.glob("omnikv-pipeline-*/dit-rank-0.log")):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
