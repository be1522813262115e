"""Sending by key: whole or not at all, each receiver its own heads, and every id comes back."""

from __future__ import annotations

import json
import struct
import threading
from collections import Counter

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError, HandoffError, PutRejected, TopologyError, TransportError
from omnikv.handoff import engine_connector
from omnikv.handoff.engine_connector import Stages
from omnikv.handoff.keyed_extract import extract_kv
from omnikv.handoff.keyed_send import SendRoute, announce_failure, send_finished, send_kv
from omnikv.tensors.pack import KVCacheTransferData

EDGE = Stages("0", "1")
BLOCK_SIZE = 4


def caches(num_layers=2, blocks=6, heads=3):
    return [
        torch.arange(2 * blocks * BLOCK_SIZE * heads * 8, dtype=torch.float32).view(2, blocks, BLOCK_SIZE, heads, 8)
        + at
        for at in range(num_layers)
    ]


def extract(block_ids=(4, 1), num_tokens=7, kv_caches=None, **more):
    return extract_kv("r1", list(block_ids), num_tokens, kv_caches or caches(), BLOCK_SIZE, "float32", **more)


def transfer(heads, request_id="r1", metadata=None):
    key = torch.tensor(heads, dtype=torch.float32).view(1, -1, 1).expand(2, len(heads), 4).contiguous()
    return KVCacheTransferData(
        request_id,
        {"key_cache": [key], "value_cache": [key + 100]},
        [0],
        {"seq_len": 2} if metadata is None else metadata,
    )


class Shelf:
    supports_raw_data = False

    def __init__(self, refuse=()):
        self.kept, self.refuse, self.puts = {}, set(refuse), 0

    def put(self, from_stage, to_stage, put_key, data):
        self.puts += 1
        if put_key in self.refuse:
            return False, 0, None
        self.kept[put_key] = data
        return True, len(data), {}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(engine_connector, "FIRST_RETRY_S", 0.0)


def route(source=1, target=1, rank=0, hook=None):
    return SendRoute(stages=EDGE, topo=KVTPTopology(source, target, rank), key_hook=hook)


def send(connector, kv, where=None):
    return send_kv(connector, kv, where or route(), closing=threading.Event())


# Extracting


def test_extracting_gathers_the_named_blocks_in_order_up_to_the_last_token():
    kv_caches = caches()
    kv = extract(kv_caches=kv_caches)
    for at, cache in enumerate(kv_caches):
        assert torch.equal(kv.layer_blocks["key_cache"][at], cache[0][[4, 1]].flatten(0, 1)[:7])
        assert torch.equal(kv.layer_blocks["value_cache"][at], cache[1][[4, 1]].flatten(0, 1)[:7])
    assert kv.metadata == {"block_size": 4, "num_layers": 2, "dtype": "float32", "seq_len": 7}


def test_the_engine_may_reuse_its_blocks_after_extracting():
    kv_caches = caches()
    kv = extract(kv_caches=kv_caches)
    before = kv.layer_blocks["key_cache"][0].clone()
    kv_caches[0].zero_()
    assert torch.equal(kv.layer_blocks["key_cache"][0], before)


def test_the_models_own_metadata_travels_along():
    assert extract(custom_metadata={"ropes": [3]}).metadata["ropes"] == [3]


@pytest.mark.parametrize("dim", [0, 1])
def test_stacked_caches_are_read_by_the_published_rule(dim):
    kv_caches = [cache.transpose(0, dim).contiguous() for cache in caches()]
    assert torch.equal(
        extract(kv_caches=kv_caches).layer_blocks["key_cache"][1], extract().layer_blocks["key_cache"][1]
    )


def test_a_pair_of_caches_is_taken_as_it_is():
    pairs = [(cache[0], cache[1]) for cache in caches()]
    assert torch.equal(
        extract(kv_caches=pairs).layer_blocks["value_cache"][0], extract().layer_blocks["value_cache"][0]
    )


@pytest.mark.parametrize("block_ids", [[0, 99, 1], [0, -1], [0, 0], [1.5, 2], []])
def test_x11_bad_block_ids_fail_the_whole_extraction(block_ids):
    with pytest.raises(ConfigError):
        extract(block_ids=block_ids, num_tokens=6)


@pytest.mark.parametrize("num_tokens", [9, 0, -1])
def test_more_tokens_than_the_blocks_hold_or_none_fail_the_extraction(num_tokens):
    with pytest.raises(ConfigError, match="tokens"):
        extract(num_tokens=num_tokens)


def test_a_layer_of_unknown_form_fails_the_extraction_by_its_number():
    with pytest.raises(ConfigError, match=r"'r1' is not sent: layer 1: .* fits no known layout"):
        extract(kv_caches=[caches()[0], torch.zeros(3)])


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        pytest.param((2, 2, BLOCK_SIZE, 3, 8), "ambiguous", id="two-blocks"),
        pytest.param((2, 6, BLOCK_SIZE, BLOCK_SIZE, 8), "as many heads as tokens a block", id="heads-equal-block-size"),
    ],
)
def test_a_shape_with_two_readings_is_not_guessed_and_a_declared_layout_is_read(shape, why):
    cache = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    with pytest.raises(ConfigError, match=rf"layer 0: .*{why}.*; an engine's omni_kv_config declares it by kv_layout"):
        extract((1, 0), kv_caches=[cache])
    kv = extract((1, 0), kv_caches=[cache], layout=Layout.named("stacked_0", BLOCK_SIZE))
    assert torch.equal(kv.layer_blocks["key_cache"][0], cache[0][[1, 0]].flatten(0, 1)[:7])


def test_vllm_on_a_cpu_is_read_by_its_declared_layout():
    packed = torch.randn(6, 3, BLOCK_SIZE, 16)
    kv = extract(kv_caches=[packed], layout=Layout.vllm_cpu(BLOCK_SIZE))
    halves = packed[[4, 1]].reshape(2, 3, 2, BLOCK_SIZE * 8)
    keys = halves[:, :, 0].view(2, 3, 8, BLOCK_SIZE).permute(0, 3, 1, 2).flatten(0, 1)[:7]
    values = halves[:, :, 1].view(2, 3, BLOCK_SIZE, 8).transpose(1, 2).flatten(0, 1)[:7]
    assert torch.equal(kv.layer_blocks["key_cache"][0], keys)
    assert torch.equal(kv.layer_blocks["value_cache"][0], values)


# Sending


def test_one_receiver_gets_everything_under_the_plain_key():
    shelf = Shelf()
    nbytes = send(shelf, transfer([0, 1]))
    assert list(shelf.kept) == ["omni_0_to_1_kv_cache_r1"]
    assert nbytes == len(shelf.kept["omni_0_to_1_kv_cache_r1"])


def test_each_of_several_receivers_gets_its_own_heads_and_a_stamp():
    shelf = Shelf()
    send(shelf, transfer([4, 5, 6, 7]), route(2, 4, 1))
    received = {key: KVCacheTransferData.from_bytes(data) for key, data in shelf.kept.items()}
    assert {key: fields["layer_blocks"]["key_cache"][0][0, :, 0].tolist() for key, fields in received.items()} == {
        "r1_0_0_1_2": [4, 5],
        "r1_0_0_1_3": [6, 7],
    }
    assert [fields["metadata"]["tp_head_slice"]["target_rank"] for fields in received.values()] == [2, 3]


def test_an_engine_that_builds_its_own_keys_gets_all_heads_under_each():
    shelf = Shelf()
    send(shelf, transfer([4, 5]), route(2, 4, 1, hook=lambda *_: ["a", "b"]))
    for data in shelf.kept.values():
        fields = KVCacheTransferData.from_bytes(data)
        assert fields["layer_blocks"]["key_cache"][0].shape[1] == 2
        assert "tp_head_slice" not in fields["metadata"]


def test_an_engine_may_put_under_more_keys_than_there_are_receivers():
    shelf = Shelf()
    send(shelf, transfer([4]), route(2, 2, 1, hook=lambda *_: ["a", "b", "c"]))
    assert list(shelf.kept) == ["a", "b", "c"]


def test_heads_that_do_not_divide_send_nothing():
    shelf = Shelf()
    with pytest.raises(TopologyError, match="divisible"):
        send(shelf, transfer([0, 1, 2]), route(1, 2, 0))
    assert shelf.puts == 0


def test_a_rank_outside_its_stage_sends_nothing():
    shelf = Shelf()
    with pytest.raises(TopologyError, match="outside"):
        send(shelf, transfer([0]), route(2, 2, 7))
    assert shelf.puts == 0


def test_an_empty_id_sends_nothing():
    shelf = Shelf()
    with pytest.raises(ConfigError, match="without an id"):
        send(shelf, transfer([0], request_id=""))
    assert shelf.puts == 0


def test_metadata_that_json_cannot_hold_goes_as_a_plain_dict():
    class Taking(Shelf):
        def put(self, from_stage, to_stage, put_key, data):
            self.kept[put_key] = data
            return True, 1, {}

    shelf, mask = Taking(), torch.ones(2)
    send(shelf, transfer([0], metadata={"mask": mask}))
    (sent,) = shelf.kept.values()
    assert sent["metadata"]["mask"] is mask


def test_a_payload_that_cannot_be_packed_is_no_reason_to_send_a_dict():
    kv = transfer([0])
    kv.layer_blocks["value_cache"] = []
    with pytest.raises(ConfigError, match="layers"):
        send(Shelf(), kv)


def test_a_connector_for_raw_data_still_gets_bytes_when_all_tensors_are_on_the_cpu():
    shelf = Shelf()
    shelf.supports_raw_data = True
    send(shelf, transfer([0]))
    assert isinstance(next(iter(shelf.kept.values())), bytes)


def test_a_refused_put_is_the_cause_of_the_failure():
    with pytest.raises(PutRejected, match="r1_0_0_0_1"):
        send(Shelf(refuse={"r1_0_0_0_1"}), transfer([0, 1]), route(1, 2, 0))


def test_a_released_engine_can_read_what_was_sent():
    shelf = Shelf()
    send(shelf, transfer([0, 1]))
    (data,) = shelf.kept.values()
    (length,) = struct.unpack(">I", data[:4])
    header = json.loads(data[4 : 4 + length])
    assert {"rid", "bids", "meta", "td", "nl"} <= set(header)
    first = header["td"][0]
    start = 4 + length + first["o"]
    assert torch.frombuffer(bytearray(data[start : start + first["b"]]), dtype=torch.float32)[4] == 1


# Finished requests


def finish(finished, **more):
    counters, failed = Counter(), []
    ids = send_finished(
        object(),
        finished,
        **{
            "extract": lambda request_id, what: transfer([0], request_id),
            "transfer": lambda kv, transfer_id: None,
            "resolve_id": None,
            "fail": lambda request_id, cause: failed.append((request_id, cause)),
            "counters": counters,
            **more,
        },
    )
    return ids, counters, failed


def test_every_id_comes_back_whatever_became_of_it(caplog):
    def sometimes(kv, transfer_id):
        if transfer_id == "b":
            raise TransportError("no route to host")

    ids, counters, _ = finish({"a": {}, "b": {}, "c": {}}, transfer=sometimes)
    assert ids == ["a", "b", "c"]
    assert counters == {"sent": 2, "send_failed": 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line == "KV of request b was not sent: TransportError: no route to host"


def test_a_request_travels_under_the_id_that_the_engine_resolves():
    sent = []
    finish({"local": {}}, resolve_id=lambda request_id: f"global-{request_id}", transfer=lambda kv, to: sent.append(to))
    assert sent == ["global-local"]


@pytest.mark.parametrize("error", [ConfigError("bad blocks"), TypeError("no cache")])
def test_d05_receivers_are_told_of_a_request_that_could_not_be_extracted(error):
    def extract(request_id, what):
        raise error

    _, counters, failed = finish({"local": {}}, extract=extract, resolve_id=lambda request_id: f"global-{request_id}")
    assert failed == [("global-local", str(error))]
    assert counters == {"send_failed": 1}


def test_a_resolver_that_fails_costs_its_own_request_only():
    def resolve(request_id):
        return {"a": "A"}[request_id]

    ids, counters, _ = finish({"a": {}, "b": {}}, resolve_id=resolve)
    assert ids == ["a", "b"]
    assert counters == {"sent": 1, "send_failed": 1}


def test_x11_the_receivers_of_a_request_that_cannot_be_extracted_are_told():
    def broken(request_id, what):
        raise ConfigError("block 99 is outside the pool")

    ids, counters, failed = finish({"a": {}}, extract=broken, resolve_id=lambda _: "g")
    assert ids == ["a"]
    assert counters == {"send_failed": 1}
    assert failed == [("g", "block 99 is outside the pool")]


def test_without_a_connector_one_line_says_so(caplog):
    counters = Counter()
    ids = send_finished(
        None, {"a": {}, "b": {}}, extract=None, transfer=None, resolve_id=None, fail=None, counters=counters
    )
    assert ids == ["a", "b"]
    assert counters == {"send_failed": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "KV of a, b was not sent: this stage has no connector"
    ]


class Telling:
    """A connector that can tell its receivers; putting raises `error`, telling rank `deaf` fails."""

    addresses_ranks = True

    def __init__(self, error=None, deaf=None):
        self.error, self.deaf, self.told = error, deaf, {}

    def wants_checksum(self, *stages):
        return False

    def put_plan(self, from_stage, to_stage, key, plan, *, target_rank):
        if self.error is not None:
            raise self.error
        return plan.nbytes

    def fail(self, from_stage, to_stage, key, cause, *, target_rank):
        if target_rank == self.deaf:
            raise TransportError("no route to host")
        self.told[target_rank] = cause


def test_x02_the_receivers_of_heads_that_do_not_divide_are_told_at_once():
    connector = Telling()
    with pytest.raises(TopologyError, match="3 KV heads"):
        send(connector, transfer([0, 1, 2]), route(1, 2, 0))
    assert sorted(connector.told) == [0, 1]
    assert "3 KV heads" in connector.told[1]


@pytest.mark.parametrize("error", [TransportError("gone"), RuntimeError("out of memory"), MemoryError()])
def test_the_receivers_of_what_could_not_be_put_are_told_whatever_went_wrong(error):
    connector = Telling(error)
    with pytest.raises(type(error)):
        send(connector, transfer([0, 1]), route(1, 2, 0))
    assert sorted(connector.told) == [0, 1]


def test_a_receiver_that_cannot_be_told_keeps_the_news_from_no_other():
    connector = Telling(TransportError("gone"), deaf=0)
    with pytest.raises(TransportError, match="gone"):
        send(connector, transfer([0, 1]), route(1, 2, 0))
    assert sorted(connector.told) == [1]


def test_a_payload_with_more_keys_than_values_is_refused_and_its_receivers_told():
    kv, connector = transfer([0]), Telling()
    kv.layer_blocks["value_cache"] = []
    with pytest.raises(ConfigError, match="1 and 0 layers"):
        send(connector, kv)
    assert sorted(connector.told) == [0]


def test_a_key_builder_that_fails_is_named():
    def broken(request_id, from_stage, to_stage):
        raise KeyError("tenant")

    with pytest.raises(HandoffError, match="key builder failed for request 'r1'"):
        send(Shelf(), transfer([0]), route(hook=broken))


def test_a_put_that_says_nothing_of_its_size_counts_as_put():
    class Silent(Shelf):
        def put(self, from_stage, to_stage, put_key, data):
            return True, None, None

    assert send(Silent(), transfer([0])) == 0


def test_receivers_that_cannot_be_told_do_not_hide_why_a_request_was_not_sent(caplog):
    def extract(request_id, what):
        raise ConfigError("block 99 is outside the pool")

    def deaf(request_id, cause):
        raise TopologyError("rank 7 is outside its stage")

    finish({"a": {}}, extract=extract, fail=deaf)
    said = {record.levelname: record.getMessage() for record in caplog.records}
    assert said["ERROR"] == "KV of request a was not sent: ConfigError: block 99 is outside the pool"
    assert "rank 7 is outside" in said["WARNING"]


def test_a_plain_connector_has_no_way_to_tell_its_receivers():
    shelf = Shelf()
    announce_failure(shelf, "r1", route(), "cause")
    assert shelf.kept == {}
