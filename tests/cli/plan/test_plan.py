"""`omnikv plan`: who sends what to whom, what it weighs, and whether it is proven."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from omnikv.cli.app import app


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_lists_every_payload_its_bytes_the_busiest_ranks_and_the_verdict():
    done = plan("--from-tp", "4", "--to-tp", "6", "--kv-heads", "8", "--layers", "32", "--tokens", "4096")
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:4] for row in rows[1:]] == [
        ["0", "0", "0-31", "0-1"],
        ["1", "1", "0-31", "2-3"],
        ["2", "2", "0-31", "4"],
        ["2", "3", "0-31", "5"],
        ["3", "4", "0-31", "6"],
        ["3", "5", "0-31", "7"],
    ]
    assert rows[1][4:] == ["all", "128", "MiB"]
    assert "512 MiB in 6 payloads" in done.stdout
    assert "source rank 0 with 128 MiB to 1 rank; target rank 0 with 128 MiB from 1 rank" in done.stdout
    assert "every element of all 6 target ranks comes exactly once" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "uncovered"),
    [
        (["--from-tp", "4", "--lost", "2"], "no source holds heads 4, 5 of layers 0-31, which target rank 0 needs"),
        (
            ["--from-heads", "0,1/2", "--to-heads", "0/1,2,3"],
            "no source holds head 3 of layers 0-31, which target",
        ),
        (["--from-pp", "2", "--lost", "1"], "no source holds heads 0, 1, 2, 3, 4, 5, 6, 7 of layers 16-31"),
        (["--from-cp", "2", "--lost", "0"], "of layers 0-31, tokens 0-2047, which target rank 0 needs"),
    ],
)
def test_d20_what_nobody_sends_is_named_and_is_the_exit_status(arguments, uncovered):
    done = plan(*arguments)
    assert done.exit_code == 1
    assert uncovered in " ".join(done.stdout.split())
    assert "does not hold" in done.stdout


def test_a_lost_rank_whose_heads_others_hold_is_made_good():
    done = plan("--from-tp", "4", "--to-tp", "2", "--kv-heads", "2", "--lost", "0,3")
    assert done.exit_code == 0
    rows = [line.split()[:4] for line in done.stdout.splitlines() if line.startswith("   ")]
    assert rows == [["1", "0", "0-31", "0"], ["2", "1", "0-31", "1"]]


def test_a_zigzag_gives_each_rank_a_chunk_from_either_end():
    done = plan("--from-cp", "2", "--from-cp-zigzag", "--kv-heads", "1", "--layers", "2", "--tokens", "8")
    assert "CP 2 in zigzag to 1 rank" in done.stdout
    rows = [line.split()[4:6] for line in done.stdout.splitlines() if line.startswith("   ")]
    assert rows == [["0-1,", "6-7"], ["2-5", "4"]]


def test_a_latent_weighs_once():
    done = plan("--latent", "--from-tp", "8", "--layers", "2", "--tokens", "1024", "--head-dim", "576")
    assert "2.2 MiB in 1 payloads" in done.stdout


def test_the_json_says_the_same(tmp_path):
    path = tmp_path / "plan.json"
    arguments = ["--from-pp", "2", "--to-cp", "2", "--kv-heads", "1", "--layers", "4", "--tokens", "9"]
    assert plan(*arguments, "--json", str(path)).exit_code == 0
    told = json.loads(path.read_text())
    assert (told["proven"], told["flaw"], told["nbytes"]) == (True, None, 4 * 9 * 2 * 128 * 2)
    assert told["pieces"][-1] == {
        "source_rank": 1,
        "target_rank": 1,
        "nbytes": 2 * 4 * 2 * 128 * 2,
        "boxes": [{"layers": [2, 4], "heads": [0], "tokens": [[5, 4, 4, 1]]}],
    }


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("arguments", "payloads", "gaps"),
    [
        (["--from-tp", "4", "--to-tp", "6"], 6, 0),
        (["--from-tp", "64", "--to-tp", "48", "--kv-heads", "128"], 80, 0),
        (["--from-cp", "3", "--to-cp", "2", "--to-cp-block", "64"], 6, 0),
        (["--from-tp", "4", "--to-tp", "2", "--lost", "2"], 3, 2),
    ],
)
def test_the_picture_has_a_card_for_each_rank_a_band_for_each_payload_and_shows_gaps(
    tmp_path, arguments, payloads, gaps
):
    path = tmp_path / "plan.svg"
    plan(*arguments, "--svg", str(path))
    picture = ElementTree.parse(path).getroot()
    bands = [one for one in picture.iter(f"{SVG}path") if one.get("fill-opacity")]
    hatched = [one for one in picture.iter(f"{SVG}rect") if one.get("fill") == "url(#gap)"]
    titles = [one.text for one in picture.iter(f"{SVG}text")]
    assert (len(bands), len(hatched)) == (payloads, gaps)
    assert "source 0" in titles
    assert "target 1" in titles
    assert ("not proven: the red parts do not come" in titles) == bool(gaps)


def test_the_picture_of_tokens_that_are_dealt_out_singly_stays_small(tmp_path):
    path = tmp_path / "plan.svg"
    sizes = ["--from-cp", "3", "--from-cp-block", "1", "--to-cp", "2", "--to-cp-block", "4096", "--tokens", "1000000"]
    assert plan(*sizes, "--svg", str(path)).exit_code == 0
    tints = {one.get("opacity") for one in ElementTree.parse(path).getroot().iter(f"{SVG}rect")}
    assert "0.333" in tints
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-tp", "0"], "tp must be a positive integer, got 0"),
        (["--layers", "2", "--to-pp", "3"], "each stage needs a layer, got 2 layers on 3 stages"),
        (["--tokens", "0"], "num_tokens must be 1 or more"),
        (["--dtype", "float17"], "the dtype 'float17' is none of"),
        (["--lost", "1"], "lost rank 1 is none of the source's 1 ranks"),
        (["--lost", "one"], "--lost takes whole numbers"),
        (["--from-heads", "0,0"], "rank 0 names a head twice"),
        (["--from-heads", "0,1//2"], "--from-heads takes whole numbers"),
        (["--to-heads", "0/1", "--to-tp", "4"], "--to-heads lists what each rank holds, instead of sizes"),
        (["--svg", "/"], "--svg / cannot be written: it is a directory"),
    ],
)
def test_options_that_make_no_plan_are_a_misuse(arguments, message):
    done = plan(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
