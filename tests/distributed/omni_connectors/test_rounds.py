"""Rounds of a vote on contents: what is late is fetched again alone, what came is kept and used only afterwards."""

from __future__ import annotations

import uuid

import pytest
import torch
from tests.support.engine_requests import collect, receive_together, run_together, shelve

from omnikv.errors import ConfigError

PATIENT = {"kv_agreement": "contents", "recv_timeout": 600.0, "kv_round_timeout": 0.02}
BOTH = {"cfg_text": "c1"}
SENDER_INFO = {"host": "h", "zmq_port": 1000}


def key(request_id, rank):
    return f"{request_id}_0_0_{rank}_{rank}"


def late(connector, receivers, *keys):
    """`connector`, whose payloads under these keys are there only after some rank has begun another round."""
    get = connector.get

    def get_late(from_stage, to_stage, get_key, metadata=None):
        if get_key in keys and not any(receiver.counters["refetched"] for receiver in receivers):
            return None
        return get(from_stage=from_stage, to_stage=to_stage, get_key=get_key, metadata=metadata)

    connector.get = get_late
    return connector


class Leased:
    """A payload in a connector's memory; `ended` says how it was given up."""

    def __init__(self, data, on_end):
        self.tensor, self._on_end = torch.frombuffer(bytearray(data), dtype=torch.uint8), on_end

    def release(self):
        self._on_end("release")

    def put_back(self):
        self._on_end("put_back")


@pytest.fixture
def leasing(connector):
    """A connector that takes payloads back; `ended` lists what became of each, in order."""
    connector.ended, get = [], connector.get

    def lend(from_stage, to_stage, get_key, metadata=None):
        found = get(from_stage=from_stage, to_stage=to_stage, get_key=get_key, metadata=metadata)
        if found is None:
            return None

        def on_end(how):
            connector.ended.append((get_key, how))
            if how == "put_back":
                connector.kept[from_stage, to_stage, get_key] = found[0]

        return Leased(found[0], on_end), found[1]

    connector.get = lend
    return connector


# A late piece


@pytest.mark.parametrize("missed", [0, 1])
def test_d01_a_shard_that_is_late_on_one_rank_is_fetched_in_another_round(
    world, connector, packed, request_of, heads_of, missed
):
    receivers = world(tp=2, more=PATIENT)
    shelve(late(connector, receivers, key("r1", missed)), packed, [0, 1])
    requests = [request_of(), request_of()]
    assert receive_together(receivers, requests) == [True, True]
    assert [heads_of(req.past_key_values) for req in requests] == [[0], [1]]
    # Only the rank that lacked something asked again, and for that alone.
    assert receivers[1 - missed].counters["refetched"] == 0
    assert [asked for asked, _ in connector.asked].count(key("r1", 1 - missed)) == 1


def test_d02_a_companion_that_is_late_on_one_rank_is_recovered_and_the_primary_is_not_fetched_again(
    world, connector, packed, request_of, heads_of
):
    receivers = world(tp=2, more=PATIENT)
    shelve(late(connector, receivers, key("c1", 1)), packed, [0, 1], "r1", "c1")
    requests = [request_of(cfg_kv_request_ids=dict(BOTH)) for _ in receivers]
    assert receive_together(receivers, requests, collect) == [True, True]
    branches = [req.sampling_params.cfg_text_past_key_values["key_cache"][0][0, :, 0].tolist() for req in requests]
    assert branches == [[0], [1]]
    asked = [asked for asked, _ in connector.asked]
    assert [asked.count(key("r1", rank)) for rank in (0, 1)] == [1, 1]


@pytest.mark.parametrize("sizes", [{"tp": 2, "cfg": 2}, {"tp": 2, "sp": 2}])
def test_x14_a_leader_whose_shard_is_late_hands_on_what_the_next_round_brought(
    world, connector, packed, request_of, heads_of, sizes
):
    receivers = world(**sizes, more=PATIENT)
    shelve(late(connector, receivers, key("r1", 1)), packed, [0, 1], "r1", "c1")
    requests = [request_of(cfg_kv_request_ids=dict(BOTH)) for _ in receivers]
    assert receive_together(receivers, requests, collect) == [True] * 4
    assert sorted(heads_of(req.past_key_values) for req in requests) == [[0], [0], [1], [1]]


def test_a_rank_that_gathers_three_shards_asks_again_for_the_late_one_only(
    make_receiver, world, connector, packed, request_of, heads_of
):
    keys = {rank: [f"r1_0_0_{source}_{rank}" for source in range(3 * rank, 3 * rank + 3)] for rank in (0, 1)}
    receivers = world(tp=2, more=PATIENT | {"from_tp": 6, "to_tp": 2})
    late(connector, receivers, keys[1][2])
    for rank, shards in keys.items():
        for source, shard in enumerate(shards, 3 * rank):
            connector.kept["0", "1", shard] = packed([source])
    requests = [request_of(), request_of()]
    assert receive_together(receivers, requests) == [True, True]
    assert [heads_of(req.past_key_values) for req in requests] == [[0, 1, 2], [3, 4, 5]]
    asked = [asked for asked, _ in connector.asked]
    assert {shard: asked.count(shard) for shards in keys.values() for shard in shards if shard != keys[1][2]} == {
        shard: 1 for shards in keys.values() for shard in shards if shard != keys[1][2]
    }


def test_the_models_collector_is_called_once_when_all_that_it_may_ask_for_is_here(world, connector, packed, request_of):
    called = []

    def strict(request_id, ids, manager, device):
        called.append(manager)
        found = collect(request_id, ids, manager, device)
        assert len(found) == len(ids)
        return found

    receivers = world(tp=2, more=PATIENT)
    shelve(late(connector, receivers, key("c1", 1)), packed, [0, 1], "r1", "c1")
    requests = [request_of(cfg_kv_request_ids=dict(BOTH)) for _ in receivers]
    assert receive_together(receivers, requests, strict) == [True, True]
    assert sorted(map(id, called)) == sorted(map(id, receivers))


def test_at_the_deadline_the_collector_is_called_with_what_there_is(world, connector, packed, request_of, caplog):
    receivers = world(tp=2, more={**PATIENT, "recv_timeout": 0.2})
    shelve(connector, packed, [0, 1], "r1")
    requests = [request_of(cfg_kv_request_ids=dict(BOTH)) for _ in receivers]
    assert receive_together(receivers, requests, collect) == [True, True]
    assert "goes on without the companions cfg_text: " in caplog.text
    assert "1 of 1 shards are missing: 'c1_0_0_0_0' of source rank 0" in caplog.text


# When there is nothing to wait for


def test_d10_a_failure_on_one_rank_ends_the_wait_of_the_others_at_the_end_of_a_round(
    world, connector, packed, request_of, caplog
):
    receivers = world(tp=2, more=PATIENT)
    shelve(connector, packed, [1])
    receivers[1].kv_payload_slicer = lambda *_: 1 / 0
    # Rank 0 waits for a shard that never comes, and its deadline is far away.
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]
    assert "rank 1 lacks primary: the payload slicer failed" in caplog.text


def test_d06_a_companion_that_nobody_asks_for_is_not_waited_for(world, connector, packed, request_of):
    receivers = world(tp=2, more=PATIENT)
    shelve(connector, packed, [0, 1])
    requests = [request_of(cfg_kv_request_ids=dict(BOTH)) for _ in receivers]
    assert receive_together(receivers, requests) == [True, True]
    assert [receiver.counters["companions_missing"] for receiver in receivers] == [1, 1]


def test_the_published_exchange_takes_place_once_after_the_whole_wait(world, connector, packed, request_of):
    receivers = world(tp=2, more={**PATIENT, "kv_agreement": "published", "recv_timeout": 0.1})
    shelve(connector, packed, [0])
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]
    made = [receiver.topo_config.tp_group.calls for receiver in receivers]
    assert made == [[("recv", 1), ("broadcast", 0)], [("send", 0), ("broadcast", 0)]]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_round_takes_some_time(make_receiver, wrong):
    with pytest.raises(ConfigError, match="kv_round_timeout"):
        make_receiver(kv_round_timeout=wrong)


# Waits overlap


@pytest.mark.parametrize("first", ["r1", "c1", "c2"])
def test_d02_whatever_comes_first_is_taken_while_the_others_are_waited_for(
    make_receiver, connector, packed, request_of, first
):
    # A sender with room for one payload: each of the others is put once the one before was taken.
    names = {name: f"omni_0_to_1_kv_cache_{name}" for name in ("r1", "c1", "c2")}
    order = sorted(names, key=lambda name: name != first)
    get = connector.get

    def get_and_refill(**where):
        found = get(**where)
        if found is not None and order:
            put(order.pop(0))
        return found

    def put(name):
        connector.kept["0", "1", names[name]] = packed([7], request_id=name)

    put(order.pop(0))
    connector.get = get_and_refill
    receiver = make_receiver(connector=connector, recv_timeout=20.0)
    req = request_of(cfg_kv_request_ids={"cfg_text": "c1", "cfg_img": "c2"})
    assert receiver.receive_multi_kv_cache(req, collect)
    assert req.sampling_params.cfg_text_past_key_values is not None
    assert req.sampling_params.cfg_img_past_key_values is not None
    assert receiver.counters["received"] == 3


def test_a_companion_of_a_sender_of_its_own_is_asked_of_that_sender(make_receiver, connector, packed, request_of):
    def elsewhere(request_id, ids, manager, device):
        connector.kept["0", "1", "omni_0_to_1_kv_cache_c1"] = packed([8], request_id="c1")
        data, _ = manager.receive_kv_cache_for_request(ids["cfg_text"], device, sender_info=SENDER_INFO)
        return {"cfg_text_past_key_values": data["layer_blocks"]}

    receiver = make_receiver(connector=connector)
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed([7])
    assert receiver.receive_multi_kv_cache(request_of(cfg_kv_request_ids=dict(BOTH)), elsewhere)
    assert connector.asked[-1][1] == {"source_host": "h", "source_port": 1000}


# After the verdict


@pytest.mark.parametrize("dialect", ["published", "contents"])
@pytest.mark.parametrize("prefetched", [False, True])
def test_x16_what_a_get_consumed_is_kept_for_a_retry_after_a_drop(
    world, connector, packed, request_of, heads_of, dialect, prefetched
):
    receivers = world(tp=2, more={"kv_agreement": dialect, "async_prefetch": prefetched})
    shelve(connector, packed, [0])
    assert consume(receivers, [request_of(), request_of()], prefetched) == [False, False]
    shelve(connector, packed, [1])
    requests = [request_of(), request_of()]
    assert consume(receivers, requests) == [True, True]
    assert [heads_of(req.past_key_values) for req in requests] == [[0], [1]]


def test_d28_parts_of_different_attempts_are_not_kept_for_a_retry(world, connector, packed, request_of):
    receivers = world(tp=2, more={"kv_agreement": "contents"})
    shelve(connector, packed, [0], tokens=3)
    shelve(connector, packed, [1], tokens=9)
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]
    # Sent once more, whole: the rank that held the odd one must not vote on it again.
    shelve(connector, packed, [0, 1], tokens=9)
    requests = [request_of(), request_of()]
    assert receive_together(receivers, requests) == [True, True]
    assert [len(req.past_key_values.key_cache[0]) for req in requests] == [9, 9]


def test_x16_what_was_kept_is_dropped_when_another_request_is_received(world, connector, packed, request_of):
    receivers = world(tp=2)
    shelve(connector, packed, [0])
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]
    shelve(connector, packed, [0, 1], "r2")
    assert receive_together(receivers, [request_of("r2"), request_of("r2")]) == [True, True]
    shelve(connector, packed, [1])
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]


@pytest.mark.parametrize("prefetched", [False, True])
def test_nothing_is_acknowledged_before_the_verdict(world, leasing, packed, request_of, prefetched, monkeypatch):
    receivers = world(tp=2, more={"kv_agreement": "contents", "async_prefetch": prefetched})
    seen = []
    for receiver in receivers:
        settle = receiver._together._lockstep.settle
        monkeypatch.setattr(
            receiver._together._lockstep,
            "settle",
            lambda case, settle=settle: (settle(case), seen.append(list(leasing.ended)))[0],
        )
    shelve(leasing, packed, [0, 1])
    # Each rank notes what was given up before its own verdict, and acknowledges only after it.
    assert consume(receivers, [request_of(), request_of()], prefetched) == [True, True]
    assert seen[0] == []
    assert sorted(leasing.ended) == [(key("r1", 0), "release"), (key("r1", 1), "release")]


@pytest.mark.parametrize("prefetched", [False, True])
def test_x13_what_a_connector_takes_back_is_given_back_after_a_drop(
    world, leasing, packed, request_of, heads_of, prefetched
):
    receivers = world(tp=2, more={"kv_agreement": "contents", "async_prefetch": prefetched})
    shelve(leasing, packed, [0])
    assert consume(receivers, [request_of(), request_of()], prefetched) == [False, False]
    assert leasing.ended == [(key("r1", 0), "put_back")]
    shelve(leasing, packed, [1])
    requests = [request_of(), request_of()]
    assert consume(receivers, requests) == [True, True]
    assert [heads_of(req.past_key_values) for req in requests] == [[0], [1]]


def test_what_was_prefetched_and_is_passed_over_is_given_back(make_receiver, leasing, packed, request_of):
    receiver = make_receiver(connector=leasing, async_prefetch=True)
    name = "omni_0_to_1_kv_cache_r1"
    leasing.kept["0", "1", name] = packed()
    receiver.start_prefetch({"request_id": "r1", "kv_sender_info": SENDER_INFO})
    assert receiver.wait_prefetch(20.0)
    assert receiver.consume_prefetched_kv(request_of("r2")) == (None, 0)
    assert leasing.ended == [(name, "put_back")]
    assert receiver.consume_and_distribute_kv_cache(request_of("r1"))
    assert leasing.ended[1:] == [(name, "release")]


def test_a_prefetch_that_still_runs_is_waited_for_in_another_round(world, connector, packed, request_of, heads_of):
    receivers = world(tp=2, more={**PATIENT, "async_prefetch": True})
    shelve(late(connector, receivers, key("r1", 0)), packed, [0, 1])
    receivers[0].start_prefetch({"request_id": "r1", "kv_sender_info": SENDER_INFO})
    requests = [request_of(), request_of()]
    assert consume(receivers, requests) == [True, True]
    assert [heads_of(req.past_key_values) for req in requests] == [[0], [1]]
    assert receivers[0].counters["refetched"] >= 1


def test_a_shard_that_a_prefetch_brought_is_not_fetched_again_for_the_one_that_was_late(
    make_receiver, connector, packed, request_of, heads_of
):
    receiver = make_receiver(connector=connector, async_prefetch=True, from_tp=2, to_tp=1)
    connector.kept["0", "1", "r1_0_0_0_0"] = packed([0])
    receiver.start_prefetch({"request_id": "r1", "kv_sender_info": SENDER_INFO})
    assert receiver.wait_prefetch(20.0)
    connector.kept["0", "1", "r1_0_0_1_0"] = packed([1])
    req = request_of()
    assert receiver.consume_and_distribute_kv_cache(req)
    assert heads_of(req.past_key_values) == [0, 1]
    assert [asked for asked, _ in connector.asked].count("r1_0_0_0_0") == 1


def test_a_retry_over_a_transport_finds_what_a_prefetch_brought_before_the_drop(make_sender, world, request_of):
    settings = {"connector_config": {"type": "memory", "namespace": f"prefetched-{uuid.uuid4().hex[:12]}"}}
    receivers = world(tp=2, connectors=[None, None], more={**settings, "async_prefetch": True})
    cache = torch.arange(2 * 4 * 4 * 2 * 8, dtype=torch.float32).view(2, 4, 4, 2, 8)

    def send(rank):
        sender = make_sender(**settings, rank=rank, from_tp=2, to_tp=2)
        finished = {"r1": {"block_ids": [2, 0], "seq_len": 6}}
        assert sender.handle_finished_requests_kv_transfer(finished, [cache], 4, "float32") == ["r1"]

    send(0)
    assert consume(receivers, [request_of(), request_of()], prefetched=True) == [False, False]
    send(1)
    assert consume(receivers, [request_of(), request_of()]) == [True, True]


def consume(receivers, requests, prefetched=False):
    """What each rank says once it has used what rank 0 of them, and the others where it is there, fetched ahead."""
    if prefetched:
        for receiver in receivers:
            receiver.start_prefetch({"request_id": "r1", "kv_sender_info": SENDER_INFO})
            assert receiver.wait_prefetch(20.0)
    return run_together(
        [
            lambda receiver=receiver, req=req: receiver.consume_and_distribute_kv_cache(req)
            for receiver, req in zip(receivers, requests, strict=True)
        ]
    )
