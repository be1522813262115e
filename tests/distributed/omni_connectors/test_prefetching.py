"""Fetching the next request's KV while the engine works on another."""

from __future__ import annotations

import threading

import pytest
import torch

SENDER = {"host": "h", "zmq_port": 1000}
SOON_S = 20.0


def shelve(connector, packed, request_id="r1", head=7):
    connector.kept["0", "1", f"omni_0_to_1_kv_cache_{request_id}"] = packed([head], request_id=request_id)


def job(request_id="r1", sender_info=SENDER):
    return {"request_id": request_id, "kv_sender_info": sender_info}


@pytest.fixture
def receiver(make_receiver, connector):
    return make_receiver(connector=connector, async_prefetch=True)


def test_a_prefetched_request_needs_no_second_fetch(receiver, connector, packed, request_of, heads_of):
    shelve(connector, packed)
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    asked = len(connector.asked)
    req = request_of()
    assert receiver.consume_and_distribute_kv_cache(req)
    assert heads_of(req.past_key_values) == [7]
    assert len(connector.asked) == asked == 1
    assert connector.asked[0][1] == {"source_host": "h", "source_port": 1000}


def test_a_prefetched_payload_is_consumed_once(receiver, connector, packed, request_of, heads_of):
    shelve(connector, packed)
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    data, nbytes = receiver.consume_prefetched_kv(request_of())
    assert heads_of(data) == [7]
    assert nbytes == len(packed())
    assert receiver.consume_prefetched_kv(request_of()) == (None, 0)


def test_what_was_not_prefetched_is_received_in_the_foreground(receiver, connector, packed, request_of):
    shelve(connector, packed)
    assert receiver.consume_and_distribute_kv_cache(request_of())


def test_a_prefetch_that_found_nothing_falls_back_to_the_foreground(receiver, connector, packed, request_of):
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    shelve(connector, packed)
    assert receiver.consume_and_distribute_kv_cache(request_of())


@pytest.mark.parametrize(
    "nothing_to_do",
    [None, {}, {"request_id": "", "kv_sender_info": SENDER}, {"request_id": "r1"}, job(sender_info=None)],
)
def test_a_job_that_says_too_little_is_not_begun(receiver, connector, nothing_to_do):
    receiver.start_prefetch(nothing_to_do)
    assert receiver.wait_prefetch(0)
    assert connector.asked == []


@pytest.mark.parametrize("config", [{"async_prefetch": False}, {"async_prefetch": True, "need_recv_cache": False}])
def test_prefetching_is_off_unless_it_is_asked_for_and_the_stage_receives(make_receiver, connector, config):
    receiver = make_receiver(connector=connector, **config)
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch()
    assert connector.asked == []


def test_a_follower_does_not_take_its_leaders_payload(receiver, connector, packed):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import ReceiveRole, _TransferTopoConfig

    shelve(connector, packed)
    receiver._topo_config = _TransferTopoConfig(ReceiveRole.FOLLOWER, True, 2, 1, None, 1, 0, None, None)
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    assert connector.asked == []


def test_too_little_free_memory_on_the_device_leaves_it_to_the_foreground(
    make_receiver, connector, packed, monkeypatch
):
    shelve(connector, packed)
    receiver = make_receiver(connector=connector, async_prefetch=True, kv_prefetch_min_free_mem_ratio=0.5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    receiver.start_prefetch(job(), torch.device("cuda", 0))
    assert receiver.wait_prefetch(SOON_S)
    assert connector.asked == []


def test_the_same_request_is_fetched_once(receiver, connector, packed, request_of):
    shelve(connector, packed)
    receiver.start_prefetch(job())
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    receiver.start_prefetch(job())
    assert receiver.consume_prefetched_kv(request_of())[0] is not None
    assert len(connector.asked) == 1


def test_moving_on_to_another_request_drops_what_is_left_over(receiver, connector, packed, request_of, heads_of):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVPrefetchConsumeError

    shelve(connector, packed)
    shelve(connector, packed, "r2", 8)
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    receiver.start_prefetch(job("r2"))
    assert receiver.wait_prefetch(SOON_S)
    data, _ = receiver.consume_prefetched_kv(request_of("r2"))
    assert heads_of(data) == [8]
    with pytest.raises(KVPrefetchConsumeError, match="discarded"):
        receiver.consume_prefetched_kv(request_of("r1"))


@pytest.mark.parametrize("damage", ["on the way", "after it came"])
def test_a_payload_that_was_consumed_and_lost_is_not_waited_for_again(
    make_receiver, connector, packed, request_of, monkeypatch, damage
):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVPrefetchConsumeError

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    receiver = make_receiver(connector=connector, async_prefetch=True, recv_timeout=600)
    shelve(connector, packed)
    if damage == "on the way":
        connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed()[:-1]
    else:
        monkeypatch.setattr("omnikv.handoff.keyed_assemble.move_tensors", full)
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    with pytest.raises(KVPrefetchConsumeError):
        receiver.consume_prefetched_kv(request_of())
    receiver.start_prefetch(job())
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed()[:-1]
    asked = len(connector.asked)
    assert receiver.consume_and_distribute_kv_cache(request_of()) is False
    assert len(connector.asked) - asked <= 1


def test_waiting_says_when_something_still_runs(make_receiver, connector, packed):
    class Slow(type(connector)):
        began, go = threading.Event(), threading.Event()

        def get(self, **where):
            self.began.set()
            assert self.go.wait(SOON_S)
            return super().get(**where)

    slow = Slow()
    shelve(slow, packed)
    receiver = make_receiver(connector=slow, async_prefetch=True)
    receiver.start_prefetch(job())
    assert slow.began.wait(SOON_S)
    assert receiver.wait_prefetch(timeout=0) is False
    slow.go.set()
    assert receiver.wait_prefetch(timeout=SOON_S) is True


def test_closing_ends_a_fetch_that_still_waits_and_joins_the_thread(make_receiver, connector):
    receiver = make_receiver(connector=connector, async_prefetch=True, recv_timeout=600)
    receiver.start_prefetch(job())
    receiver.close()
    assert receiver.wait_prefetch(0)
    assert connector.closed == 1


def test_a_request_without_an_id_was_not_prefetched(receiver, request_of):
    assert receiver.consume_prefetched_kv(request_of(None)) == (None, 0)


def test_after_prefetching_is_shut_down_the_foreground_still_works(receiver, connector, packed, request_of):
    shelve(connector, packed)
    receiver.shutdown_prefetch()
    receiver.start_prefetch(job())
    assert connector.asked == []
    assert receiver.consume_and_distribute_kv_cache(request_of())


def test_what_was_prefetched_elsewhere_is_brought_to_the_device_that_the_request_runs_on(
    receiver, connector, packed, request_of
):
    shelve(connector, packed)
    receiver.start_prefetch(job(), "cpu")
    assert receiver.wait_prefetch(SOON_S)
    req = request_of()
    assert receiver.consume_and_distribute_kv_cache(req, torch.device("meta"))
    assert req.past_key_values.key_cache[0].device.type == "meta"


@pytest.mark.parametrize("odd", [None, [], ["r1"], "r1", {"request_id": "r1"}, job("dummy_req_id")])
def test_a_job_that_says_too_little_or_is_a_warm_up_begins_nothing(receiver, connector, odd):
    receiver.start_prefetch(odd)
    assert receiver.wait_prefetch(SOON_S)
    assert connector.asked == []


def test_a_hook_that_asks_to_exit_in_the_background_ends_no_later_fetch(
    receiver, connector, packed, request_of, heads_of
):
    def leave(*arguments):
        raise SystemExit(3)

    receiver.kv_recv_key_builder = leave
    receiver.start_prefetch(job())
    assert receiver.wait_prefetch(SOON_S)
    receiver.kv_recv_key_builder = None
    shelve(connector, packed)
    receiver.start_prefetch(job("r1"))
    assert receiver.wait_prefetch(SOON_S)
    req = request_of()
    assert receiver.consume_and_distribute_kv_cache(req)
    assert heads_of(req.past_key_values) == [7]
