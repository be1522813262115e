"""What cannot be done is refused before a process starts, in words that name the option."""

import json

import pytest

from omnikv.cli.pipeline.plan import PipelineRequest, StageJob
from omnikv.errors import ConfigError, TopologyError


def a_request(**sizes):
    return PipelineRequest(prompt="A lighthouse", **sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"ar_tp": 3}, "--ar-tp must divide the model's 4 KV heads, got 3"),
        ({"dit_tp": 0}, "--dit-tp must divide"),
        ({"sp": 3}, "--sp must divide the picture's 256 latents, got 3"),
        ({"cfg": 0}, "--cfg must be at least 1"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"timeout_s": 0.0}, "--timeout-s must be above 0"),
        ({"dit_tp": 4, "cfg": 3, "sp": 8}, "98 processes are more than 64"),
        ({"fault": "flood"}, "--fault must be one of none, late, missing"),
        ({"fault": "kill-dit"}, "needs --replicas 2"),
        ({"fault": "slow-replica"}, "needs --replicas 2"),
        ({"fault": "late", "shared_prefix": True, "cfg": 2}, "--shared-prefix sends none"),
        ({"fault": "kill-ar", "fault_rank": 2}, "--fault-rank 2 is no rank: there are 2, 0 to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(sizes, words):
    with pytest.raises(ConfigError, match=words):
        a_request(**sizes)


@pytest.mark.parametrize("prompt", ["", "  ", "\udcff"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with pytest.raises(ConfigError, match="--prompt must be a text"):
        PipelineRequest(prompt=prompt)


def test_d07_a_shared_cache_for_three_ranks_is_refused_and_the_ranks_without_are_named():
    with pytest.raises(TopologyError, match="ranks 1, 2 of the guidance group of 3 would run without KV"):
        a_request(cfg=3, shared_prefix=True)


def test_branches_follow_the_guidance_group():
    assert a_request(cfg=1).branches == ("primary", "cfg_text", "cfg_img")
    assert a_request(cfg=2).branches == ("primary", "cfg_text")
    assert a_request(cfg=2, shared_prefix=True).roles == ("primary",)
    assert a_request(cfg=1, shared_prefix=True).branches == ("primary", "cfg_text")


def test_the_mix_is_said_in_words():
    assert a_request(ar_tp=1, dit_tp=2, cfg=2, sp=2, replicas=2).mix == "TP 1 -> TP 2 x CFG 2 x SP 2 x replicas 2"
    assert a_request(ar_tp=2, dit_tp=1, cfg=2, shared_prefix=True).mix == (
        "TP 2 -> TP 1 x CFG 2, one cache for all branches"
    )


def test_a_job_survives_the_way_to_its_rank():
    job = StageJob(
        stage="dit",
        rank=3,
        request=a_request(fault="late", fault_rank=1),
        namespace="n",
        folder="/somewhere",
        receive_timeout_s=2.0,
    )
    assert StageJob.from_message(json.loads(json.dumps(job.to_message()))) == job
    assert (job.title, job.program) == ("dit rank 3", "omnikv.cli.pipeline.dit_rank")
