"""Receiving by key: every shard, in order, by a deadline, and nothing that is broken."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.support.keyed import receive_kv

from omnikv.core.keys import get_kv_connector_key
from omnikv.core.senders import SenderAddress
from omnikv.core.topology import KVTPTopology
from omnikv.errors import (
    HandoffError,
    PayloadLost,
    ReceiveTimeout,
    TopologyError,
    TransportError,
    WireError,
    WireReason,
)
from omnikv.handoff.engine_connector import Stages
from omnikv.handoff.keyed_assemble import ReceiveRoute
from omnikv.handoff.keyed_receive import KeyedFetch, fetch_until
from omnikv.tensors.pack import KVCacheTransferData

EDGE = Stages("0", "1")


def payload(heads, request_id="r1", tokens=3):
    key = torch.tensor(heads, dtype=torch.float32).view(1, -1, 1).expand(tokens, len(heads), 4).contiguous()
    blocks = {"key_cache": [key], "value_cache": [key + 100]}
    return KVCacheTransferData(request_id, blocks, [0], {"seq_len": tokens})


class Shelf:
    """A connector that gives each payload out once, and notes what it is asked."""

    def __init__(self, kept):
        self.kept, self.asked = dict(kept), []

    def get(self, from_stage, to_stage, get_key, metadata=None):
        self.asked.append((get_key, metadata))
        found = self.kept.pop(get_key, None)
        if isinstance(found, Exception):
            raise found
        return None if found is None else (found, 10)


class Buffer:
    """A connector's memory: released, it belongs to somebody else."""

    def __init__(self, data):
        self.tensor, self.ended = torch.frombuffer(bytearray(data), dtype=torch.uint8), []

    def release(self):
        self.ended.append("release")
        self.tensor.fill_(255)


class ReturnableBuffer(Buffer):
    def put_back(self):
        self.ended.append("put_back")


def route(source=1, target=1, rank=0, **more):
    return ReceiveRoute(stages=EDGE, topo=KVTPTopology(source, target, rank), **more)


def receive(connector, where=None, *, request_id="r1", **more):
    return receive_kv(connector, request_id, where or route(), **more)


def begin(connector, where=None, request_id="r1"):
    return KeyedFetch(connector, request_id, where or route(), closing=threading.Event())


def heads_of(received):
    return received.data["layer_blocks"]["key_cache"][0][0, :, 0].tolist()


PLAIN = "omni_0_to_1_kv_cache_r1"


def key(source, target):
    return get_kv_connector_key("r1", "0", 0, source, target)


def test_without_tensor_parallelism_one_plain_key_is_asked_for_without_an_address():
    shelf = Shelf({PLAIN: payload([7]).to_bytes()})
    received = receive(shelf, route(address=SenderAddress(host="h", base_port=100)))
    assert heads_of(received) == [7]
    assert received.nbytes == 10
    assert shelf.asked == [(PLAIN, None)]


def test_each_shard_is_asked_of_its_own_sender_and_joined_in_rank_order():
    shelf = Shelf({key(2, 1): payload([4]).to_bytes(), key(3, 1): payload([5]).to_bytes()})
    received = receive(shelf, route(4, 2, 1, address=SenderAddress(host="h", base_port=100)))
    assert heads_of(received) == [4, 5]
    assert received.nbytes == 20
    assert shelf.asked == [
        (key(2, 1), {"source_host": "h", "source_port": 132}),
        (key(3, 1), {"source_host": "h", "source_port": 148}),
    ]


def test_an_address_that_comes_with_the_request_is_named_even_without_ranks():
    shelf = Shelf({PLAIN: payload([7]).to_bytes()})
    receive(shelf, route(address=SenderAddress(host="h", base_port=100), address_every_shard=True))
    assert shelf.asked == [(PLAIN, {"source_host": "h", "source_port": 100})]


def test_a_receiver_cuts_its_heads_out_of_a_whole_shard():
    shelf = Shelf({key(0, 1): payload([0, 1]).to_bytes()})
    assert heads_of(receive(shelf, route(1, 2, 1))) == [1]


def test_d13_plain_keys_of_a_hook_keep_their_source_ranks():
    shelf = Shelf({"x0": payload([0]).to_bytes(), "x1": payload([1]).to_bytes()})
    hook = lambda request_id, from_stage, to_stage: ["x0", "x1"]  # noqa: E731
    receive(shelf, route(4, 2, 0, key_hook=hook, address=SenderAddress(host="h", base_port=100)))
    assert [metadata["source_port"] for _, metadata in shelf.asked] == [100, 116]


def test_d13_a_hook_whose_keys_do_not_match_the_topology_is_an_error_and_no_stall():
    with pytest.raises(TopologyError, match="returned 3 plain keys"):
        receive(Shelf({}), route(4, 2, 0, key_hook=lambda *_: ["a", "b", "c"]), timeout_s=60)


def test_a_late_shard_is_waited_for_and_the_early_one_is_kept():
    class Late(Shelf):
        def get(self, from_stage, to_stage, get_key, metadata=None):
            if get_key == key(1, 0) and len(self.asked) < 6:
                self.asked.append((get_key, metadata))
                return None
            return super().get(from_stage, to_stage, get_key, metadata)

    shelf = Late({key(0, 0): payload([0]).to_bytes(), key(1, 0): payload([1]).to_bytes()})
    assert heads_of(receive(shelf, route(2, 1, 0), timeout_s=60)) == [0, 1]
    assert [asked for asked, _ in shelf.asked].count(key(0, 0)) == 1


def test_a_timeout_names_the_shards_that_are_missing():
    shelf = Shelf({key(0, 0): payload([0]).to_bytes()})
    with pytest.raises(ReceiveTimeout, match="1 of 2 shards are missing: 'r1_0_0_1_0' of source rank 1") as caught:
        receive(shelf, route(2, 1, 0))
    assert caught.value.request_id == "r1"


def test_an_incomplete_set_goes_back_to_a_connector_that_takes_it():
    buffer = ReturnableBuffer(payload([0]).to_bytes())
    with pytest.raises(ReceiveTimeout) as caught:
        receive(Shelf({key(0, 0): buffer}), route(2, 1, 0))
    assert buffer.ended == ["put_back"]
    assert not caught.value.consumed


def test_an_incomplete_set_does_not_leak_the_memory_of_one_that_does_not():
    buffer = Buffer(payload([0]).to_bytes())
    with pytest.raises(ReceiveTimeout):
        receive(Shelf({key(0, 0): buffer}), route(2, 1, 0))
    assert buffer.ended == ["release"]


def test_a_timeout_says_whether_a_shard_was_consumed_for_good():
    with pytest.raises(ReceiveTimeout) as caught:
        receive(Shelf({key(0, 0): payload([0]).to_bytes()}), route(2, 1, 0))
    assert caught.value.consumed
    with pytest.raises(ReceiveTimeout) as caught:
        receive(Shelf({}), route(2, 1, 0))
    assert not caught.value.consumed


def test_what_is_received_survives_the_release_of_the_connectors_memory():
    buffer = Buffer(payload([7]).to_bytes())
    received = receive(Shelf({PLAIN: buffer}))
    assert buffer.ended == ["release"]
    assert heads_of(received) == [7]
    assert received.data["layer_blocks"]["value_cache"][0].unique().tolist() == [107]


def test_a_slicer_that_hands_out_views_does_not_expose_released_memory():
    buffer = Buffer(payload([7]).to_bytes())
    received = receive(Shelf({PLAIN: buffer}), route(slicer=lambda whole: {"mine": whole["layer_blocks"]}))
    assert received.data["mine"]["key_cache"][0].unique().tolist() == [7]


def test_tensors_go_to_the_device_that_was_asked_for():
    received = receive(Shelf({PLAIN: payload([7]).to_bytes()}), device=torch.device("meta"))
    assert received.data["layer_blocks"]["key_cache"][0].device.type == "meta"


def test_a_payload_that_came_and_cannot_be_placed_is_lost(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("omnikv.handoff.keyed_assemble.move_tensors", full)
    buffer = Buffer(payload([7]).to_bytes())
    with pytest.raises(PayloadLost, match="no room") as caught:
        receive(Shelf({PLAIN: buffer}))
    assert caught.value.consumed
    assert buffer.ended == ["release"]


def test_x06_a_payload_of_another_request_under_the_same_key_is_refused():
    # "a_1" leaving stage "0" and "a" leaving stage "1_0" share a published key.
    shelf = Shelf({PLAIN: payload([7], request_id="other").to_bytes()})
    with pytest.raises(WireError, match="belongs to request 'other', not to 'r1'") as caught:
        receive(shelf)
    assert caught.value.reason is WireReason.WRONG_REQUEST
    assert caught.value.consumed


def test_x17_a_flipped_byte_is_an_error_and_frees_the_connectors_memory():
    data = bytearray(payload([7]).to_bytes())
    data[-3] ^= 1
    buffer = Buffer(data)
    with pytest.raises(WireError) as caught:
        receive(Shelf({PLAIN: buffer}), timeout_s=60)
    assert caught.value.reason is WireReason.CHECKSUM
    assert buffer.ended == ["release"]


def test_a_fault_of_the_connector_ends_the_receive_at_once():
    with pytest.raises(TransportError, match="PermissionError"):
        receive(Shelf({PLAIN: PermissionError("no")}), timeout_s=60)


@pytest.mark.parametrize("hook", ["key_hook", "slicer"])
def test_a_hook_that_fails_is_an_error_with_its_cause(hook):
    def broken(*_):
        raise ZeroDivisionError("odd")

    with pytest.raises(HandoffError, match="odd") as caught:
        receive(Shelf({PLAIN: payload([7]).to_bytes()}), route(**{hook: broken}), timeout_s=60)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.consumed is (hook == "slicer")


def test_a_merger_that_makes_nothing_is_an_error():
    shelf = Shelf({key(0, 0): payload([0]).to_bytes(), key(1, 0): payload([1]).to_bytes()})
    with pytest.raises(HandoffError, match="made NoneType"):
        receive(shelf, route(2, 1, 0, merger=lambda shards: None))


def test_shards_that_do_not_fit_name_the_source_rank():
    shelf = Shelf({key(0, 0): payload([0]).to_bytes(), key(1, 0): payload([1], tokens=4).to_bytes()})
    with pytest.raises(WireError, match="the shard of source rank 1"):
        receive(shelf, route(2, 1, 0))


def test_closing_ends_the_wait():
    closing = threading.Event()
    closing.set()
    with pytest.raises(ReceiveTimeout, match="closing"):
        receive(Shelf({}), timeout_s=600, closing=closing)


# A fetch that outlives a wait


def test_a_wait_that_goes_on_asks_only_for_what_is_missing():
    shelf = Shelf({key(0, 0): payload([0]).to_bytes()})
    fetch = begin(shelf, route(2, 1, 0))
    fetch_until(fetch, until=0.0)
    assert [shard.source_rank for shard in fetch.missing] == [1]
    shelf.kept[key(1, 0)] = payload([1]).to_bytes()
    fetch_until(fetch, until=0.0)
    assert heads_of(fetch.require()) == [0, 1]
    assert [asked for asked, _ in shelf.asked] == [key(0, 0), key(1, 0), key(1, 0)]


def test_whoever_waits_for_one_request_takes_what_comes_for_the_others():
    shelf = Shelf({"omni_0_to_1_kv_cache_c1": payload([8], "c1").to_bytes()})
    primary, companion = begin(shelf), begin(shelf, request_id="c1")
    fetch_until(primary, [companion], until=0.0)
    assert heads_of(companion.require()) == [8]
    with pytest.raises(ReceiveTimeout):
        primary.require()


def test_a_companion_that_fails_does_not_touch_the_one_that_is_waited_for():
    shelf = Shelf({PLAIN: payload([7]).to_bytes(), "omni_0_to_1_kv_cache_c1": PermissionError("no")})
    primary, companion = begin(shelf), begin(shelf, request_id="c1")
    fetch_until(primary, [companion], until=0.0)
    assert heads_of(primary.require()) == [7]
    with pytest.raises(TransportError, match="no"):
        companion.require()


@pytest.mark.parametrize("end", ["acknowledge", "give_back"])
def test_what_came_whole_is_acknowledged_or_given_back_as_its_owner_says(end):
    buffer = ReturnableBuffer(payload([7]).to_bytes())
    fetch = begin(Shelf({PLAIN: buffer}))
    fetch_until(fetch, until=0.0)
    assert heads_of(fetch.require()) == [7]
    assert buffer.ended == []
    assert not fetch.is_consumed
    assert getattr(fetch, end)() in (None, True)
    assert buffer.ended == [{"acknowledge": "release", "give_back": "put_back"}[end]]


def test_x16_a_shard_that_no_connector_takes_back_stays_for_whoever_takes_the_fetch_up_again():
    buffer = Buffer(payload([0]).to_bytes())
    shelf = Shelf({key(0, 0): buffer})
    fetch = begin(shelf, route(2, 1, 0))
    fetch_until(fetch, until=0.0)
    assert not fetch.give_back()
    assert fetch.is_consumed
    assert buffer.ended == ["release"]
    shelf.kept[key(1, 0)] = payload([1]).to_bytes()
    fetch_until(fetch, until=0.0)
    assert heads_of(fetch.require()) == [0, 1]


def test_a_fault_that_consumed_nothing_may_be_tried_again_and_lost_payloads_may_not():
    shelf = Shelf({PLAIN: ConnectionResetError("gone")})
    fetch = begin(shelf)
    fetch_until(fetch, until=0.0)
    assert not fetch.is_lost
    shelf.kept[PLAIN] = payload([7]).to_bytes()[:-1]
    fetch.retry()
    fetch_until(fetch, until=0.0)
    assert fetch.is_lost
    fetch.retry()
    with pytest.raises(WireError):
        fetch.require()


def test_keys_that_could_not_be_built_are_no_better_at_a_second_try():
    def broken(*_):
        raise ZeroDivisionError("odd")

    fetch = begin(Shelf({}), route(key_hook=broken))
    fetch.retry()
    fetch_until(fetch, until=0.0)
    with pytest.raises(HandoffError, match="odd"):
        fetch.require()
    assert fetch.give_back()


def test_another_route_is_asked_for_what_the_first_could_not_give():
    shelf = Shelf({PLAIN: ConnectionResetError("gone")})
    fetch = begin(shelf)
    fetch_until(fetch, until=0.0)
    shelf.kept[PLAIN] = payload([7]).to_bytes()
    fetch.redirect(route(address=SenderAddress(host="h", base_port=100), address_every_shard=True))
    fetch_until(fetch, until=0.0)
    assert heads_of(fetch.require()) == [7]
    assert shelf.asked[-1] == (PLAIN, {"source_host": "h", "source_port": 100})


# Connectors that keep deadlines


class Bounded(Shelf):
    """A connector of an engine's that bounds its gets, and wants to hear which of them are over."""

    def __init__(self, kept):
        super().__init__(kept)
        self.deadlines, self.abandoned = [], []

    def get_with_deadline(self, from_stage, to_stage, get_key, metadata=None, *, deadline):
        self.deadlines.append(deadline)
        return self.get(from_stage, to_stage, get_key, metadata)

    def abandon_get(self, get_key):
        self.abandoned.append(get_key)


def test_d17_a_get_that_can_be_bounded_ends_with_the_request_and_what_it_left_is_freed():
    shelf, deadline = Bounded({key(0, 0): payload([0]).to_bytes()}), time.monotonic() + 60
    fetch = begin(shelf, route(2, 1, 0))
    fetch_until(fetch, until=0.0, deadline=deadline)
    assert shelf.deadlines == [deadline, deadline]
    fetch.give_back()
    assert shelf.abandoned == [key(1, 0)]


def test_a_look_just_at_the_deadline_still_has_time_to_take_what_is_there():
    shelf = Bounded({PLAIN: payload([7]).to_bytes()})
    before = time.monotonic()
    assert heads_of(receive(shelf)) == [7]
    assert shelf.deadlines[0] > before
    assert shelf.abandoned == []


def test_a_connector_that_only_inherits_the_bounded_get_is_asked_plainly():
    class Inherits(Shelf):
        def get_with_deadline(self, *_, **__):
            raise NotImplementedError("does not support deadline-aware receive")

    assert heads_of(receive(Inherits({PLAIN: payload([7]).to_bytes()}))) == [7]


def test_a_claim_that_cannot_be_abandoned_is_logged(caplog):
    class Stuck(Bounded):
        def abandon_get(self, get_key):
            raise OSError("no listener")

    with pytest.raises(ReceiveTimeout):
        receive(Stuck({}))
    assert "could not abandon" in caplog.text


@pytest.mark.parametrize(
    "blocks", [None, {}, [1], {"key_cache": []}, {"key_cache": [torch.ones(1, 1, 1)], "value_cache": []}]
)
def test_d06_a_payload_without_layers_is_no_kv_and_is_not_kept_for_a_retry(blocks):
    connector = Shelf({PLAIN: {"request_id": "r1", "metadata": {}} | ({"layer_blocks": blocks} if blocks else {})})
    fetch = KeyedFetch(connector, "r1", route(), closing=threading.Event())
    fetch_until(fetch, until=time.monotonic())
    with pytest.raises(WireError, match="the payload of request 'r1' has"):
        fetch.require()
    assert fetch.is_lost
    assert fetch.give_back()


def test_what_came_is_put_together_after_an_interruption():
    def interrupt(payloads):
        raise KeyboardInterrupt

    keys = [get_kv_connector_key("r1", "0", 0, source, 0) for source in (0, 1)]
    connector = Shelf({key: payload([head]).to_bytes() for head, key in enumerate(keys)})
    fetch = KeyedFetch(connector, "r1", route(2, 1, merger=interrupt), closing=threading.Event())
    with pytest.raises(KeyboardInterrupt):
        fetch_until(fetch, until=time.monotonic())
    assert not fetch.give_back()
    fetch.redirect(route(2, 1))
    fetch_until(fetch, until=time.monotonic())
    assert heads_of(fetch.require()) == [0, 1]
