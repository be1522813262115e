"""The names, signatures and types that engines use."""

from __future__ import annotations

import dataclasses
import inspect

import pytest


@pytest.fixture
def module():
    from vllm_omni.distributed.omni_connectors import kv_transfer_manager

    return kv_transfer_manager


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", "self config async_prefetch"),
        ("from_od_config", "config"),
        ("from_model_config", "config"),
        ("from_vllm_config", "vllm_config model_config"),
        ("close", "self"),
        ("wait_prefetch", "self timeout"),
        ("shutdown_prefetch", "self"),
        (
            "handle_finished_requests_kv_transfer",
            "self finished_reqs kv_caches block_size cache_dtype request_id_resolver",
        ),
        ("update_sender_info", "self sender_info sender_stage_id"),
        ("_resolve_sender_info", "self sender_info sender_stage_id"),
        ("receive_kv_cache_for_request", "self request_id target_device sender_info"),
        ("receive_kv_cache", "self req target_device"),
        ("apply_kv_cache_to_request", "self req data"),
        ("receive_multi_kv_cache", "self req cfg_kv_collect_func target_device"),
        ("receive_multi_kv_cache_distributed", "self req cfg_kv_collect_func target_device"),
        ("consume_and_distribute_kv_cache", "self req target_device"),
        ("start_prefetch", "self kv_prefetch_job target_device"),
        ("consume_prefetched_kv", "self req"),
        ("distribute_kv_cache", "self req target_device received"),
        ("_tp_local_receive_consensus", "self req received"),
        ("_transfer_kv_cache", "self kv_data transfer_req_id"),
        ("_build_cfg_rank_local_payloads", "req cfg_size"),
        ("_collect_request_kv_payload", "req"),
        ("_clear_request_kv_payload", "req"),
        ("_apply_request_kv_payload", "req kv_payload target_device"),
    ],
)
def test_a_method_takes_the_published_parameters(module, method, parameters):
    found = inspect.signature(getattr(module.OmniKVTransferManager, method)).parameters
    assert " ".join(found) == parameters


def test_the_settings_have_the_published_fields_and_then_our_own(module):
    assert [field.name for field in dataclasses.fields(module.OmniKVCacheConfig)] == [
        "connector_config",
        "from_stage",
        "to_stage",
        "stage_id",
        "engine_input_source",
        "need_recv_cache",
        "need_send_cache",
        "recv_timeout",
        "from_tp",
        "to_tp",
        "enable_kv_async_prefetch",
        "kv_prefetch_min_free_mem_ratio",
        "kv_agreement",
        "kv_agreement_over",
        "kv_vote_timeout",
        "kv_round_timeout",
        "kv_required_roles",
        "kv_channel_address",
        "kv_layout",
        "kv_num_heads",
    ]


def test_a_layout_needs_no_tensor_parallel_group(module):
    layout = module._TransferTopoConfig(
        role=module.ReceiveRole.LOCAL,
        tp_active=False,
        cfg_size=1,
        cfg_rank=0,
        cfg_group=None,
        sp_size=1,
        sp_rank=0,
        sp_group=None,
        world=None,
    )
    assert (layout.tp_group, layout.tp_size) == (None, 1)


def test_a_lost_payload_is_a_runtime_error(module):
    assert issubclass(module.KVPrefetchConsumeError, RuntimeError)


def test_hooks_are_there_and_unset(make_manager):
    manager = make_manager()
    for hook in ("kv_send_key_builder", "kv_recv_key_builder", "kv_payload_merger", "kv_payload_slicer"):
        assert getattr(manager, hook) is None


def test_the_module_is_the_one_whose_globals_are_patched(module, make_manager):
    manager = make_manager(rank=3, tp=4)
    assert (manager.tp_topology.local_rank, manager.tp_topology.source_tp_size) == (3, 4)
    assert manager._tp_topo is manager.tp_topology


def test_configured_sizes_win_over_the_detected_one(make_manager):
    topology = make_manager(rank=1, tp=8, from_tp=2, to_tp=4).tp_topology
    assert (topology.source_tp_size, topology.target_tp_size) == (2, 4)


@pytest.fixture
def od_config():
    from types import SimpleNamespace

    return SimpleNamespace(
        omni_kv_config={"stage_id": 1, "need_recv_cache": True, "enable_kv_async_prefetch": True},
        cfg_kv_collect_func=None,
    )


def test_a_manager_is_made_from_a_stages_configuration(module, od_config):
    manager = module.OmniKVTransferManager.from_od_config(od_config)
    assert manager.recv_stages == ("0", "1")
    assert manager.send_stages == (None, None)
    assert manager.config.enable_kv_async_prefetch
    manager.close()


def test_a_collector_of_companions_turns_prefetching_off(module, od_config):
    od_config.cfg_kv_collect_func = print
    manager = module.OmniKVTransferManager.from_model_config(od_config)
    assert not manager.config.enable_kv_async_prefetch
    manager.close()


def test_vllms_configuration_is_asked_when_the_model_has_none(module, od_config):
    from types import SimpleNamespace

    nested = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"omni_connector_config": {"type": "x"}})
    )
    make = module.OmniKVTransferManager.from_vllm_config
    for manager, expected in (
        (make(nested, SimpleNamespace()), {"type": "x"}),
        (make(SimpleNamespace(), SimpleNamespace()), None),
        (make(nested, od_config), None),
    ):
        assert manager.config.connector_config == expected
        manager.close()


def test_vllms_configuration_says_how_many_kv_heads_the_model_has_where_the_settings_do_not(module):
    from types import SimpleNamespace

    vllms = SimpleNamespace(get_total_num_kv_heads=lambda: 2)
    make = module.OmniKVTransferManager.from_vllm_config
    for stated, expected in (({}, 2), ({"kv_num_heads": 8}, 8)):
        manager = make(SimpleNamespace(model_config=vllms), SimpleNamespace(omni_kv_config=stated))
        assert manager.config.kv_num_heads == expected
        manager.close()
    manager = make(SimpleNamespace(), vllms)
    assert manager.config.kv_num_heads == 2
    manager.close()


def test_a_connector_that_cannot_be_opened_is_tried_once(make_manager, caplog):
    manager = make_manager(connector_config={"type": "no such"})
    assert manager.connector is None
    assert manager.get_connector is None
    assert manager.counters == {"connector_failed": 1}
    assert len(caplog.records) == 1


def test_closing_closes_the_connector_once(make_manager, connector):
    manager = make_manager(connector=connector)
    manager.close()
    manager.close()
    assert connector.closed == 1
    assert manager.connector is None
