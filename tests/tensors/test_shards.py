"""Shards cut along heads and joined again; what does not fit is refused, not guessed."""

from __future__ import annotations

import pytest
import torch

from omnikv.core.partition import split_heads
from omnikv.core.topology import KVTPTopology, get_kv_source_ranks
from omnikv.errors import TopologyError, WireError, WireReason
from omnikv.tensors.shards import (
    merge_received_rank_shards,
    sender_stamp,
    slice_for_target,
    slice_kv_tensor_heads,
    slice_received_rank_shard,
)

TOKENS, HEAD_DIM = 5, 4


def shard(heads, *, num_layers=2, tokens=TOKENS, dtype=torch.float32, request_id="r1", metadata=None):
    """A payload whose every value is its global head id (keys) or that plus 100 (values)."""
    key = torch.tensor(heads, dtype=dtype).view(1, len(heads), 1).expand(tokens, len(heads), HEAD_DIM)
    return {
        "request_id": request_id,
        "layer_blocks": {
            "key_cache": [key.clone() for _ in range(num_layers)],
            "value_cache": [(key + 100).clone() for _ in range(num_layers)],
        },
        "block_ids": [3, 1],
        "metadata": {"seq_len": tokens} if metadata is None else metadata,
    }


def heads_of(payload, cache="key_cache"):
    return [tensor[0, :, 0].tolist() for tensor in payload["layer_blocks"][cache]]


def topology(source, target, rank):
    return KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=rank)


def refused(reason, match, call):
    with pytest.raises(WireError, match=match) as caught:
        call()
    assert caught.value.reason is reason


def test_joining_puts_heads_side_by_side_in_the_order_of_the_shards():
    merged = merge_received_rank_shards([shard([0, 1]), shard([2]), shard([3])])
    assert heads_of(merged) == [[0, 1, 2, 3]] * 2
    assert heads_of(merged, "value_cache") == [[100, 101, 102, 103]] * 2
    assert merged["request_id"] == "r1"
    assert merged["block_ids"] == [3, 1]
    assert merged["metadata"] == {"seq_len": TOKENS}


def test_joined_tensors_are_contiguous_and_share_nothing_with_the_shards():
    shards = [shard([0]), shard([1])]
    merged = merge_received_rank_shards(shards)
    shards[0]["layer_blocks"]["key_cache"][0].fill_(9)
    assert merged["layer_blocks"]["key_cache"][0].is_contiguous()
    assert heads_of(merged)[0] == [0, 1]


def test_a_single_shard_is_given_back_unchanged():
    payload = shard([0])
    assert merge_received_rank_shards([payload]) is payload


def test_nothing_joins_to_nothing():
    assert merge_received_rank_shards([]) is None


def test_a_merger_decides_for_itself():
    assert merge_received_rank_shards([{}, {"odd": 1}], merger=lambda shards: {"count": len(shards)}) == {"count": 2}


def test_a_layer_that_no_shard_has_stays_absent():
    shards = [shard([0]), shard([1])]
    for payload in shards:
        for tensors in payload["layer_blocks"].values():
            tensors[1] = None
    merged = merge_received_rank_shards(shards)
    assert merged["layer_blocks"]["key_cache"][1] is None
    assert merged["layer_blocks"]["value_cache"][1] is None


def test_x03_a_layer_missing_in_one_shard_names_the_layer_and_the_shard():
    broken = shard([1])
    broken["layer_blocks"]["key_cache"][0] = None
    refused(
        WireReason.MISSING_LAYER,
        r"key_cache layer 0 is missing in shard 1",
        lambda: merge_received_rank_shards([shard([0]), broken]),
    )


def test_x03_the_shard_is_named_by_its_source_rank_where_that_is_known():
    broken = shard([1])
    broken["layer_blocks"]["value_cache"][1] = None
    refused(
        WireReason.MISSING_LAYER,
        r"value_cache layer 1 is missing in the shard of source rank 5",
        lambda: merge_received_rank_shards([shard([0]), broken], source_ranks=[4, 5]),
    )


def test_x03_a_layer_without_its_value_in_any_shard_is_refused():
    shards = [shard([0]), shard([1])]
    for payload in shards:
        payload["layer_blocks"]["value_cache"][0] = None
    refused(WireReason.MISSING_LAYER, "layer 0 has only one", lambda: merge_received_rank_shards(shards))


def test_x04_shards_of_different_dtype_are_refused_rather_than_promoted():
    refused(
        WireReason.DTYPE,
        r"dtype of key_cache layer 0 differs: torch.float32 in the first shard, torch.float16 in shard 1",
        lambda: merge_received_rank_shards([shard([0]), shard([1], dtype=torch.float16)]),
    )


@pytest.mark.parametrize(
    ("other", "reason", "match"),
    [
        (shard([1], num_layers=3), WireReason.LAYER_COUNT, "number of layers in key_cache differs: 2"),
        (shard([1], tokens=6), WireReason.SHAPE, "number of tokens of key_cache layer 0 differs: 5"),
        (shard([1], request_id="r2"), WireReason.WRONG_REQUEST, "request differs: 'r1'"),
        ({"layer_blocks": None}, WireReason.HEADER_FIELD, "shard 1 has no layer_blocks"),
        (b"bytes", WireReason.HEADER_FIELD, "shard 1 has no layer_blocks"),
    ],
)
def test_shards_that_differ_in_what_must_be_equal_are_refused(other, reason, match):
    refused(reason, match, lambda: merge_received_rank_shards([shard([0]), other]))


def test_another_head_size_is_refused():
    wide = shard([1])
    wide["layer_blocks"]["key_cache"][1] = torch.zeros(TOKENS, 1, HEAD_DIM + 1)
    refused(WireReason.SHAPE, "head size of key_cache layer 1", lambda: merge_received_rank_shards([shard([0]), wide]))


def test_keys_and_values_of_different_count_are_refused():
    short = shard([1])
    short["layer_blocks"]["value_cache"].pop()
    refused(WireReason.LAYER_COUNT, "2 key layers and 1 value", lambda: merge_received_rank_shards([shard([0]), short]))


@pytest.mark.parametrize("part", [torch.zeros(2, 4), "tensor", 3])
def test_x10_what_has_no_head_axis_is_not_joined_along_another(part):
    shards = [shard([0]), shard([1])]
    for payload in shards:
        payload["layer_blocks"]["key_cache"][0] = part
    refused(WireReason.SHAPE, "no head axis", lambda: merge_received_rank_shards(shards))


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 4), (1, 4)])
def test_every_receiver_cuts_exactly_its_heads_out_of_a_whole_shard(source, target):
    heads_each = 8 // source
    for rank in range(target):
        topo = topology(source, target, rank)
        (sender,) = get_kv_source_ranks(topo)
        whole = shard(list(range(sender * heads_each, (sender + 1) * heads_each)))
        cut = slice_received_rank_shard(whole, topo)
        per_rank = 8 // target
        assert heads_of(cut) == [list(range(rank * per_rank, (rank + 1) * per_rank))] * 2
        assert cut["metadata"]["tp_head_slice"]["target_rank"] == rank
        assert cut["metadata"]["tp_head_slice"]["side"] == "receiver"
        assert "tp_head_slice" not in whole["metadata"]


def test_what_a_receiver_cuts_does_not_keep_the_whole_shard_alive():
    cut = slice_received_rank_shard(shard([0, 1], tokens=1), topology(1, 2, 1))
    for tensor in cut["layer_blocks"]["key_cache"]:
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(("source", "target"), [(2, 2), (4, 2), (1, 1)])
def test_nothing_is_cut_where_no_sender_serves_several_receivers(source, target):
    payload = shard([0, 1])
    assert slice_received_rank_shard(payload, topology(source, target, 1 if target > 1 else 0)) is payload


def test_a_slicer_decides_for_itself_whatever_the_stamp_says():
    payload = shard([0], metadata={"tp_head_slice": {"applied": True, "target_rank": 9}})
    assert slice_received_rank_shard(payload, topology(1, 2, 0), slicer=lambda whole: {"of": whole}) == {"of": payload}


@pytest.mark.parametrize("payload", [None, {}, {"request_id": "r"}])
def test_what_holds_no_layers_is_given_back(payload):
    assert slice_received_rank_shard(payload, topology(1, 2, 0)) is payload


def test_what_the_sender_cut_is_not_cut_again():
    topo = topology(2, 4, 0)
    sent = shard([0, 1])
    sent["layer_blocks"] = slice_for_target(sent["layer_blocks"], topo, 1)
    sent["metadata"] = {"tp_head_slice": sender_stamp(topo, 1)}
    received = slice_received_rank_shard(sent, topology(2, 4, 1))
    assert received is sent
    assert heads_of(received) == [[1]] * 2


def test_the_senders_stamp_has_the_published_fields():
    assert sender_stamp(topology(2, 4, 1), 3) == {
        "applied": True,
        "side": "sender",
        "target_rank": 3,
        "source_rank": 1,
        "from_tp": 2,
        "to_tp": 4,
        "offset_in_shard": 1,
        "num_slices": 2,
    }


def test_x05_a_shard_that_was_cut_for_another_rank_is_refused():
    payload = shard([0], metadata={"tp_head_slice": {"applied": True, "target_rank": 3}})
    refused(
        WireReason.WRONG_RANK,
        r"cut for target_rank=3, but this receiver has target_rank=0",
        lambda: slice_received_rank_shard(payload, topology(2, 4, 0)),
    )


def test_x06_a_shard_that_was_cut_for_other_parallel_sizes_is_refused():
    payload = shard([0], metadata={"tp_head_slice": sender_stamp(topology(2, 4, 0), 0)})
    refused(WireReason.WRONG_RANK, "to_tp=4", lambda: slice_received_rank_shard(payload, topology(2, 2, 0)))


def test_a_stamp_that_was_not_applied_does_not_count():
    payload = shard([0, 1], metadata={"tp_head_slice": {"applied": False, "target_rank": 3}})
    assert heads_of(slice_received_rank_shard(payload, topology(1, 2, 1))) == [[1]] * 2


@pytest.mark.parametrize(
    ("tensor", "offset", "slices", "match"),
    [
        (torch.zeros(3), 0, 2, "head axis"),
        (torch.zeros(2, 3, 4), 0, 2, "divisible"),
        (torch.zeros(2, 4, 4), 2, 2, "no part 2 of 2"),
        (torch.zeros(2, 4, 4), 0, 0, "no part"),
    ],
)
def test_heads_that_do_not_divide_are_an_error(tensor, offset, slices, match):
    with pytest.raises(TopologyError, match=match):
        slice_kv_tensor_heads(tensor, offset, slices)


def test_what_is_no_tensor_is_not_cut():
    assert slice_kv_tensor_heads(None, 0, 2) is None


@pytest.mark.parametrize("num_slices", [2, 4])
def test_d18_fewer_heads_than_receivers_are_replicated_on_neighbours(num_slices):
    tensor = torch.arange(2.0).view(1, 2, 1)
    got = [slice_kv_tensor_heads(tensor, part, num_slices).flatten().tolist() for part in range(num_slices)]
    assert got == [[float(part * 2 // num_slices)] for part in range(num_slices)]


def test_x02_a_sender_of_one_head_serves_two_receivers():
    topo = topology(2, 4, 1)
    for target in (2, 3):
        assert slice_for_target(shard([1])["layer_blocks"], topo, target)["key_cache"][0][0, :, 0].tolist() == [1]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize(("source", "target"), [(2, 1), (4, 1), (4, 2), (6, 3), (8, 2), (8, 4), (12, 6)])
def test_x01_d19_a_receiver_gets_each_of_its_heads_once_whether_replicated_or_not(source, target, num_kv_heads):
    held, needed = split_heads(num_kv_heads, source), split_heads(num_kv_heads, target)
    for rank in range(target):
        topo = topology(source, target, rank)
        ranks = get_kv_source_ranks(topo)
        have = {head for sender in ranks for head in held[sender]}
        shards = [shard(held[sender]) for sender in ranks]
        if not have.issuperset(needed[rank]):
            with pytest.raises(TopologyError, match=f"no source holds head.*which target rank {rank} needs"):
                merge_received_rank_shards(shards, source_ranks=ranks, topo=topo, num_kv_heads=num_kv_heads)
            continue
        merged = merge_received_rank_shards(shards, source_ranks=ranks, topo=topo, num_kv_heads=num_kv_heads)
        assert heads_of(merged) == [list(needed[rank])] * 2
        assert heads_of(merged, "value_cache") == [[100 + head for head in needed[rank]]] * 2


def test_x10_latents_are_never_joined_along_their_last_dimension():
    latent = torch.randn(2, 4)
    shards = [shard([0], num_layers=1) for _ in range(2)]
    for payload in shards:
        payload["layer_blocks"] = {"key_cache": [latent], "value_cache": [latent]}
    model = {"source_ranks": [0, 1], "topo": topology(2, 1, 0), "num_kv_heads": 1}
    refused(WireReason.SHAPE, "no head axis", lambda: merge_received_rank_shards(shards, **model))
    for payload in shards:
        payload["layer_blocks"] = {"key_cache": [latent[:, None]], "value_cache": [latent[:, None]]}
    [key] = merge_received_rank_shards(shards, **model)["layer_blocks"]["key_cache"]
    assert torch.equal(key, latent[:, None])


def test_a_shard_with_other_heads_than_the_model_gives_it_is_refused():
    refused(
        WireReason.SHAPE,
        "key_cache layer 0 of the shard of source rank 0 has 2 heads; by the model's number of KV heads",
        lambda: merge_received_rank_shards(
            [shard([0, 1]), shard([2, 3])], source_ranks=[0, 1], topo=topology(2, 1, 0), num_kv_heads=2
        ),
    )
