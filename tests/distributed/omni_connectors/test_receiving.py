"""What a receiver asks for, from whom, and what it makes of what comes."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

A, B = {"host": "a", "zmq_port": 1000}, {"host": "b", "zmq_port": 2000}
PLAIN = ("0", "1", "omni_0_to_1_kv_cache_r1")


def key(source, target):
    return ("0", "1", f"r1_0_0_{source}_{target}")


# Where the sender is


def test_the_senders_base_is_kept_and_its_port_adjusted_to_this_rank(make_receiver):
    receiver = make_receiver(rank=2, from_tp=4, to_tp=4, connector_config={"type": "mock"})
    receiver.update_sender_info(A)
    assert (receiver._sender_base_host, receiver._sender_base_zmq_port) == ("a", 1000)
    assert receiver.config.connector_config["sender_host"] == "a"
    assert receiver.config.connector_config["sender_zmq_port"] == 1000 + 2 * 16


@pytest.mark.parametrize("table", [{0: A, 1: B}, {"0": A, "1": B}])
def test_d12_a_table_of_stages_is_read_at_the_expected_one(make_receiver, table):
    receiver = make_receiver(stage_id=2, engine_input_source=[1])
    receiver.update_sender_info(table)
    assert receiver._sender_base_host == "b"
    receiver.update_sender_info(table, sender_stage_id=0)
    assert receiver._sender_base_host == "a"


@pytest.mark.parametrize("table", [{0: A, 1: B}, "a:1000", {1: {"port": 3}}, {"host": "a", "zmq_port": "none"}])
def test_d12_sender_info_that_names_no_sender_fails_the_receive_at_once(
    make_receiver, connector, request_of, caplog, table
):
    receiver = make_receiver(stage_id=8, engine_input_source=[7], connector=connector, recv_timeout=600)
    req = request_of()
    req.kv_sender_info = table
    assert receiver.receive_multi_kv_cache_distributed(req) is False
    assert connector.asked == []
    assert receiver.counters == {"sender_unknown": 1, "receive_failed": 1}
    assert len([record for record in caplog.records if "sender info" in record.getMessage()]) == 2


def test_d12_the_error_for_an_unknown_stage_lists_the_known_ones(make_receiver, caplog):
    make_receiver(stage_id=8, engine_input_source=[7]).update_sender_info({0: A, "1": B})
    assert "known stages are 0, '1'" in caplog.text


def test_d12_the_next_request_with_good_info_is_received(make_receiver, connector, request_of, packed):
    receiver = make_receiver(connector=connector)
    receiver.update_sender_info("nonsense")
    connector.kept[PLAIN] = packed()
    req = request_of()
    req.kv_sender_info = {"0": A}
    assert receiver.receive_kv_cache(req)


def test_the_only_entry_of_a_table_is_taken_as_released_engines_do(make_receiver, caplog):
    receiver = make_receiver(stage_id="decode", from_stage="prefill")
    receiver.update_sender_info({0: A})
    assert receiver._sender_base_host == "a"
    assert receiver.counters == {"sender_assumed": 1}
    assert "'prefill'" in caplog.text


def test_a_stage_that_receives_no_kv_keeps_no_sender_unless_its_connector_receives(make_manager):
    manager = make_manager(stage_id=1)
    manager.update_sender_info(A)
    assert manager._sender_base_host is None
    manager = make_manager(stage_id=1, connector_config={"type": "mock", "role": "receiver"})
    manager.update_sender_info(A)
    assert manager._sender_base_host == "a"


def test_engines_resolve_the_sender_of_other_payloads_too(make_receiver):
    receiver = make_receiver()
    assert receiver._resolve_sender_info({0: A, 1: B}) == A
    assert receiver._resolve_sender_info({0: A, 1: B}, 1) == B
    assert receiver._resolve_sender_info(A, 9) == A
    assert receiver._resolve_sender_info({0: A, 1: B}, 9) is None
    assert receiver._resolve_sender_info({}) is None


# What is asked


def test_without_ranks_no_sender_is_named(make_receiver, connector):
    receiver = make_receiver(connector=connector)
    receiver.update_sender_info(A)
    receiver.receive_kv_cache_for_request("r1")
    assert {repr(metadata) for _, metadata in connector.asked} == {"None"}


@pytest.mark.parametrize(
    ("from_tp", "to_tp", "rank", "ports"), [(2, 2, 1, {1016}), (4, 2, 1, {1032, 1048}), (2, 4, 3, {1016})]
)
def test_each_shard_is_asked_of_the_rank_that_has_it(make_receiver, connector, from_tp, to_tp, rank, ports):
    receiver = make_receiver(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp)
    receiver.update_sender_info(A)
    assert receiver.receive_kv_cache_for_request("r1") == (None, 0)
    assert {metadata["source_port"] for _, metadata in connector.asked} == ports
    assert {metadata["source_host"] for _, metadata in connector.asked} == {"a"}


def test_a_sender_that_comes_with_the_call_wins_and_is_not_remembered(make_receiver, connector):
    receiver = make_receiver(connector=connector)
    receiver.update_sender_info(A)
    receiver.receive_kv_cache_for_request("r1", sender_info={0: B})
    assert connector.asked[0][1] == {"source_host": "b", "source_port": 2000}
    assert receiver._sender_base_host == "a"


@pytest.mark.parametrize("sender_info", [{}, {"host": "b"}, {1: A, 2: B}])
def test_a_sender_that_comes_with_the_call_and_cannot_be_used_fails_it_at_once(make_receiver, connector, sender_info):
    receiver = make_receiver(connector=connector, recv_timeout=600)
    receiver.update_sender_info(A)
    assert receiver.receive_kv_cache_for_request("r1", sender_info=sender_info) == (None, 0)
    assert connector.asked == []


def test_d13_a_key_builder_of_the_engines_keeps_its_source_ranks(make_receiver, connector, packed, heads_of):
    connector.kept |= {("0", "1", "x"): packed([4]), ("0", "1", "y"): packed([5])}
    receiver = make_receiver(connector=connector, rank=1, from_tp=4, to_tp=2)
    receiver.update_sender_info(A)
    receiver.kv_recv_key_builder = lambda request_id, from_stage, to_stage: ["x", "y"]
    data, _ = receiver.receive_kv_cache_for_request("r1")
    assert heads_of(data) == [4, 5]
    assert [metadata["source_port"] for _, metadata in connector.asked] == [1032, 1048]


def test_d13_a_key_builder_that_does_not_match_the_topology_is_an_error_and_no_stall(make_receiver, connector, caplog):
    receiver = make_receiver(connector=connector, rank=1, from_tp=4, to_tp=2, recv_timeout=600)
    receiver.kv_recv_key_builder = lambda *_: ["only one"]
    assert receiver.receive_kv_cache_for_request("r1") == (None, 0)
    assert "returned 1 plain keys" in caplog.text


@pytest.mark.parametrize("config", [{"need_recv_cache": False}, {"stage_id": None}])
def test_a_stage_that_receives_nothing_asks_for_nothing(make_receiver, connector, config):
    receiver = make_receiver(connector=connector, **config)
    assert receiver.receive_kv_cache_for_request("r1") == (None, 0)
    assert connector.asked == []


def test_a_warm_up_request_is_not_waited_for(make_receiver, connector):
    receiver = make_receiver(connector=connector, recv_timeout=600)
    assert receiver.receive_kv_cache_for_request("dummy_req_id/2") == (None, 0)
    assert connector.asked == []


def test_a_receiver_without_a_connector_says_so(make_receiver, caplog):
    assert make_receiver().receive_kv_cache_for_request("r1") == (None, 0)
    assert "no connector" in caplog.text


# What comes of it


def test_shards_are_joined_in_rank_order(make_receiver, connector, packed, heads_of):
    connector.kept |= {key(2, 1): packed([4]), key(3, 1): packed([5])}
    data, nbytes = make_receiver(connector=connector, rank=1, from_tp=4, to_tp=2).receive_kv_cache_for_request("r1")
    assert heads_of(data) == [4, 5]
    assert nbytes == len(packed([4])) + len(packed([5]))


def test_a_whole_shard_is_cut_to_this_rank(make_receiver, connector, packed, heads_of):
    connector.kept[key(0, 1)] = packed([4, 5])
    data, _ = make_receiver(connector=connector, rank=1, from_tp=1, to_tp=2).receive_kv_cache_for_request("r1")
    assert heads_of(data) == [5]
    assert data["metadata"]["tp_head_slice"]["side"] == "receiver"


def test_hooks_join_and_cut_in_the_engines_own_way(make_receiver, connector, packed):
    connector.kept |= {key(0, 0): packed([4]), key(1, 0): packed([5])}
    receiver = make_receiver(connector=connector, from_tp=2, to_tp=1)
    receiver.kv_payload_merger = lambda shards: {"shards": len(shards)}
    receiver.kv_payload_slicer = lambda payload: payload | {"sliced": True}
    assert receiver.receive_kv_cache_for_request("r1")[0] == {"shards": 2, "sliced": True}


def test_x03_a_layer_missing_in_one_shard_is_no_payload(make_receiver, connector, packed, caplog):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    hollow = KVCacheTransferData("r1", {"key_cache": [None], "value_cache": [None]}, [], {}).to_bytes()
    connector.kept |= {key(0, 0): packed([4]), key(1, 0): hollow}
    assert make_receiver(connector=connector, from_tp=2, to_tp=1).receive_kv_cache_for_request("r1") == (None, 0)
    assert "key_cache layer 0 is missing in the shard of source rank 1" in caplog.text


def test_x04_shards_of_different_dtype_are_no_payload(make_receiver, connector, packed, caplog):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    half = torch.ones(3, 1, 4, dtype=torch.float16)
    other = KVCacheTransferData("r1", {"key_cache": [half], "value_cache": [half]}, [], {}).to_bytes()
    connector.kept |= {key(0, 0): packed([4]), key(1, 0): other}
    assert make_receiver(connector=connector, from_tp=2, to_tp=1).receive_kv_cache_for_request("r1") == (None, 0)
    assert "torch.float16" in caplog.text


def test_x05_a_shard_cut_for_another_rank_is_no_payload(make_receiver, connector, packed, caplog):
    stamp = {"tp_head_slice": {"applied": True, "target_rank": 3, "from_tp": 2, "to_tp": 4}}
    connector.kept[key(0, 0)] = packed([1], metadata=stamp)
    assert make_receiver(connector=connector, from_tp=2, to_tp=4).receive_kv_cache_for_request("r1") == (None, 0)
    assert "cut for target_rank=3" in caplog.text


def test_x06_requests_whose_published_keys_collide_do_not_get_each_others_kv(make_receiver, connector, packed, caplog):
    # "a_1" leaving stage "0" and "a" leaving stage "1_0" have one key; a connector that ignores edges mixes them up.
    connector.kept["1_0", "2", "a_1_0_0_0_0"] = packed(request_id="a_1")
    receiver = make_receiver(connector=connector, stage_id=2, engine_input_source=["1_0"], from_tp=2, to_tp=2)
    assert receiver.receive_kv_cache_for_request("a") == (None, 0)
    assert "belongs to request 'a_1'" in caplog.text


def test_a_damaged_payload_is_told_in_one_line(make_receiver, connector, packed, caplog):
    connector.kept[PLAIN] = packed()[:-1]
    receiver = make_receiver(connector=connector)
    assert receiver.receive_kv_cache_for_request("r1") == (None, 0)
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert receiver.counters == {"receive_failed": 1}


def test_a_payload_that_came_and_was_lost_afterwards_is_told_apart(make_receiver, connector, packed, monkeypatch):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVPrefetchConsumeError

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("omnikv.handoff.keyed_assemble.move_tensors", full)
    connector.kept[PLAIN] = packed()
    with pytest.raises(KVPrefetchConsumeError, match="no room"):
        make_receiver(connector=connector).receive_kv_cache_for_request("r1")


def test_a_timeout_is_kept_and_names_what_is_missing(make_receiver, connector, packed, caplog):
    connector.kept[key(0, 0)] = packed([4])
    receiver = make_receiver(connector=connector, from_tp=2, to_tp=1, recv_timeout=0.05)
    started = time.monotonic()
    assert receiver.receive_kv_cache_for_request("r1") == (None, 0)
    assert time.monotonic() - started >= 0.05
    assert "source rank 1" in caplog.text


def test_received_kv_is_set_in_both_places_where_pipelines_look(make_receiver, connector, request_of, packed, heads_of):
    connector.kept[PLAIN] = packed([7])
    req = request_of()
    assert make_receiver(connector=connector).receive_kv_cache(req)
    assert heads_of(req.past_key_values) == [7]
    assert req.sampling_params.past_key_values is req.past_key_values
    assert req.kv_metadata == req.sampling_params.kv_metadata == {"seq_len": 3}


def test_a_request_without_sampling_parameters_gets_its_kv_too(make_receiver, connector, packed):
    connector.kept[PLAIN] = packed([7])
    req = SimpleNamespace(request_id="r1", sampling_params=None)
    assert make_receiver(connector=connector).receive_kv_cache(req)
    assert req.kv_metadata == {"seq_len": 3}


@pytest.mark.parametrize("request_id", [None, ""])
def test_a_request_without_an_id_receives_nothing(make_receiver, connector, request_of, request_id):
    assert not make_receiver(connector=connector).receive_kv_cache(request_of(request_id))


# Companions


def companions(request_id, companion_ids, manager, device):
    found = {}
    for role, companion_id in companion_ids.items():
        data, _ = manager.receive_kv_cache_for_request(companion_id, device)
        if data:
            found |= {f"{role}_past_key_values": SimpleNamespace(**data["layer_blocks"])}
    return found


def test_companions_are_collected_by_the_models_function(make_receiver, connector, request_of, packed, heads_of):
    connector.kept |= {PLAIN: packed([7]), ("0", "1", "omni_0_to_1_kv_cache_c1"): packed([8], request_id="c1")}
    req = request_of(cfg_kv_request_ids={"cfg_text": "c1"})
    assert make_receiver(connector=connector).receive_multi_kv_cache(req, companions)
    assert heads_of(req.sampling_params.cfg_text_past_key_values) == [8]


def test_without_companions_the_function_is_not_called(make_receiver, connector, request_of, packed):
    connector.kept[PLAIN] = packed([7])
    assert make_receiver(connector=connector).receive_multi_kv_cache(request_of(), pytest.fail)


def test_a_collector_that_fails_is_counted_and_does_not_take_the_primary_along(
    make_receiver, connector, request_of, packed
):
    def broken(*_):
        raise RuntimeError("model bug")

    connector.kept[PLAIN] = packed([7])
    receiver = make_receiver(connector=connector)
    assert receiver.receive_multi_kv_cache(request_of(cfg_kv_request_ids={"cfg_text": "c1"}), broken)
    assert receiver.counters["companions_failed"] == 1


# What it makes of replicated heads


@pytest.mark.parametrize(("num_heads", "from_tp", "to_tp"), [(2, 4, 2), (2, 4, 1), (3, 6, 3), (4, 8, 2)])
def test_x01_d19_a_head_that_several_senders_hold_is_received_once(
    make_receiver, connector, packed, heads_of, num_heads, from_tp, to_tp
):
    held = [sender * num_heads // from_tp for sender in range(from_tp)]
    for rank in range(to_tp):
        receiver = make_receiver(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp, kv_num_heads=num_heads)
        senders = range(rank * from_tp // to_tp, (rank + 1) * from_tp // to_tp)
        connector.kept |= {key(sender, rank): packed(heads=(held[sender],)) for sender in senders}
        received, _ = receiver.receive_kv_cache_for_request("r1")
        assert heads_of(received) == sorted({held[sender] for sender in senders})


@pytest.mark.parametrize(("num_heads", "from_tp", "to_tp"), [(2, 4, 2), (2, 4, 1), (3, 6, 3)])
def test_x01_a_sender_that_knows_its_model_says_which_heads_are_copies(
    make_sender, make_receiver, connector, heads_of, num_heads, from_tp, to_tp
):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    for rank in range(from_tp):
        sender = make_sender(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp, kv_num_heads=num_heads)
        held = torch.full((3, 1, 4), float(rank * num_heads // from_tp))
        payload = KVCacheTransferData("r1", {"key_cache": [held], "value_cache": [held]}, [0], {"seq_len": 3})
        sender._transfer_kv_cache(payload, "r1")
    for rank in range(to_tp):
        receiver = make_receiver(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp)
        received, _ = receiver.receive_kv_cache_for_request("r1")
        assert heads_of(received) == list(range(rank * num_heads // to_tp, (rank + 1) * num_heads // to_tp))
        assert received["metadata"] == {"seq_len": 3}


def test_x01_senders_that_do_not_agree_on_their_model_are_refused(make_receiver, connector, packed):
    for sender, stated in ((0, 2), (1, 3)):
        connector.kept[key(sender, 0)] = packed(metadata={"seq_len": 3, "tp_num_kv_heads": stated})
    receiver = make_receiver(connector=connector, rank=0, from_tp=4, to_tp=2)
    assert receiver.receive_kv_cache_for_request("r1") == (None, 0)


@pytest.mark.parametrize(("num_heads", "from_tp", "to_tp"), [(2, 2, 4), (8, 8, 16), (1, 1, 2)])
def test_x02_d18_a_receiver_among_more_ranks_than_heads_gets_its_copy(
    make_receiver, connector, packed, heads_of, num_heads, from_tp, to_tp
):
    for rank in range(to_tp):
        sender = rank * from_tp // to_tp
        connector.kept[key(sender, rank)] = packed(heads=(sender,))
        receiver = make_receiver(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp)
        received, _ = receiver.receive_kv_cache_for_request("r1")
        assert heads_of(received) == [rank * num_heads // to_tp]
