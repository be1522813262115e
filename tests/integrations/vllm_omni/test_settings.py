"""An engine's configuration, read into the published settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omnikv.errors import ConfigError, TopologyError
from omnikv.integrations.vllm_omni.settings import (
    OmniKVCacheConfig,
    channel_address,
    choose_topology,
    connector_of_transfer_config,
    read_settings,
    recv_stages,
    require_edge,
    require_sound,
    send_stages,
    vote_rules,
    wants_async_prefetch,
)


def test_every_setting_is_read_from_its_published_name():
    config = read_settings(
        {
            "connector_config": {"type": "shm"},
            "omni_from_stage": "0",
            "omni_to_stage": "1",
            "stage_id": 1,
            "engine_input_source": [0],
            "need_recv_cache": True,
            "need_send_cache": True,
            "recv_timeout": 2,
            "rank_mapping": {"from_tp": "2", "to_tp": 4},
            "kv_prefetch_min_free_mem_ratio": 0.25,
        },
        async_prefetch=True,
    )
    assert config == OmniKVCacheConfig(
        connector_config={"type": "shm"},
        from_stage="0",
        to_stage="1",
        stage_id=1,
        engine_input_source=[0],
        need_recv_cache=True,
        need_send_cache=True,
        recv_timeout=2.0,
        from_tp=2,
        to_tp=4,
        enable_kv_async_prefetch=True,
        kv_prefetch_min_free_mem_ratio=0.25,
    )


@pytest.mark.parametrize("raw", [None, {}, "shm", 3])
def test_without_a_mapping_nothing_is_transferred(raw):
    assert read_settings(raw) == OmniKVCacheConfig()


def test_a_rank_mapping_that_is_none_counts_as_absent():
    assert read_settings({"rank_mapping": "2x4", "stage_id": 1}).from_tp == 1


@pytest.mark.parametrize(
    "raw", [{"rank_mapping": {"from_tp": "two"}}, {"recv_timeout": "soon"}, {"recv_timeout": None}]
)
def test_a_setting_that_is_no_number_is_an_error(raw):
    with pytest.raises(ConfigError, match="no number"):
        read_settings(raw)


@pytest.mark.parametrize(
    ("raw", "has_companion", "wanted"),
    [
        ({"enable_kv_async_prefetch": True}, False, True),
        ({"enable_kv_async_prefetch": True}, True, False),
        ({"enable_kv_async_prefetch": False}, False, False),
        ({}, False, False),
        (None, False, False),
        ({"enable_kv_async_prefetch": True, "connector_config": {"memory_pool_device": "CUDA"}}, False, False),
        ({"enable_kv_async_prefetch": True, "connector_config": {"memory_pool_device": "CPU"}}, False, True),
    ],
)
def test_prefetching_must_be_asked_for_and_nothing_may_stand_against_it(raw, has_companion, wanted):
    assert wants_async_prefetch(raw, has_companion=has_companion) is wanted


def test_a_connector_is_found_in_vllms_own_configuration():
    direct = SimpleNamespace(omni_connector_config={"type": "a"})
    nested = SimpleNamespace(kv_connector_extra_config={"omni_connector_config": {"type": "b"}})
    assert connector_of_transfer_config(direct) == {"type": "a"}
    assert connector_of_transfer_config(nested) == {"type": "b"}
    assert connector_of_transfer_config(SimpleNamespace(kv_connector_extra_config={"other": 1})) is None
    assert connector_of_transfer_config(None) is None


@pytest.mark.parametrize(
    ("config", "edge"),
    [
        ({"stage_id": 2, "engine_input_source": [1, 0]}, ("1", "2")),
        ({"stage_id": 2}, ("1", "2")),
        ({"stage_id": "decode", "from_stage": "prefill"}, ("prefill", "decode")),
        ({"stage_id": 1, "engine_input_source": [0]}, ("0", "1")),
        ({"stage_id": "decode"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_receiving_edge(config, edge):
    assert recv_stages(OmniKVCacheConfig(**config)) == edge


@pytest.mark.parametrize(
    ("config", "edge"),
    [
        ({"from_stage": "0", "to_stage": "1"}, ("0", "1")),
        ({"from_stage": 0, "to_stage": 1}, ("0", "1")),
        ({"from_stage": "0"}, (None, None)),
        ({"from_stage": "", "to_stage": "1"}, (None, None)),
    ],
)
def test_the_sending_edge(config, edge):
    assert send_stages(OmniKVCacheConfig(**config)) == edge


def test_a_missing_edge_is_an_error_that_names_its_settings():
    with pytest.raises(ConfigError, match="set omni_to_stage"):
        require_edge("omni_to_stage", (None, None))


def test_d04_default_sizes_and_sizes_of_one_mean_the_same_on_both_sides():
    default = choose_topology(OmniKVCacheConfig(), local_rank=0, detected_tp=1)
    explicit = choose_topology(OmniKVCacheConfig(from_tp=1, to_tp=1), local_rank=0, detected_tp=1)
    assert default == explicit


def test_configured_sizes_win_over_detected_ones():
    topology = choose_topology(OmniKVCacheConfig(from_tp=1, to_tp=4), local_rank=3, detected_tp=8)
    assert (topology.source_tp_size, topology.target_tp_size, topology.local_rank) == (1, 4, 3)


def test_a_size_of_zero_is_an_error():
    with pytest.raises(TopologyError):
        choose_topology(OmniKVCacheConfig(from_tp=0, to_tp=4), local_rank=0, detected_tp=8)


# Where the other hosts of a stage reach the rank that leads the vote


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("node-1.cluster:7001", ("node-1.cluster", 7001)),
        ("[fd00::2]", ("fd00::2", 0)),
        ("[fd00::2]:7001", ("fd00::2", 7001)),
    ],
)
def test_a_channels_address_is_a_host_with_or_without_a_port(given, address):
    assert channel_address(OmniKVCacheConfig(kv_channel_address=given), {}) == address
    assert channel_address(OmniKVCacheConfig(), {"OMNIKV_KV_CHANNEL_ADDRESS": given}) == address


def test_the_setting_goes_before_the_environment_and_without_either_there_is_no_address():
    config = OmniKVCacheConfig(kv_channel_address="10.0.0.5")
    assert channel_address(config, {"OMNIKV_KV_CHANNEL_ADDRESS": "10.0.0.6"}) == ("10.0.0.5", 0)
    assert channel_address(OmniKVCacheConfig(), {}) is None
    assert channel_address(OmniKVCacheConfig(kv_channel_address=""), {"OMNIKV_KV_CHANNEL_ADDRESS": ""}) is None


@pytest.mark.parametrize(
    "wrong", ["0.0.0.0", "0.0.0.0:7001", "[::]", "::", "fd00::2", "host:", "host:70000", "a b", "http://host", 7001]
)
def test_an_address_that_others_cannot_reach_or_read_is_refused_at_once(wrong):
    with pytest.raises(ConfigError, match=r"kv_channel_address .* must be 'host' or 'host:port'"):
        channel_address(OmniKVCacheConfig(kv_channel_address=wrong), {})


def test_the_settings_of_a_vote_are_read_from_the_engines_configuration():
    config = read_settings({"kv_round_timeout": "0.25", "kv_channel_address": "10.0.0.5:7001"})
    assert config.kv_channel_address == "10.0.0.5:7001"
    assert vote_rules(config).slice_s == 0.25


@pytest.mark.parametrize("name", ["recv_timeout", "kv_vote_timeout", "kv_round_timeout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, None, "30", True])
def test_a_time_that_no_receive_can_keep_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a finite number of seconds"):
        require_sound(OmniKVCacheConfig(**{name: value}))


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_x01_a_number_of_heads_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="kv_num_heads"):
        require_sound(OmniKVCacheConfig(kv_num_heads=value))


def test_a_receive_may_look_once_and_a_model_may_have_one_head():
    require_sound(OmniKVCacheConfig(recv_timeout=0, kv_vote_timeout=0, kv_num_heads=1))


def test_no_list_of_required_roles_is_an_empty_one():
    assert vote_rules(OmniKVCacheConfig(kv_required_roles=None)).required_roles == ()
