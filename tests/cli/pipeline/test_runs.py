"""Pipelines of real processes, in every mix of roles and with every fault: the picture is the reference's."""

from __future__ import annotations

import pytest

from omnikv.cli.pipeline.plan import PipelineRequest
from omnikv.cli.pipeline.result import TOLERANCE
from omnikv.cli.pipeline.run import MISSING_TIMEOUT_S, RECEIVE_TIMEOUT_S, run_pipeline

STEPS = 2


@pytest.fixture
def run(nursery, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run_to_the_end(**sizes):
        steps = []
        result = run_pipeline(
            PipelineRequest(prompt="A lighthouse", steps=STEPS, **sizes), steps.append, nursery=nursery
        )
        assert result.matches
        assert result.max_difference <= TOLERANCE
        return result

    return run_to_the_end


MIXES = {
    "TP 2 -> TP 2": {"ar_tp": 2, "dit_tp": 2, "cfg": 1},
    "TP 2 -> TP 1 x CFG 3": {"ar_tp": 2, "dit_tp": 1, "cfg": 3},
    "TP 1 -> TP 2 x CFG 2": {"ar_tp": 1, "dit_tp": 2, "cfg": 2},
    "TP 2 -> TP 1 x SP 2": {"ar_tp": 2, "dit_tp": 1, "cfg": 1, "sp": 2},
    "TP 2 -> TP 2 x SP 2": {"ar_tp": 2, "dit_tp": 2, "cfg": 1, "sp": 2},
    "TP 1 -> TP 2 x CFG 2 x SP 2": {"ar_tp": 1, "dit_tp": 2, "cfg": 2, "sp": 2},
    "TP 1 -> TP 1 x CFG 2 x replicas 2": {"ar_tp": 1, "dit_tp": 1, "cfg": 2, "replicas": 2},
    "TP 2 -> TP 1 x CFG 2, one cache for all branches": {"ar_tp": 2, "dit_tp": 1, "cfg": 2, "shared_prefix": True},
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_draws_the_reference_s_picture_from_caches_that_came_byte_for_byte(run, mix):
    result = run(**MIXES[mix])
    assert result.mix == mix
    request = PipelineRequest(prompt="A lighthouse", **MIXES[mix])
    assert [picture.ending for picture in result.pictures] == ["kept"] * request.replicas
    for picture in result.pictures:
        rows = picture.ranks
        assert len(rows) == request.replica_size
        assert [row.byte_exact for row in rows] == [True] * len(rows)
        # One reader a tensor-parallel place fetched; what it and others gave is what the followers took.
        assert [row.reader for row in rows] == [row.place["cfg"] == row.place["sp"] == 0 for row in rows]
        assert [row.fetched_nbytes > 0 for row in rows] == [row.reader for row in rows]
        assert [row.taken_nbytes > 0 for row in rows] == [not row.reader for row in rows]
        assert sum(row.given_nbytes for row in rows) == sum(row.taken_nbytes for row in rows)
    fetched = sum(row.fetched_nbytes for picture in result.pictures for row in picture.ranks)
    assert fetched == sum(result.sent_nbytes)
    assert result.unread == 0


SMALL = {"ar_tp": 2, "dit_tp": 2, "cfg": 2, "fault_rank": 1}


def test_d01_a_late_companion_of_one_rank_is_waited_for_and_nobody_falls_back(run):
    result = run(fault="late", **SMALL)
    (picture,) = result.pictures
    assert picture.ending == "kept"
    assert all(row.rounds > 1 for row in picture.ranks)
    assert len({row.rounds for row in picture.ranks}) == 1
    assert [row.byte_exact for row in picture.ranks] == [True] * 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "rank 1 lacks cfg_text: nothing from source rank 1 by the deadline"),
        ("failed", "the prompt without its text could not be prefilled"),
        ("kill-ar", "rank 1 lacks cfg_text: ProducerFailed"),
    ],
)
def test_d01_what_one_rank_cannot_get_makes_all_ranks_fall_back_and_the_picture_is_the_same(run, fault, words):
    result = run(fault=fault, **SMALL)
    (picture,) = result.pictures
    assert picture.ending == "fallback"
    assert [row.verdict for row in picture.ranks] == ["drop"] * 4
    assert all(words in " ".join(row.causes) for row in picture.ranks)
    assert [row.byte_exact for row in picture.ranks] == [None] * 4
    slowest_s = max(row.receive_ms for row in picture.ranks) / 1000
    assert (slowest_s >= MISSING_TIMEOUT_S) if fault == "missing" else (slowest_s < RECEIVE_TIMEOUT_S)
    assert result.unread == 0


@pytest.mark.parametrize(("rank", "endings"), [(0, {"in doubt"}), (1, {"drop"})])
def test_a_killed_receiver_tears_its_replica_down_and_the_other_takes_over(run, rank, endings):
    result = run(ar_tp=1, dit_tp=1, cfg=2, replicas=2, fault="kill-dit", fault_rank=rank)
    first, torn, taken_over = result.pictures
    assert (first.replica, first.ending) == (0, "kept")
    assert (torn.replica, torn.number, torn.ending) == (1, 1, "torn down")
    assert {row.verdict for row in torn.ranks} == endings
    assert len(torn.ranks) == 1
    assert (taken_over.replica, taken_over.number, taken_over.ending) == (0, 1, "kept")


def test_a_slow_replica_holds_up_no_other(run):
    result = run(ar_tp=1, dit_tp=1, cfg=2, replicas=2, fault="slow-replica")
    quick, slow = result.pictures
    assert (quick.ending, slow.ending) == ("kept", "kept")
    # The slow one is served when the quick one has its picture: had that waited for it, the run would not have ended.
    assert [row.byte_exact for row in quick.ranks] == [True] * 2


@pytest.mark.parametrize("fault", ["failed", "kill-ar"])
def test_d03_a_fault_of_one_replica_s_request_leaves_the_other_replica_alone(run, fault):
    result = run(ar_tp=2, dit_tp=1, cfg=2, replicas=2, fault=fault, fault_rank=1)
    assert [(picture.replica, picture.ending) for picture in result.pictures] == [(0, "kept"), (1, "fallback")]
    assert [row.verdict for row in result.pictures[0].ranks] == ["keep"] * 2


def test_the_picture_is_written_and_nothing_else_is_left(nursery, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    picture = tmp_path / "picture.png"
    request = PipelineRequest(prompt="A lighthouse", ar_tp=1, dit_tp=1, cfg=1, steps=1)
    run_pipeline(request, lambda step: None, picture_path=picture, nursery=nursery)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]
