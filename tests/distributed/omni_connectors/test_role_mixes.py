"""Every role mix of an engine, between threads: all ranks of a request go the same way, and no other is touched."""

from __future__ import annotations

import threading
import time
import uuid

import pytest
import torch
from tests.support.engine_requests import collect, receive_together, run_together, shelve

from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.channel import Channel
from omnikv.groups.threads import ThreadGroup


def calls(receivers, group):
    return [getattr(receiver.topo_config, group).calls for receiver in receivers]


# Tensor-parallel leaders with followers of their own


@pytest.mark.parametrize("sizes", [{"tp": 2, "cfg": 2}, {"tp": 2, "sp": 2}, {"tp": 2, "cfg": 2, "sp": 2}])
def test_what_came_to_every_leader_reaches_every_rank(world, connector, packed, request_of, heads_of, sizes):
    receivers = world(**sizes)
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in receivers]
    shelve(connector, packed, [0, 1], "r1", "c1")
    assert receive_together(receivers, requests, collect) == [True] * len(receivers)
    ranks = [receiver.topo_config.tp_group.rank_in_group for receiver in receivers]
    assert [heads_of(req.past_key_values) for req in requests] == [[rank] for rank in ranks]


@pytest.mark.parametrize("sizes", [{"tp": 2, "cfg": 2}, {"tp": 2, "sp": 2}, {"tp": 2, "cfg": 2, "sp": 2}])
@pytest.mark.parametrize("missed", [0, 1])
def test_x14_a_leader_that_missed_leaves_all_leaders_and_followers_without(
    world, connector, packed, request_of, sizes, missed
):
    receivers = world(**sizes)
    requests = [request_of() for _ in receivers]
    shelve(connector, packed, [1 - missed], "r1")
    assert receive_together(receivers, requests) == [False] * len(receivers)
    assert [getattr(req, "past_key_values", None) for req in requests] == [None] * len(receivers)


def test_x14_the_next_request_on_the_same_ranks_works(world, connector, packed, request_of):
    receivers = world(tp=2, cfg=2)
    shelve(connector, packed, [0], "r1")
    assert receive_together(receivers, [request_of() for _ in receivers]) == [False] * 4
    shelve(connector, packed, [0, 1], "r2")
    assert receive_together(receivers, [request_of("r2") for _ in receivers]) == [True] * 4


def test_x14_a_follower_whose_device_is_full_fails_the_request_for_all(
    world, connector, packed, request_of, monkeypatch
):
    import omnikv.handoff.group_receive as module

    def move(payload, device):
        if threading.current_thread().name == "full":
            raise RuntimeError("out of memory")
        return payload

    monkeypatch.setattr(module, "move_tensors", move)
    receivers = world(tp=2, cfg=2)
    requests = [request_of() for _ in receivers]
    shelve(connector, packed, [0, 1], "r1")

    def receive(rank):
        threading.current_thread().name = "full" if rank == 3 else "ok"
        return receivers[rank].receive_multi_kv_cache_distributed(requests[rank])

    outcomes = run_together([lambda rank=rank: receive(rank) for rank in range(4)])
    assert outcomes == [False] * 4
    assert [getattr(req, "past_key_values", None) for req in requests] == [None] * 4
    assert [receiver.counters["dropped"] for receiver in receivers] == [1, 1, 0, 0]


def test_followers_never_vote_in_their_own_tensor_group(world, connector, packed, request_of):
    receivers = world(tp=2, cfg=2)
    shelve(connector, packed, [0, 1], "r1")
    receive_together(receivers, [request_of() for _ in receivers])
    assert [bool(made) for made in calls(receivers, "tp_group")] == [True, True, False, False]


def test_d07_a_shared_prefix_in_a_guidance_group_of_three_serves_no_rank_of_it(
    world, connector, packed, request_of, caplog
):
    receivers = world(tp=2, cfg=3)
    shelve(connector, packed, [0, 1], "r1")
    requests = [request_of() for _ in receivers]
    assert receive_together(receivers, requests) == [False] * 6
    assert "has no KV for guidance ranks [1, 2]" in caplog.text
    assert [getattr(req, "past_key_values", None) for req in requests] == [None] * 6


# Replicas


def test_d03_a_replica_that_warms_up_is_not_part_of_another_replicas_vote(world, connector, packed, request_of):
    receivers = world(tp=2, dp=2)
    shelve(connector, packed, [0, 1], "r1")
    requests = [request_of(), request_of(), request_of("dummy_req_id"), request_of("dummy_req_id")]
    assert receive_together(receivers, requests) == [True, True, False, False]
    assert calls(receivers, "world") == [[]] * 4
    assert [bool(made) for made in calls(receivers, "tp_group")] == [True, True, False, False]


def test_d03_a_replica_finishes_while_the_other_does_nothing_at_all(world, connector, packed, request_of):
    receivers = world(tp=2, cfg=2, dp=2)
    shelve(connector, packed, [0, 1], "r1")
    assert receive_together(receivers[:4], [request_of() for _ in range(4)]) == [True] * 4


@pytest.mark.parametrize("sizes", [{"cfg": 2}, {"sp": 2}, {"cfg": 2, "sp": 2}])
def test_x15_without_tensor_parallelism_a_replica_hands_on_within_itself(
    world, connector, packed, request_of, heads_of, sizes
):
    receivers = world(**sizes, dp=2)
    size = len(receivers) // 2
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed([7])
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r2"] = packed([8], request_id="r2")
    requests = [request_of("r1" if rank < size else "r2") for rank in range(2 * size)]
    assert receive_together(receivers, requests) == [True] * (2 * size)
    assert [heads_of(req.past_key_values) for req in requests] == [[7.0]] * size + [[8.0]] * size
    assert calls(receivers, "world") == [[]] * (2 * size)


def test_x15_a_world_that_is_one_replica_is_served_as_published(world, connector, packed, request_of):
    receivers = world(cfg=2, sp=2)
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed([7])
    assert receive_together(receivers, [request_of() for _ in receivers]) == [True] * 4
    assert calls(receivers, "world") == [[("broadcast", 0)]] * 4


def test_x15_replicas_of_one_rank_each_fetch_for_themselves(world, connector, packed, request_of):
    receivers = world(dp=2)
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed([7])
    assert receive_together(receivers, [request_of(), request_of("r2")]) == [True, False]
    assert calls(receivers, "world") == [[], []]


# Contents


def test_x12_ranks_that_received_different_numbers_of_tokens_drop_both(world, connector, packed, request_of, caplog):
    receivers = world(tp=2, more={"kv_agreement": "contents"})
    shelve(connector, packed, [0], "r1", tokens=3)
    shelve(connector, packed, [1], "r1", tokens=99)
    requests = [request_of(), request_of()]
    assert receive_together(receivers, requests) == [False, False]
    assert "rank 1 lacks primary: differs: tokens 99 here, 3 on rank 0" in caplog.text
    assert [req.past_key_values for req in requests] == [None, None]


def test_x12_leaders_compare_contents_too(world, connector, packed, request_of):
    receivers = world(tp=2, cfg=2, more={"kv_agreement": "contents"})
    shelve(connector, packed, [0], "r1", tokens=3)
    shelve(connector, packed, [1], "r1", tokens=99)
    assert receive_together(receivers, [request_of() for _ in receivers]) == [False] * 4


@pytest.mark.parametrize(
    "setting", [{"kv_agreement": "perhaps"}, {"kv_agreement_over": "pigeon"}, {"kv_required_roles": "cfg_text"}]
)
def test_a_way_to_agree_that_does_not_exist_is_refused_at_once(make_receiver, setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        make_receiver(**setting)


# Companions


def test_d02_a_required_companion_that_came_nowhere_fails_the_request(world, connector, packed, request_of):
    receivers = world(tp=2, more={"kv_required_roles": ["cfg_text"]})
    shelve(connector, packed, [0, 1], "r1")
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in receivers]
    assert receive_together(receivers, requests, collect) == [False, False]
    assert [req.sampling_params.cfg_kv_request_ids for req in requests] == [{"cfg_text": "c1"}] * 2
    assert receivers[0].counters["rank 0 lacks cfg_text"] == 1


def test_d06_a_companion_that_came_nowhere_is_said_aloud_where_it_is_not_required(
    world, connector, packed, request_of, caplog
):
    receivers = world(tp=2)
    shelve(connector, packed, [0, 1], "r1")
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1", "cfg_img": "c2"}) for _ in receivers]
    assert receive_together(receivers, requests, collect) == [True, True]
    assert "goes on without the companions cfg_img, cfg_text" in caplog.text
    assert [receiver.counters["companions_missing"] for receiver in receivers] == [1, 1]


def test_one_deadline_a_request_for_the_primary_and_its_companions(make_receiver, connector, request_of, monkeypatch):
    import omnikv.handoff.open_request as module

    deadlines = {}
    monkeypatch.setattr(
        module, "fetch_until", lambda fetch, beside, *, until, deadline: deadlines.update({fetch.request_id: deadline})
    )
    receiver = make_receiver(connector=connector, recv_timeout=30.0)
    req = request_of(cfg_kv_request_ids={"cfg_text": "c1", "cfg_img": "c2"})
    assert not receiver.receive_multi_kv_cache_distributed(req, collect)
    assert set(deadlines) == {"r1", "c1", "c2"}
    assert len(set(deadlines.values())) == 1
    assert not receiver.receive_multi_kv_cache(req, collect)
    assert len(set(deadlines.values())) == 1


def test_a_collector_that_raises_fails_the_request_with_its_cause(world, connector, packed, request_of, caplog):
    receivers = world(tp=2)
    shelve(connector, packed, [0, 1], "r1")
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in receivers]

    def explode(request_id, ids, manager, device):
        if manager is receivers[1]:
            raise KeyError("no such branch")

    assert receive_together(receivers, requests, explode) == [False, False]
    assert "rank 1 lacks primary: the collector of its companions failed: KeyError" in caplog.text


@pytest.mark.parametrize("hook", ["kv_recv_key_builder", "kv_payload_merger", "kv_payload_slicer"])
def test_a_hook_that_raises_is_a_failed_vote(world, connector, packed, request_of, hook):
    receivers = world(tp=2)
    shelve(connector, packed, [0, 1], "r1")

    def explode(*_, **__):
        raise LookupError("trouble")

    setattr(receivers[1], hook, explode)
    if hook == "kv_payload_merger":
        receivers[1].kv_recv_key_builder = lambda *_, **__: [("r1_0_0_1_1", 0), ("r1_0_0_0_0", 1)]
    assert receive_together(receivers, [request_of(), request_of()])[1] is False


# Many requests at once


def test_d37_a_request_that_is_late_on_one_rank_holds_up_no_other_of_the_stage(world, connector, packed, request_of):
    receivers = world(tp=8, more={"kv_agreement": "contents", "recv_timeout": 600.0, "kv_round_timeout": 0.05})
    give_channels(receivers)
    done, get = set(), connector.get

    def get_late(**where):
        # One rank's shard of one request comes once all other requests are done on every rank.
        is_late = where["get_key"] == "r0_0_0_5_5"
        return None if is_late and len(done) < 7 * len(receivers) else get(**where)

    def receive(receiver, request_id):
        assert receiver.receive_multi_kv_cache_distributed(request_of(request_id))
        done.add((receiver.tp_topology.local_rank, request_id))
        return True

    connector.get = get_late
    request_ids = [f"r{number}" for number in range(8)]
    shelve(connector, packed, range(8), *request_ids)
    calls = [
        lambda receiver=receiver, request_id=request_id: receive(receiver, request_id)
        for receiver in receivers
        for request_id in request_ids
    ]
    assert run_together(calls) == [True] * 64


def give_channels(receivers):
    """Nothing; the receivers of one tensor-parallel group get the channel that a group of real processes would form."""
    formed = run_together(
        [
            lambda group=group: Channel.form(group, deadline=time.monotonic() + 20.0)
            for group in ThreadGroup.create(len(receivers))
        ]
    )
    for receiver, channel in zip(receivers, formed, strict=True):
        group = receiver.topo_config.tp_group
        receiver._together._lockstep._seats._by_group[id(group)] = (group, channel)


# After the verdict, and when there is none


def sent(make_sender, namespace, rank, request_id="r1"):
    sender = make_sender(connector_config={"type": "memory", "namespace": namespace}, rank=rank, from_tp=2, to_tp=2)
    cache = torch.arange(2 * 4 * 4 * 2 * 8, dtype=torch.float32).view(2, 4, 4, 2, 8)
    finished = {request_id: {"block_ids": [2, 0], "seq_len": 6}}
    assert sender.handle_finished_requests_kv_transfer(finished, [cache], 4, "float32") == [request_id]
    return sender


def test_x13_what_came_to_one_rank_only_is_given_back_and_a_retry_finds_it(world, make_sender, request_of):
    namespace = f"retry-{uuid.uuid4().hex[:12]}"
    settings = {"connector_config": {"type": "memory", "namespace": namespace}}
    receivers = world(tp=2, connectors=[None, None], more=settings)
    sent(make_sender, namespace, 0)
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]
    sent(make_sender, namespace, 1)
    assert receive_together(receivers, [request_of(), request_of()]) == [True, True]


def test_d05_a_companion_that_is_not_sent_after_all_fails_at_once(make_receiver, make_sender, request_of, caplog):
    namespace = f"decline-{uuid.uuid4().hex[:12]}"
    settings = {"connector_config": {"type": "memory", "namespace": namespace}}
    sender, receiver = make_sender(**settings), make_receiver(**settings, recv_timeout=600.0)
    sender.decline_kv_transfer("c1", "final at stage 0")
    assert receiver.receive_kv_cache_for_request("c1") == (None, 0)
    assert "final at stage 0" in caplog.text
    assert sender.counters["declined"] == 1


@pytest.mark.parametrize(("required", "outcome"), [(["cfg_text"], False), ([], True)])
def test_d05_a_companion_that_its_sender_declines_is_settled_by_all_ranks_at_once(
    world, make_sender, request_of, caplog, required, outcome
):
    # "Not for the stage below" is no word on KV: the role is still asked for, and all ranks hear that it will not come.
    settings = {"connector_config": {"type": "memory", "namespace": f"declined-{uuid.uuid4().hex[:12]}"}}
    more = {**settings, "recv_timeout": 600.0, "kv_agreement": "contents", "kv_required_roles": required}
    receivers = world(tp=2, connectors=[None, None], more=more)
    for rank in (0, 1):
        sent(make_sender, settings["connector_config"]["namespace"], rank).decline_kv_transfer("c1", "final at stage 0")
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in receivers]
    assert receive_together(receivers, requests, collect) == [outcome, outcome]
    assert [req.past_key_values is not None for req in requests] == [outcome, outcome]
    assert "cfg_text" in caplog.text
    assert "final at stage 0" in caplog.text


def test_d05_a_connector_that_cannot_tell_is_not_bothered(make_sender, connector):
    make_sender(connector=connector).decline_kv_transfer("c1", "final at stage 0")
    assert connector.puts == 0


def test_d01_a_follower_whose_leaders_died_is_in_doubt_by_its_deadline(world, request_of):
    receivers = world(tp=2, cfg=2, more={"kv_vote_timeout": 0.05})
    with pytest.raises(VerdictInDoubt, match="tear the group down"):
        receivers[2].receive_multi_kv_cache_distributed(request_of())


@pytest.mark.parametrize("sizes", [{"tp": 2, "cfg": 2}, {"tp": 2, "sp": 2}, {"tp": 2, "cfg": 2, "sp": 2}])
def test_x14_followers_hear_at_once_that_their_leader_is_in_doubt(world, connector, packed, request_of, sizes):
    # Leader 1 died; its peers' followers wait for their own leader, and its word comes long before their deadline.
    receivers = world(**sizes)
    for receiver in receivers:
        receiver.config.kv_vote_timeout = 0.05 if receiver.topo_config.is_leader else 600.0
    survivors = [receiver for receiver in receivers if receiver.topo_config.tp_group.rank_in_group == 0]
    shelve(connector, packed, [0], "r1")
    requests = [request_of() for _ in survivors]
    answers = receive_together(survivors, requests)
    assert [type(answer) for answer in answers] == [VerdictInDoubt] * len(survivors)
    assert [receiver.counters["dropped"] for receiver in survivors] == [0] * len(survivors)


def test_x14_followers_hear_that_the_last_word_is_in_doubt(world, connector, packed, request_of, monkeypatch):
    receivers = world(tp=2, cfg=2)
    shelve(connector, packed, [0, 1], "r1")

    def lost(case, causes):
        raise VerdictInDoubt("lost")

    for receiver in receivers:
        monkeypatch.setattr(receiver._together._lockstep, "settle_handing_on", lost)
    requests = [request_of() for _ in receivers]
    assert [type(answer) for answer in receive_together(receivers, requests)] == [VerdictInDoubt] * 4
    assert [getattr(req, "past_key_values", None) for req in requests[2:]] == [None, None]
