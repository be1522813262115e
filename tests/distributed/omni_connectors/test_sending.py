"""What a sender puts, under which keys, and what comes back to the engine."""

from __future__ import annotations

import pytest
import torch

BLOCK_SIZE = 4


@pytest.fixture
def kv_caches():
    """Two layers of 6 blocks with 2 heads, every value different."""
    size = (2, 6, BLOCK_SIZE, 2, 8)
    return [torch.arange(2 * 6 * BLOCK_SIZE * 2 * 8, dtype=torch.float32).view(size) + at for at in range(2)]


def finish(manager, finished, kv_caches, **more):
    return manager.handle_finished_requests_kv_transfer(
        finished_reqs=finished, kv_caches=kv_caches, block_size=BLOCK_SIZE, cache_dtype="float32", **more
    )


def test_a_finished_request_arrives_bit_for_bit(make_sender, make_receiver, connector, kv_caches, request_of):
    sender, receiver = make_sender(connector=connector), make_receiver(connector=connector)
    what = {"block_ids": [3, 1], "seq_len": 7, "custom_metadata": {"ropes": [5]}}
    assert finish(sender, {"r1": what}, kv_caches) == ["r1"]
    req = request_of()
    assert receiver.receive_multi_kv_cache_distributed(req)
    for layer, cache in enumerate(kv_caches):
        assert torch.equal(req.past_key_values.key_cache[layer], cache[0][[3, 1]].flatten(0, 1)[:7])
        assert torch.equal(req.sampling_params.past_key_values.value_cache[layer], cache[1][[3, 1]].flatten(0, 1)[:7])
    assert req.kv_metadata == {"block_size": 4, "num_layers": 2, "dtype": "float32", "seq_len": 7, "ropes": [5]}
    assert sender.counters == {"sent": 1}


@pytest.mark.parametrize(("from_tp", "to_tp"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
def test_heads_find_their_ranks_between_stages_of_any_sizes(
    make_sender, make_receiver, connector, request_of, from_tp, to_tp
):
    heads_total = 4
    heads_each = heads_total // from_tp
    for rank in range(from_tp):
        heads = torch.arange(rank * heads_each, (rank + 1) * heads_each, dtype=torch.float32)
        cache = heads.view(1, 1, 1, -1, 1).expand(2, 3, BLOCK_SIZE, heads_each, 8).contiguous()
        # As many heads as tokens a block on a single rank: its shape alone would not say.
        sender = make_sender(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp, kv_layout="stacked_0")
        finish(sender, {"r1": {"block_ids": [2], "seq_len": 3}}, [cache])
    for rank in range(to_tp):
        req = request_of()
        receiver = make_receiver(connector=connector, rank=rank, from_tp=from_tp, to_tp=to_tp)
        assert receiver.receive_kv_cache(req)
        per_rank = heads_total // to_tp
        expected = list(range(rank * per_rank, (rank + 1) * per_rank))
        assert req.past_key_values.key_cache[0][0, :, 0].tolist() == expected
    assert connector.kept == {}


def test_the_engines_request_id_is_resolved_to_the_one_that_travels(make_sender, connector, kv_caches):
    finish(
        make_sender(connector=connector),
        {"local": {"block_ids": [0], "seq_len": 1}},
        kv_caches,
        request_id_resolver=lambda request_id: f"global-{request_id}",
    )
    assert list(connector.kept) == [("0", "1", "omni_0_to_1_kv_cache_global-local")]


@pytest.mark.parametrize(
    "what",
    [
        {"block_ids": [0, 99, 1], "seq_len": 6},
        {"block_ids": [0, -1], "seq_len": 6},
        {"block_ids": [0], "seq_len": 5},
        {"block_ids": [], "seq_len": 5},
        {"block_ids": [0]},
        {},
    ],
)
def test_x11_a_request_that_cannot_be_sent_whole_is_not_sent_at_all(make_sender, connector, kv_caches, what, caplog):
    sender = make_sender(connector=connector)
    assert finish(sender, {"bad": what, "good": {"block_ids": [0], "seq_len": 1}}, kv_caches) == ["bad", "good"]
    assert list(connector.kept) == [("0", "1", "omni_0_to_1_kv_cache_good")]
    assert sender.counters == {"sent": 1, "send_failed": 1}
    assert [record.args[0] for record in caplog.records if record.levelname == "ERROR"] == ["bad"]


def test_a_put_that_fails_costs_one_line_and_no_id(make_sender, connector, kv_caches, caplog, monkeypatch):
    def put(**_):
        raise TypeError("cannot serialise")

    monkeypatch.setattr(connector, "put", put)
    sender = make_sender(connector=connector)
    assert finish(sender, {"r1": {"block_ids": [0], "seq_len": 1}}, kv_caches) == ["r1"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "cannot serialise" in line
    assert sender.counters == {"send_failed": 1}


def test_an_empty_id_is_given_back_and_not_sent(make_sender, connector, kv_caches):
    sender = make_sender(connector=connector)
    assert finish(sender, {"": {"block_ids": [0], "seq_len": 1}}, kv_caches) == [""]
    assert connector.puts == 0
    assert sender.counters == {"send_failed": 1}


def test_a_sender_without_a_connector_gives_every_id_back(make_sender, kv_caches, caplog):
    sender = make_sender()
    assert finish(sender, {"a": {}, "b": {}}, kv_caches) == ["a", "b"]
    assert sender.counters == {"send_failed": 2}
    assert "no connector" in caplog.text


def test_a_sender_without_an_edge_gives_every_id_back(make_sender, connector, kv_caches, caplog):
    sender = make_sender(connector=connector, to_stage=None)
    assert finish(sender, {"a": {"block_ids": [0], "seq_len": 1}}, kv_caches) == ["a"]
    assert "omni_to_stage" in caplog.text


def test_a_stage_that_does_not_send_puts_nothing(make_manager, connector, kv_caches):
    manager = make_manager(connector=connector)
    assert finish(manager, {"a": {"block_ids": [0], "seq_len": 1}}, kv_caches) == ["a"]
    assert finish(manager, {}, kv_caches) == []
    assert connector.puts == 0


def test_a_key_builder_of_the_engines_puts_all_heads_under_each_key(make_sender, connector, kv_caches):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    sender = make_sender(connector=connector, from_tp=1, to_tp=2)
    sender.kv_send_key_builder = lambda request_id, from_stage, to_stage: [f"{request_id}-x", f"{request_id}-y"]
    finish(sender, {"r1": {"block_ids": [0], "seq_len": 1}}, kv_caches)
    assert [key for _, _, key in connector.kept] == ["r1-x", "r1-y"]
    for data in connector.kept.values():
        assert KVCacheTransferData.from_bytes(data)["layer_blocks"]["key_cache"][0].shape == (1, 2, 8)


def test_transferring_leaves_the_callers_record_as_it_was(make_sender, connector):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    layer = torch.ones(1, 1, 4)
    kv = KVCacheTransferData("local", {"key_cache": [layer], "value_cache": [layer]}, [0], {})
    make_sender(connector=connector)._transfer_kv_cache(kv, "global")
    (data,) = connector.kept.values()
    assert KVCacheTransferData.from_bytes(data)["request_id"] == "global"
    assert kv.request_id == "local"


def test_a_shape_with_two_readings_is_sent_once_the_settings_declare_it(make_sender, connector, caplog):
    two_blocks = [torch.randn(2, 2, BLOCK_SIZE, 3, 8)]
    what = {"r1": {"block_ids": [1], "seq_len": 3}}
    silent = make_sender(connector=connector)
    assert finish(silent, what, two_blocks) == ["r1"]
    assert silent.counters == {"send_failed": 1}
    assert "is ambiguous" in caplog.text
    assert "declares it by kv_layout" in caplog.text
    declared = make_sender(connector=connector, kv_layout="stacked_1")
    assert finish(declared, what, two_blocks) == ["r1"]
    assert declared.counters == {"sent": 1}


@pytest.mark.parametrize("wrong", [{"kv_layout": "sideways"}, {"kv_layout": "slot slot"}])
def test_a_layout_that_is_none_costs_no_blocks(make_sender, connector, kv_caches, wrong, caplog):
    sender = make_sender(connector=connector, **wrong)
    assert finish(sender, {"r1": {"block_ids": [0], "seq_len": 2}, "r2": {}}, kv_caches) == ["r1", "r2"]
    assert sender.counters == {"send_failed": 2}
    assert "layout" in caplog.text
