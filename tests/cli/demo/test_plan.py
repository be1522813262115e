"""A demo that cannot work is refused before anything starts."""

import json
from dataclasses import replace

import pytest

from omnikv.cli.demo.plan import DemoRequest, ModelShape, RankJob, read_model_shape
from omnikv.errors import ConfigError

SMOLLM2_SHAPE = ModelShape(num_attention_heads=9, num_kv_heads=3, intermediate_size=1536, num_layers=30, head_dim=64)


def a_request(**changes):
    settings = {"prompt": "hello", "prefill_tp": 3, "decode_tp": 1, "max_tokens": 4, "timeout_s": 60.0}
    return DemoRequest(**{**settings, **changes})


def a_model_dir(path, config):
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    (path / "model.safetensors").touch()
    return path


@pytest.mark.parametrize("decode_tp", [1, 2, 3, 4, 9])
def test_any_size_that_leaves_every_rank_a_query_head_fits(decode_tp):
    a_request(decode_tp=decode_tp).require_fit(SMOLLM2_SHAPE)


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(
        ConfigError, match=r"--decode-tp 10 leaves ranks .* without a query head: it has 9 on 3 KV heads"
    ):
        a_request(decode_tp=10).require_fit(SMOLLM2_SHAPE)


def test_query_heads_that_are_no_multiple_of_the_kv_heads_are_refused():
    with pytest.raises(ConfigError, match="8 query heads are no multiple of 3 KV heads"):
        replace(SMOLLM2_SHAPE, num_attention_heads=8)


@pytest.mark.parametrize(
    ("tp_size", "heads"),
    [
        (2, [(0, 1, 2, 3, 4, 5), (6, 7, 8)]),
        (3, [(0, 1, 2), (3, 4, 5), (6, 7, 8)]),
        (4, [(0,), (1, 2), (3, 4, 5), (6, 7, 8)]),
    ],
)
def test_every_rank_has_the_query_heads_that_read_its_kv_heads(tp_size, heads):
    assert SMOLLM2_SHAPE.query_heads(tp_size) == heads


def test_sizes_that_work_give_every_rank_equal_shares():
    assert replace(SMOLLM2_SHAPE, num_attention_heads=32, num_kv_heads=8, intermediate_size=12).tp_sizes() == [1, 2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "--prompt is empty"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
        ({"prompt": "a\udcff"}, r"--prompt is no text in UTF-8: 'a\\udcff'"),
        ({"timeout_s": 0.0}, "--timeout-s must be above 0"),
        ({"timeout_s": float("nan")}, "--timeout-s must be above 0"),
        ({"timeout_s": float("inf")}, "--timeout-s must be above 0 and at most 86400 seconds"),
        ({"prefill_tp": 0}, "--prefill-tp must be at least 1, got 0"),
        ({"kill_rank": 3}, "--kill-rank 3 is no prefill rank: there are 3, 0 to 2"),
        ({"kill_rank": -1}, "--kill-rank -1 is no prefill rank"),
    ],
)
def test_a_setting_out_of_range_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        a_request(**changes)


def test_the_shape_of_a_model_comes_from_its_configuration(tmp_path):
    config = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "head_dim": 64,
    }
    assert read_model_shape(a_model_dir(tmp_path, config)) == SMOLLM2_SHAPE


def test_a_configuration_without_kv_heads_or_their_size_has_those_of_the_query_heads(tmp_path):
    config = {"num_attention_heads": 6, "intermediate_size": 12, "num_hidden_layers": 1, "hidden_size": 48}
    shape = read_model_shape(a_model_dir(tmp_path, config))
    assert (shape.num_kv_heads, shape.head_dim) == (6, 8)


@pytest.mark.parametrize("config", ["not json", "[]", {"intermediate_size": 4}, {"num_attention_heads": "many"}])
def test_a_configuration_of_another_kind_is_refused(tmp_path, config):
    with pytest.raises(ConfigError, match="is not the configuration of a Llama-like model"):
        read_model_shape(a_model_dir(tmp_path, config))


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no model: it needs a config\.json"):
        read_model_shape(tmp_path)


def test_every_rank_states_the_same_route_and_its_own_heads():
    jobs = [
        RankJob(
            role=role,
            rank=rank,
            model_dir="m",
            prompt="p",
            max_tokens=4,
            num_layers=2,
            num_kv_heads=3,
            head_dim=8,
            prefill_tp=3,
            decode_tp=1,
            namespace="n",
            group_file="f",
            receive_timeout_s=1.0,
            timeout_s=2.0,
        )
        for role, rank in (("prefill", 2), ("decode", 0))
    ]

    assert jobs[0].route() == jobs[1].route()
    assert [job.heads() for job in jobs] == [(2,), (0, 1, 2)]
    assert jobs[0].model_facts() == jobs[1].model_facts()
    assert RankJob.from_message(json.loads(json.dumps(jobs[0].to_message()))) == jobs[0]
