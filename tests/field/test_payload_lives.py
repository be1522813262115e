"""Field reports about a payload's life: who may read it, until when, and what everybody is told when it ends."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from omnikv import KVReceiver, KVSender, Route
from omnikv.errors import (
    Aborted,
    AlreadyConsumed,
    Expired,
    LocalProtocolError,
    OmniKVError,
    ProducerFailed,
    PutRejected,
    ReceiveTimeout,
)

SOON_S = 60.0
POOL = {"pool_nbytes": 1 << 20}
_names = (f"lives-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(params=["memory", "shm"])
def transport(request):
    return request.param


@pytest.fixture
def route():
    return Route.tp("prefill", "decode", num_kv_heads=2, from_tp=1, to_tp=1, namespace=next(_names))


@pytest.fixture
def open_ends(transport, route):
    """A sender and as many receivers as wanted; `terms` are the sender's."""
    with ExitStack() as stack:

        def find(readers=1, **terms):
            sender = KVSender(route, 0, transport=transport, options=POOL, readers=readers, **terms)
            options = {} if transport == "shm" else POOL
            receivers = [
                KVReceiver(route, 0, transport=transport, options=options, reader=number) for number in range(readers)
            ]
            for end in (sender, *receivers):
                stack.enter_context(end)
            return sender, *receivers

        yield find


def layers_of(value, tokens=4):
    return [(torch.full((tokens, 2, 8), float(value)), torch.full((tokens, 2, 8), -float(value)))]


def value_of(kv):
    (key, value), *_ = kv.layers
    assert torch.equal(key, -value)
    assert len(key.unique()) == 1
    return key.unique().item()


def received(receiver, request_id, **terms):
    with receiver.receive(request_id, timeout_s=SOON_S, **terms) as kv:
        return value_of(kv)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_d08_three_readers_each_get_one_put_and_a_further_ask_is_told_at_once(open_ends, order):
    sender, *readers = open_ends(readers=3)
    with ThreadPoolExecutor(3) as pool:
        # One is early, the others come when it is there.
        early = pool.submit(received, readers[order[0]], "r1")
        sender.send("r1", layers_of(5))
        assert early.result() == 5
    assert sender.census()["ready"] == 1
    assert [received(readers[number], "r1") for number in order[1:]] == [5, 5]
    assert sender.drain(timeout_s=SOON_S) == 0
    for reader in readers:
        with pytest.raises(AlreadyConsumed) as told:
            received(reader, "r1")
        assert told.value.consumed
        assert not told.value.retryable


def test_d39_each_process_of_a_sharing_group_is_a_reader_of_its_own_and_none_takes_anothers(
    open_ends, transport, route
):
    sender, *readers = open_ends(readers=4)
    sender.send("r1", layers_of(7))
    assert [received(reader, "r1") for reader in readers] == [7] * 4
    # One that believes to be reader 0 too cannot even open: membership is explicit.
    with pytest.raises(OmniKVError, match="rank 0"):
        KVReceiver(route, 0, transport=transport, reader=0)


def test_d39_a_payload_that_is_read_by_one_of_four_stays_for_the_other_three(open_ends):
    sender, first, *others = open_ends(readers=4)
    sender.send("r1", layers_of(7))
    received(first, "r1")
    with pytest.raises(AlreadyConsumed):
        received(first, "r1")
    assert [received(reader, "r1") for reader in others] == [7] * 3


def test_d09_a_queue_longer_than_the_time_to_live_loses_nothing_that_was_announced(open_ends):
    sender, receiver = open_ends(payload_ttl_s=0.1)
    queued = [f"r{number}" for number in range(16)]
    for request_id in queued:
        receiver.announce(request_id)
        sender.send(request_id, layers_of(1, tokens=1))
    assert sender.drain(timeout_s=0.4) == len(queued)
    for number, request_id in enumerate(queued):
        assert received(receiver, request_id) == 1, number


def test_d09_what_really_expired_is_told_at_once_and_can_be_sent_again(open_ends):
    sender, receiver = open_ends(payload_ttl_s=0.05)
    sender.send("r1", layers_of(1))
    assert sender.drain(timeout_s=SOON_S) == 0
    with pytest.raises(Expired, match="generation"):
        receiver.receive("r1", timeout_s=SOON_S)
    receiver.announce("r1")
    sender.send("r1", layers_of(2))
    assert received(receiver, "r1") == 2


@pytest.mark.parametrize("end", ["fails", "closes", "is gone already"])
def test_d10_a_receiver_hears_of_its_producers_end_long_before_its_deadline(open_ends, end):
    sender, receiver = open_ends()
    sender.send("r0", layers_of(0))
    received(receiver, "r0")
    with ThreadPoolExecutor(1) as pool:
        if end == "is gone already":
            sender.close()
        waiting = pool.submit(receiver.receive, "r1", timeout_s=1000.0)
        if end == "fails":
            sender.fail("r1", "the replica is out of memory")
        else:
            sender.close()
        with pytest.raises(ProducerFailed):
            waiting.result(timeout=SOON_S)


def test_d14_aborted_requests_give_their_room_back_at_once_and_are_counted(open_ends):
    sender, receiver = open_ends()
    for number in range(60):
        sender.send(f"r{number}", layers_of(number, tokens=64))
        if number % 2:
            sender.abort(f"r{number}", "the client disconnected")
        else:
            assert received(receiver, f"r{number}") == number
    assert sender.drain(timeout_s=SOON_S) == 0
    census = sender.census()
    assert (census["aborted"], census["released"]) == (30, 30)
    assert census["announced"] == census["ready"] == census["leased"] == 0
    with pytest.raises(Aborted, match="the client disconnected"):
        received(receiver, "r59")


def test_d14_a_receiver_that_cancels_is_woken_and_leaves_nothing(open_ends):
    sender, receiver = open_ends()
    sender.send("r0", layers_of(0))
    received(receiver, "r0")
    receiver.announce("r1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, "r1", timeout_s=1000.0)
        until = time.monotonic() + SOON_S
        while not waiting.done():
            assert time.monotonic() < until
            receiver.cancel("r1")
            sender.drain(timeout_s=0.001)
        with pytest.raises(Aborted):
            waiting.result()
    sender.send("r1", layers_of(1))
    assert sender.census()["leased"] == 0
    assert received(receiver, "r1") == 1


def test_d22_reused_memory_is_never_read_for_an_expired_payload(open_ends):
    sender, receiver = open_ends(payload_ttl_s=0.05)
    large = 1 << 12
    sender.send("a", layers_of(1, tokens=large))
    assert sender.drain(timeout_s=SOON_S) == 0
    receiver.announce("b")
    sender.send("b", layers_of(2, tokens=large))
    with pytest.raises(Expired):
        received(receiver, "a")
    assert received(receiver, "b") == 2


@pytest.mark.parametrize("order", list(itertools.permutations(["abort", "close", "abort again"])))
def test_d23_aborts_and_acknowledgements_in_any_order_are_harmless(open_ends, order):
    sender, receiver = open_ends()
    sender.send("r1", layers_of(3))
    kv = receiver.receive("r1", timeout_s=SOON_S)
    acts = {"abort": lambda: sender.abort("r1"), "abort again": lambda: sender.abort("r1"), "close": kv.close}
    for act in order:
        acts[act]()
        acts[act]()
    assert sender.drain(timeout_s=SOON_S) == 0
    until = time.monotonic() + SOON_S
    while sender.census()["leased"]:
        assert time.monotonic() < until
        sender.drain(timeout_s=0.001)
    sender.send("r1", layers_of(4))
    assert received(receiver, "r1") == 4


def test_d23_an_abort_while_the_request_is_written_stops_it(open_ends, monkeypatch):
    sender, receiver = open_ends()
    publish = type(sender._transport).reserve_all

    def reserve_and_abort(self, wanted, *, deadline):
        slots = publish(self, wanted, deadline=deadline)
        sender.abort("r1", "too late")
        return slots

    with monkeypatch.context() as patched:
        patched.setattr(type(sender._transport), "reserve_all", reserve_and_abort)
        with pytest.raises(LocalProtocolError, match="aborted"):
            sender.send("r1", layers_of(1))
    with pytest.raises(Aborted, match="too late"):
        received(receiver, "r1")
    assert sender.census()["announced"] == 0


def test_d28_a_request_that_is_sent_again_after_success_is_received_again(open_ends):
    sender, receiver = open_ends()
    for attempt in range(3):
        sender.send("r1", layers_of(attempt), attempt=attempt)
        assert received(receiver, "r1", attempt=attempt) == attempt
    # The same identity too, when it is sent before it is asked for.
    sender.drain(timeout_s=SOON_S)
    sender.send("r1", layers_of(9))
    assert received(receiver, "r1") == 9


def test_d31_a_request_larger_than_the_pool_is_refused_at_once_and_its_receiver_told(open_ends):
    sender, receiver = open_ends()
    with pytest.raises(PutRejected) as refused:
        sender.send("huge", layers_of(1, tokens=1 << 15), timeout_s=SOON_S)
    assert not refused.value.retryable
    with pytest.raises(ProducerFailed, match="PutRejected"):
        received(receiver, "huge")


def test_d31_requests_that_find_no_room_wait_their_turn_and_all_come_through(open_ends):
    sender, receiver = open_ends()
    tokens = 6000  # Two do not fit at once.
    with ThreadPoolExecutor(6) as pool, ThreadPoolExecutor(6) as receiving:
        sending = [
            pool.submit(sender.send, f"r{number}", layers_of(number, tokens=tokens), timeout_s=SOON_S)
            for number in range(6)
        ]
        # In whatever order they came to stand in the row.
        got = [receiving.submit(received, receiver, f"r{number}") for number in range(6)]
        assert [one.result() for one in got] == list(range(6))
        assert all(sent.result().nbytes > 0 for sent in sending)


def test_d31_a_refusal_that_may_pass_is_not_told_as_a_failure(open_ends):
    sender, receiver = open_ends()
    sender.send("first", layers_of(1, tokens=6000))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(received, receiver, "second")
        with pytest.raises(PutRejected) as refused:
            sender.send("second", layers_of(2, tokens=6000))
        assert refused.value.retryable
        received(receiver, "first")
        sender.send("second", layers_of(2, tokens=6000), timeout_s=SOON_S)
        assert waiting.result() == 2


def test_d26_a_receiver_that_gives_up_mid_way_a_hundred_times_leaves_everything_with_the_sender(transport):
    route = Route.tp("p", "d", num_kv_heads=2, from_tp=2, to_tp=1, namespace=next(_names))
    with (
        KVSender(route, 0, transport=transport, options=POOL) as first,
        KVSender(route, 1, transport=transport, options=POOL) as second,
        KVReceiver(route, 0, transport=transport) as receiver,
    ):
        half = [(torch.ones(4, 1, 8), torch.ones(4, 1, 8))]
        first.send("r1", half)
        for _ in range(100):
            with pytest.raises(ReceiveTimeout):
                receiver.receive("r1", timeout_s=0.0)
        second.send("r1", half)
        with receiver.receive("r1", timeout_s=SOON_S) as kv:
            assert kv.num_tokens == 4
        assert first.drain(timeout_s=SOON_S) == second.drain(timeout_s=SOON_S) == 0
