"""Ranks of one tensor-parallel group: they keep a request's KV together or drop it together."""

from __future__ import annotations

import queue

import pytest
from tests.support.engine_requests import receive_together, run_together, shelve


class ThreadGroup:
    """One rank's view of ranks that are threads; a receive gives up rather than hang the test."""

    def __init__(self, rank, size, mail):
        self.rank_in_group, self.world_size, self._mail, self.calls = rank, size, mail, 0

    @classmethod
    def of(cls, size):
        mail = {(source, target): queue.Queue() for source in range(size) for target in range(size)}
        return [cls(rank, size, mail) for rank in range(size)]

    def send_object(self, obj, dst):
        self.calls += 1
        self._mail[self.rank_in_group, dst].put(obj)

    def recv_object(self, src):
        self.calls += 1
        return self._mail[src, self.rank_in_group].get(timeout=20)

    def broadcast_object(self, obj=None, src=0):
        if self.rank_in_group != src:
            return self.recv_object(src)
        for rank in range(self.world_size):
            if rank != src:
                self.send_object(obj, rank)
        return obj


@pytest.fixture
def layout_of():
    def make(group, *, role="LOCAL", tp_active=True, world=None):
        from vllm_omni.distributed.omni_connectors import kv_transfer_manager as module

        return module._TransferTopoConfig(
            role=module.ReceiveRole[role],
            tp_active=tp_active,
            cfg_size=1,
            cfg_rank=0,
            cfg_group=None,
            sp_size=1,
            sp_rank=0,
            sp_group=None,
            world=world,
            tp_group=group,
            tp_size=group.world_size if group is not None else 1,
        )

    return make


@pytest.fixture
def stage(make_receiver, connector, layout_of):
    """The receivers of a stage of `size` ranks, each of which fetches its own shard."""

    def make(size, **more):
        receivers = []
        for rank, group in enumerate(ThreadGroup.of(size)):
            receiver = make_receiver(**{"connector": connector, "rank": rank, "from_tp": size, "to_tp": size, **more})
            receiver._topo_config = layout_of(group)
            receivers.append(receiver)
        return receivers

    return make


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_came_everywhere_is_kept_everywhere(stage, connector, packed, request_of, heads_of, size):
    shelve(connector, packed, range(size))
    requests = [request_of() for _ in range(size)]
    assert receive_together(stage(size), requests) == [True] * size
    assert [heads_of(req.past_key_values) for req in requests] == [[rank] for rank in range(size)]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_d01_one_rank_that_misses_its_shard_makes_all_drop_theirs(stage, connector, packed, request_of, missing):
    shelve(connector, packed, {0, 1, 2} - {missing})
    receivers, requests = stage(3), [request_of() for _ in range(3)]
    assert receive_together(receivers, requests) == [False] * 3
    assert [req.past_key_values for req in requests if hasattr(req, "past_key_values")] == [None, None]
    assert [receiver.counters["dropped"] for receiver in receivers] == [1, 1, 1]


def test_d01_the_next_request_on_the_same_ranks_works(stage, connector, packed, request_of):
    receivers = stage(2)
    shelve(connector, packed, [0])
    assert receive_together(receivers, [request_of(), request_of()]) == [False, False]
    shelve(connector, packed, [0, 1], "r2")
    assert receive_together(receivers, [request_of("r2"), request_of("r2")]) == [True, True]


@pytest.mark.parametrize("dialect", ["published", "contents"])
def test_d01_a_shard_that_comes_after_its_ranks_deadline_is_used_by_no_rank_until_all_retry(
    stage, connector, packed, request_of, monkeypatch, dialect
):
    receivers = stage(2, kv_agreement=dialect)
    lockstep = receivers[1]._together._lockstep
    settle = lockstep.settle

    def settle_late(case):
        shelve(connector, packed, [1])
        return settle(case)

    shelve(connector, packed, [0])
    monkeypatch.setattr(lockstep, "settle", settle_late)
    requests = [request_of(), request_of()]
    assert receive_together(receivers, requests) == [False, False]
    assert [getattr(req, "past_key_values", None) for req in requests] == [None, None]
    monkeypatch.undo()
    assert receive_together(receivers, [request_of(), request_of()]) == [True, True]


LOCAL_TROUBLE = {
    "no connector": lambda receiver: setattr(receiver, "_connector", False),
    "no thread to prefetch with": lambda receiver: receiver.shutdown_prefetch(),
    "other counters": lambda receiver: receiver.counters.update(received=200, dropped=7),
    "something prefetched": lambda receiver: receiver.start_prefetch(
        {"request_id": "other", "kv_sender_info": {"host": "h", "zmq_port": 1000}}
    ),
    "an unusable sender": lambda receiver: receiver.update_sender_info({"host": 5}),
}


@pytest.mark.parametrize("dialect", ["published", "contents"])
@pytest.mark.parametrize("trouble", LOCAL_TROUBLE)
def test_d36_whether_a_rank_votes_hangs_on_nothing_that_it_knows_alone(
    stage, connector, packed, request_of, dialect, trouble
):
    # Four ranks, of which one differs from the others after some requests; each makes the same calls as before.
    receivers = stage(4, kv_agreement=dialect, async_prefetch=True)
    groups = [receiver.topo_config.tp_group for receiver in receivers]

    def receive(request_id):
        before = [group.calls for group in groups]
        shelve(connector, packed, range(4), request_id)
        requests = [request_of(request_id) for _ in receivers]
        outcomes = run_together(
            [
                lambda receiver=receiver, req=req: receiver.consume_and_distribute_kv_cache(req)
                for receiver, req in zip(receivers, requests, strict=True)
            ]
        )
        assert len(set(outcomes)) == 1
        return [group.calls - called for group, called in zip(groups, before, strict=True)]

    usual = [receive(f"r{number}") for number in range(3)]
    LOCAL_TROUBLE[trouble](receivers[2])
    assert [receive(f"s{number}") for number in range(3)] == usual


def test_d02_a_companion_that_came_on_one_rank_only_drops_all_of_it(stage, connector, packed, request_of):
    def collect(request_id, companion_ids, manager, device):
        data, _ = manager.receive_kv_cache_for_request(companion_ids["cfg_text"], device)
        return {"cfg_text_past_key_values": data["layer_blocks"]} if data else {}

    shelve(connector, packed, [0, 1])
    shelve(connector, packed, [0], "c1")
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in range(2)]
    assert receive_together(stage(2), requests, collect) == [False, False]
    assert requests[0].past_key_values is None
    assert requests[0].sampling_params.cfg_text_past_key_values is None
    assert requests[1].sampling_params.past_key_values is None


def test_x13_a_drop_keeps_the_companion_ids_for_a_retry(stage, connector, packed, request_of):
    shelve(connector, packed, [0])
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in range(2)]
    assert receive_together(stage(2), requests) == [False, False]
    assert [req.sampling_params.cfg_kv_request_ids for req in requests] == [{"cfg_text": "c1"}] * 2


def test_the_same_absence_on_every_rank_is_no_reason_to_drop_what_is_there(stage, connector, packed, request_of):
    shelve(connector, packed, [0, 1])
    requests = [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in range(2)]
    assert receive_together(stage(2), requests, lambda *_: {}) == [True, True]


@pytest.mark.parametrize("trouble", ["table", "collector", "connector", "receive"])
def test_whatever_goes_wrong_on_one_rank_it_still_votes(stage, connector, packed, request_of, monkeypatch, trouble):
    shelve(connector, packed, [0, 1])
    receivers, requests = stage(2), [request_of(cfg_kv_request_ids={"cfg_text": "c1"}) for _ in range(2)]

    def explode(*_, **__):
        raise RuntimeError("trouble")

    collector = None
    if trouble == "table":
        requests[1].kv_sender_info = {0: object(), 5: [1]}
    elif trouble == "collector":
        collector = lambda req, ids, manager, device: (  # noqa: E731
            {"cfg_text_kv_metadata": {}} if manager is receivers[0] else explode()
        )
    elif trouble == "connector":
        receivers[1]._connector = type("Broken", (), {"get": explode, "close": lambda self: None})()
    else:
        monkeypatch.setattr(receivers[1], "receive_multi_kv_cache", explode)
    assert receive_together(receivers, requests, collector) == [False, False]
    assert requests[0].past_key_values is None


def test_a_payload_lost_on_one_rank_is_a_no_and_not_an_exception(stage, connector, packed, request_of, monkeypatch):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVPrefetchConsumeError

    def lost(*_, **__):
        raise KVPrefetchConsumeError("gone")

    shelve(connector, packed, [0, 1])
    receivers, requests = stage(2), [request_of(), request_of()]
    monkeypatch.setattr(receivers[1], "receive_kv_cache_for_request", lost)
    assert receive_together(receivers, requests) == [False, False]


# Who does not vote


@pytest.mark.parametrize("aside", ["leader", "no tensor parallelism", "no group", "group of one", "receives nothing"])
def test_a_rank_that_no_peer_waits_for_does_not_vote(make_receiver, layout_of, request_of, aside):
    group = ThreadGroup.of(1 if aside == "group of one" else 2)[0]
    manager = make_receiver(need_recv_cache=aside != "receives nothing")
    manager._topo_config = layout_of(
        None if aside == "no group" else group,
        role="LEADER" if aside == "leader" else "LOCAL",
        tp_active=aside != "no tensor parallelism",
    )
    assert manager._tp_local_receive_consensus(request_of(), True) is True
    assert manager._tp_local_receive_consensus(request_of(), False) is False
    assert group.calls == 0


@pytest.mark.parametrize("request_id", [None, "dummy_req_id", "dummy_req_id/4"])
def test_warm_up_requests_are_not_voted_on(make_receiver, layout_of, request_of, request_id):
    group = ThreadGroup.of(2)[0]
    manager = make_receiver()
    manager._topo_config = layout_of(group)
    assert manager._tp_local_receive_consensus(request_of(request_id), True) is True
    assert group.calls == 0


def test_d03_the_world_is_never_part_of_the_vote(stage, connector, packed, request_of, layout_of):
    receivers, world = stage(2), ThreadGroup.of(4)[0]
    for receiver in receivers:
        receiver._topo_config = layout_of(receiver._topo_config.tp_group, world=world)
    shelve(connector, packed, [0, 1])
    assert receive_together(receivers, [request_of(), request_of()]) == [True, True]
    assert world.calls == 0


def test_a_prefetched_request_is_voted_on_as_well(stage, connector, packed, request_of):
    shelve(connector, packed, [0])
    receivers, requests = stage(2, async_prefetch=True), [request_of(), request_of()]
    receivers[0].start_prefetch({"request_id": "r1", "kv_sender_info": {"host": "h", "zmq_port": 1000}})
    assert receivers[0].wait_prefetch(20.0)

    outcomes = run_together(
        [lambda rank=rank: receivers[rank].consume_and_distribute_kv_cache(requests[rank]) for rank in (0, 1)]
    )
    assert outcomes == [False, False]
    assert requests[0].past_key_values is None
