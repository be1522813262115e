"""The figures of a demo, from what its ranks told."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from omnikv.cli.demo.plan import DemoRequest, RankJob
from omnikv.cli.demo.report import print_result
from omnikv.cli.demo.result import make_result

TOKENS = [5, 6, 7]
DROPPED = "rank 0: ProducerFailed: source rank 1 died"


def a_rank(role, rank, events, *, killed_at_s=None):
    job = RankJob(
        role=role,
        rank=rank,
        model_dir="m",
        prompt="p",
        max_tokens=3,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        prefill_tp=2,
        decode_tp=1,
        namespace="n",
        group_file="f",
        receive_timeout_s=1.0,
        timeout_s=2.0,
    )
    return SimpleNamespace(job=job, events=events, killed_at_s=killed_at_s)


def a_prefill_rank(rank, *, sends=True, **kwargs):
    ready = {"ready": {"num_tokens": 9}}
    sent = {"sent": {"started_s": 10.0 + rank, "sent_s": 10.5 + rank, "nbytes": 1000}}
    return a_rank("prefill", rank, {**ready, **(sent if sends else {})}, **kwargs)


def a_decode_rank(tokens=TOKENS, *, keeps=True):
    """Waits from 9.0; notices rank 0's payload, sent at 10.5, at 10.75 and rank 1's, sent at 11.5, at 12.0."""
    kept = {"verdict": "keep", "causes": {}, "nbytes": 2000, "sources": [[0, 1.75], [1, 3.0]]}
    dropped = {"verdict": "drop", "causes": {"0": DROPPED}, "nbytes": 0, "sources": []}
    outcome = {"started_s": 9.0, "decided_s": 12.5, **(kept if keeps else dropped)}
    return a_rank("decode", 0, {"outcome": outcome, "finished": {"tokens": tokens, "text": "sky [bold]blue"}})


def a_result(prefill, decode, *, kill_rank=None):
    request = DemoRequest(
        prompt="why [/] so", prefill_tp=2, decode_tp=1, max_tokens=3, timeout_s=60.0, kill_rank=kill_rank
    )
    reference = a_rank("reference", 0, {"finished": {"tokens": TOKENS, "text": "sky [bold]blue"}})
    return make_result(request, Path("/models/tiny"), prefill, decode, reference, total_s=4.04)


def a_kept_result():
    return a_result([a_prefill_rank(0), a_prefill_rank(1)], [a_decode_rank()])


def a_dropped_result():
    killed = a_prefill_rank(1, sends=False, killed_at_s=12.25)
    return a_result([a_prefill_rank(0), killed], [a_decode_rank(keeps=False)], kill_rank=1)


def printed(result):
    out = io.StringIO()
    print_result(Console(file=out, width=100), result)
    return out.getvalue()


def test_a_kept_handoff_has_figures_for_every_rank():
    result = json.loads(json.dumps(a_kept_result().as_json()))

    assert result["identical"] is True
    assert (result["tokens"], result["reference_tokens"]) == (TOKENS, TOKENS)
    assert (result["verdict"], result["fallback"], result["causes"]) == ("keep", None, {})
    assert result["payload_bytes"] == 2000
    assert result["handoff_ms"] == pytest.approx(2500.0)
    assert [(row["role"], row["rank"], row["heads"], row["state"]) for row in result["ranks"]] == [
        ("prefill", 0, [0], "sent"),
        ("prefill", 1, [1], "sent"),
        ("decode", 0, [0, 1], "kept"),
    ]
    assert [row["send_ms"] for row in result["ranks"]] == [500.0, 500.0, None]


def test_wake_up_is_counted_from_when_a_payload_was_published_and_waited_for():
    row = a_kept_result().ranks[-1]

    assert row.wake_up_ms == pytest.approx(500.0)
    assert row.receive_ms == pytest.approx(500.0)


def test_a_payload_that_is_here_before_its_sender_has_returned_is_not_late():
    prefill = [a_prefill_rank(0), a_prefill_rank(1)]
    for rank in prefill:
        rank.events["sent"]["sent_s"] += 60.0

    assert a_result(prefill, [a_decode_rank()]).ranks[-1].wake_up_ms == 0.0


def test_a_dropped_handoff_says_who_was_killed_and_what_every_rank_did():
    result = a_dropped_result()

    assert result.identical
    assert (result.verdict, result.fallback, result.killed_rank) == ("drop", "recompute", 1)
    assert result.causes == {"0": DROPPED}
    assert result.payload_bytes == 1000
    assert result.noticed_ms == pytest.approx(250.0)
    assert [row.state for row in result.ranks] == ["sent", "killed before it sent", "dropped, recomputed the prompt"]


def test_other_tokens_on_any_decode_rank_are_not_identical():
    prefill = [a_prefill_rank(0), a_prefill_rank(1)]
    result = a_result(prefill, [a_decode_rank(), a_decode_rank([5, 6, 8])])

    assert not result.identical
    assert "identical   no: [5, 6, 8] against [5, 6, 7]" in printed(result)


@pytest.mark.parametrize("result", [a_kept_result(), a_dropped_result()], ids=["kept", "dropped"])
def test_the_page_fits_100_columns_and_shows_brackets_as_they_are(result):
    page = printed(result)

    assert max(len(line.rstrip()) for line in page.splitlines()) <= 100
    assert "why [/] so" in page
    assert "sky [bold]blue" in page
    assert "identical   yes" in page
    assert result.ranks[-1].state in page


def test_the_page_says_why_a_handoff_was_dropped():
    assert f"decode {DROPPED}" in printed(a_dropped_result())
