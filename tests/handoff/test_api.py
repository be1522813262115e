"""A handoff through the native API: what was sent is what arrives, and a mistake or a failure loses nothing."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from stages import assert_same, full_cache, one_to_one, part, send_everywhere, stages

from omnikv import Edge, KVReceiver, KVSender, LayerKV, PayloadId, Route
from omnikv.core.layout import Layout
from omnikv.errors import (
    ConfigError,
    ConnectError,
    HandoffError,
    LocalProtocolError,
    ProducerFailed,
    PutRejected,
    ReceiveTimeout,
    RemoteProtocolError,
    TopologyError,
    WireError,
    WireReason,
)
from omnikv.handoff import receive as receive_module
from omnikv.handoff.cut import own_layers
from omnikv.handoff.received import ReceivedKV
from omnikv.handoff.send import plan_piece
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.pack import PayloadPlan
from omnikv.transports.base import Endpoint
from omnikv.transports.memory import MemoryTransport


@pytest.mark.parametrize(
    ("from_tp", "to_tp", "num_heads"),
    [(1, 1, 3), (3, 1, 3), (1, 3, 3), (3, 3, 3), (2, 3, 3), (3, 2, 3), (4, 2, 8), (2, 4, 8), (6, 4, 12), (4, 2, 2)],
)
def test_every_head_arrives_bit_for_bit(transport, namespace, from_tp, to_tp, num_heads):
    layers = full_cache(num_heads=num_heads)
    route = Route.tp("a", "b", num_kv_heads=num_heads, from_tp=from_tp, to_tp=to_tp, namespace=namespace)
    with stages(route, transport) as (senders, receivers):
        send_everywhere(senders, layers, metadata={"first_token": 17})
        for receiver in receivers:
            with receiver.receive("req", timeout_s=10) as kv:
                heads = route.target_heads[receiver.rank]
                assert_same(kv.layers, part(layers, heads))
                assert kv.metadata == {"first_token": 17}
                assert sorted(head for piece in kv.sources for head in piece.heads) == sorted(heads)
                assert kv.num_tokens == 5
        assert all(sender.drain(timeout_s=10) == 0 for sender in senders)


def test_heads_may_be_stated_in_any_order(transport, namespace):
    layers = full_cache(num_heads=4)
    edge = Edge(from_stage="a", to_stage="b", namespace=namespace)
    route = Route(edge=edge, source_heads=((2, 0), (3, 1)), target_heads=((1, 0, 3), (2,)))
    with stages(route, transport) as (senders, receivers):
        send_everywhere(senders, layers)
        for receiver in receivers:
            with receiver.receive("req", timeout_s=10) as kv:
                assert_same(kv.layers, part(layers, route.target_heads[receiver.rank]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_paged_blocks_arrive_as_tokens(transport, namespace, dtype):
    pool = torch.randn(2, 6, 4, 2, 8).to(dtype)
    paged = PagedKV([pool, pool.clone()], block_ids=[5, 0, 3], num_tokens=10, layout=Layout.stacked(4, dim=0))
    expected = [
        LayerKV(*(pool.view(torch.uint8)[side][[5, 0, 3]].flatten(0, 1)[:10].view(dtype) for side in (0, 1)))
        for _ in range(2)
    ]
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=2, namespace=namespace)
    with stages(route, transport) as (senders, receivers):
        senders[0].send("req", paged)
        for receiver in receivers:
            with receiver.receive("req", timeout_s=10) as kv:
                for mine, theirs in zip(kv.layers, expected, strict=True):
                    for one, other in zip(mine, theirs, strict=True):
                        assert torch.equal(one.float(), other[:, [receiver.rank]].float())


def test_with_one_sender_the_tensors_are_views_and_detach_makes_them_the_readers(transport, namespace):
    layers = full_cache()
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send("req", layers)
        kv = receiver.receive("req", timeout_s=10)
        assert not kv.owns_memory
        assert sender.drain(timeout_s=0) == 1
        kv.detach()
        assert kv.owns_memory
        assert sender.drain(timeout_s=10) == 0
        for number in range(3):
            sender.send(f"next-{number}", full_cache(num_tokens=5 + number))
        assert_same(kv.layers, layers)


def test_a_request_is_free_once_its_reader_closed_it_whatever_becomes_of_others(transport, namespace):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        assert sender.wait_until_free("read", timeout_s=0)
        for request_id in ("read", "unread"):
            sender.send(request_id, full_cache())
        sender.send("read", full_cache(), role="cfg_text")
        with receiver.receive("read", timeout_s=10):
            assert not sender.wait_until_free("read", timeout_s=0)
        assert sender.wait_until_free("read", timeout_s=10)
        assert not sender.wait_until_free("read", role="cfg_text", timeout_s=0)
        assert not sender.wait_until_free("unread", timeout_s=0.01)
        sender.abort("unread")
        assert sender.wait_until_free("unread", timeout_s=10)
        with pytest.raises(ConfigError, match="timeout_s must be a number of seconds"):
            sender.wait_until_free("read", timeout_s="soon")


def test_a_receiver_that_waits_is_woken_by_the_send(transport, namespace):
    layers = full_cache()
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, "req", timeout_s=30)
        sender.send("req", layers)
        with waiting.result(timeout=30) as kv:
            assert_same(kv.layers, layers)


def test_what_is_given_back_while_it_is_discarded_is_discarded(namespace, monkeypatch):
    monkeypatch.setattr(receive_module, "_LAST_LOOK_S", 60.0)
    with stages(one_to_one(namespace), "shm") as ([sender], [receiver]), ThreadPoolExecutor(1) as pool:
        sender.send("req", full_cache())
        kv = receiver.receive("req", timeout_s=30)
        discarding = pool.submit(receiver.discard, "req")
        while not sender._transport._offers._waiting:
            time.sleep(0.001)
        kv.give_back()
        assert discarding.result(timeout=60) == 1
        assert sender.drain(timeout_s=10) == 0


def test_nothing_is_discarded_after_the_end(transport, namespace):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send("req", full_cache())
        receiver.close()
        assert receiver.discard("req") == 0


@pytest.mark.parametrize("request_id", ["a/b", "a_1", "two words", "日本語", "x" * 300, "..", "a%2Fb"])
def test_x08_every_spelling_of_a_request_id_works(transport, namespace, request_id):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send(request_id, full_cache())
        with receiver.receive(request_id, timeout_s=10) as kv:
            assert kv.request_id == request_id
            assert_same(kv.layers, full_cache())


def test_x06_requests_whose_published_keys_collide_do_not_meet(transport, namespace):
    kwargs = {"num_kv_heads": 1, "from_tp": 1, "to_tp": 1, "namespace": namespace}
    with ExitStack() as stack:
        cases = [("0", "1", "a_1", 2), ("1_0", "1", "a", 3), ("0", "2", "a_1", 4)]
        for from_stage, to_stage, request_id, tokens in cases:
            route = Route.tp(from_stage, to_stage, **kwargs)
            sender = stack.enter_context(KVSender(route, 0, transport=transport))
            sender.send(request_id, full_cache(num_tokens=tokens, num_heads=1))
            receiver = stack.enter_context(KVReceiver(route, 0, transport=transport))
            kv = stack.enter_context(receiver.receive(request_id, timeout_s=10))
            assert kv.num_tokens == tokens


def test_roles_and_attempts_of_one_request_are_apart(transport, namespace):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sizes = {("primary", 0): 2, ("cfg_text", 0): 3, ("primary", 1): 4}
        for (role, attempt), tokens in sizes.items():
            sender.send("req", full_cache(num_tokens=tokens), role=role, attempt=attempt)
        for (role, attempt), tokens in reversed(sizes.items()):
            with receiver.receive("req", timeout_s=10, role=role, attempt=attempt) as kv:
                assert kv.num_tokens == tokens


def test_an_interrupted_receive_gives_back_what_had_arrived(transport, namespace):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    def receive_until_interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        receiver.receive("req", timeout_s=60)

    layers = full_cache(num_heads=2)
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with stages(route, transport) as (senders, [receiver]):
            senders[0].send("req", part(layers, (0,)))
            with pytest.raises(KeyboardInterrupt):
                receive_until_interrupted()
            senders[1].send("req", part(layers, (1,)))
            with receiver.receive("req", timeout_s=10) as kv:
                assert_same(kv.layers, layers)
            assert all(sender.drain(timeout_s=10) == 0 for sender in senders)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- mistakes: a clear error, nothing lost ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "there are no layers to send"),
        (torch.zeros(2, 3, 4), "layers must be a list of .* got a Tensor"),
        (iter([(torch.zeros(2, 3, 4),) * 2]), "layers must be a list of .* got a list_iterator"),
        (None, "layers must be a list of .* got a NoneType"),
        ([torch.zeros(2, 3, 4)], r"layer 0 must be a \(key, value\) pair of tensors, got Tensor"),
        ([(torch.zeros(2, 3), torch.zeros(2, 3))], r"key must be \[tokens, kv_heads, head_dim\], got shape \[2, 3\]"),
        ([(torch.zeros(2, 3, 4), torch.zeros(2, 2, 4))], "layer 0's value has 2 KV heads, but the route states 3"),
        ([(torch.zeros(2, 3, 4), torch.zeros(1, 3, 4))], "layer 0 has 2 tokens of keys and 1 of values"),
        ([(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, device="meta"))], "layer 0's value has no plain elements"),
        ([(torch.zeros(2, 3, 4).to_sparse(), torch.zeros(2, 3, 4))], "layer 0's key has no plain elements"),
    ],
)
def test_layers_that_do_not_fit_are_refused_before_anything_moves(namespace, layers, message):
    with stages(one_to_one(namespace), "memory") as ([sender], [receiver]):
        with pytest.raises(ConfigError, match=message):
            sender.send("req", layers)
        sender.send("req", full_cache())
        receiver.receive("req", timeout_s=10).close()


@pytest.mark.parametrize("metadata", [[1], "abc", 5, {"a": float("nan")}, {"a": b"x"}, {b"a": 1}])
def test_metadata_that_json_cannot_hold_is_refused(namespace, metadata):
    with stages(one_to_one(namespace), "memory") as ([sender], _):
        with pytest.raises(ConfigError, match="metadata must be a mapping that JSON can hold"):
            sender.send("req", full_cache(), metadata=metadata)
        assert sender.drain(timeout_s=0) == 0


@pytest.mark.parametrize("rank", [True, 0.0, "0", None])
def test_a_rank_that_is_no_integer_is_refused(namespace, rank):
    # 0.0 == 0, but its address on a host would be another one, and the peers would never meet.
    with pytest.raises(TopologyError, match="a rank is an integer"):
        KVSender(one_to_one(namespace), rank, transport="shm")
    with pytest.raises(TopologyError, match="a rank is an integer"):
        KVReceiver(one_to_one(namespace), rank, transport="shm")


@pytest.mark.parametrize("timeout_s", ["1", float("nan"), True])
def test_a_timeout_that_is_no_number_is_refused(namespace, timeout_s):
    with stages(one_to_one(namespace), "memory") as ([sender], [receiver]):
        with pytest.raises(ConfigError, match="timeout_s must be a number of seconds"):
            receiver.receive("req", timeout_s=timeout_s)
        with pytest.raises(ConfigError, match="timeout_s must be a number of seconds"):
            sender.drain(timeout_s=timeout_s)


def test_a_group_that_is_none_is_refused_and_leaves_the_rank_free(namespace):
    route = one_to_one(namespace)
    with pytest.raises(ConfigError, match="group must be a Group or an Agreement"):
        KVReceiver(route, 0, transport="memory", group="decode")
    KVReceiver(route, 0, transport="memory").close()


def test_a_cause_without_a_utf_8_form_reaches_the_receivers_and_harms_nobody(transport, namespace):
    # As in the text of an error about a file whose name is not UTF-8.
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.fail("req", "cannot read /cache/\udcff.bin")
        with pytest.raises(ProducerFailed, match=r"cannot read /cache/\\udcff.bin"):
            receiver.receive("req", timeout_s=10)
        sender.send("next", full_cache())
        receiver.receive("next", timeout_s=10).close()


@pytest.mark.parametrize(
    "layers",
    [
        [(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4))],
        [(torch.ones(1, 3, 4), torch.ones(1, 3, 4))],
        [(torch.ones(2, 3, 4), torch.ones(2, 3, 6, dtype=torch.int8)), (torch.ones(5, 3, 1).double(),) * 2],
        [(torch.randn(2, 3, 4, requires_grad=True) * 2, torch.randn(4, 3, 2).permute(2, 1, 0))],
        [(torch._neg_view(torch.randn(2, 3, 4)), torch.randn(2, 1, 1).expand(2, 3, 4))],
        [(torch.randn(2, 3, 4, dtype=torch.complex64).conj(), torch.randn(2, 3, 4, dtype=torch.complex64).conj().imag)],
    ],
    ids=["no tokens", "one token", "unlike layers", "strided", "negated and expanded", "conjugated"],
)
@pytest.mark.parametrize("to_tp", [1, 3])
def test_layers_of_any_make_arrive_as_they_are(transport, namespace, layers, to_tp):
    route = Route.tp("a", "b", num_kv_heads=3, from_tp=1, to_tp=to_tp, namespace=namespace)
    layers = [LayerKV(*pair) for pair in layers]
    with stages(route, transport) as ([sender], receivers):
        sender.send("req", layers)
        for receiver in receivers:
            with receiver.receive("req", timeout_s=10) as kv:
                assert_same(kv.layers, part(layers, route.target_heads[receiver.rank]))


def test_x11_bad_block_ids_send_nothing(transport, namespace):
    pool = torch.zeros(2, 4, 2, 3, 4)
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        with pytest.raises(ConfigError, match=r"block ids \[99\] are outside the 4 blocks of layer 0"):
            sender.send("req", PagedKV([pool], [0, 99, 1], 6, Layout.stacked(2, dim=0)))
        with pytest.raises(ReceiveTimeout):
            receiver.receive("req", timeout_s=0.05)


def test_more_tokens_than_the_blocks_hold_are_refused(namespace):
    pool = torch.zeros(2, 4, 2, 3, 4)
    with stages(one_to_one(namespace), "memory") as ([sender], _), pytest.raises(ConfigError, match="5"):
        sender.send("req", PagedKV([pool], block_ids=[0, 1], num_tokens=5, layout=Layout.stacked(2, dim=0)))


@pytest.mark.parametrize("request_id", ["", None, 7])
def test_an_id_that_is_none_is_refused_on_both_sides(namespace, request_id):
    with stages(one_to_one(namespace), "memory") as ([sender], [receiver]):
        with pytest.raises(ConfigError, match="transfer_id must be a non-empty string"):
            sender.send(request_id, full_cache())
        with pytest.raises(ConfigError, match="transfer_id must be a non-empty string"):
            receiver.receive(request_id, timeout_s=0)


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": float("nan")}])
def test_metadata_that_is_no_json_is_refused(namespace, metadata):
    with stages(one_to_one(namespace), "memory") as ([sender], _), pytest.raises(ConfigError, match="metadata"):
        sender.send("req", full_cache(), metadata=metadata)


def test_x09_a_rank_outside_its_stage_is_refused_when_it_starts(namespace):
    with pytest.raises(TopologyError, match="rank 7 is outside the source stage"):
        KVSender(one_to_one(namespace), 7, transport="memory")
    with pytest.raises(TopologyError, match="rank 7 is outside the target stage"):
        KVReceiver(one_to_one(namespace), 7, transport="memory")


def test_an_unknown_transport_is_named_with_the_known_ones(namespace):
    with pytest.raises(ConfigError, match=r"unknown transport 'carrier-pigeon'; available: .*memory.*shm"):
        KVSender(one_to_one(namespace), 0, transport="carrier-pigeon")


def test_an_option_that_a_transport_does_not_take_is_named(namespace):
    with pytest.raises(ConfigError, match="does not take the options \\['colour'\\]"):
        KVSender(one_to_one(namespace), 0, transport="memory", options={"colour": "red"})


def test_x07_a_request_that_is_still_live_is_not_replaced(transport, namespace):
    first, second = full_cache(num_tokens=2), full_cache(num_tokens=3)
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send("req", first)
        with pytest.raises(PutRejected, match="live") as caught:
            sender.send("req", second)
        assert caught.value.already_live
        with receiver.receive("req", timeout_s=10) as kv:
            assert_same(kv.layers, first)


def test_d04_stages_that_state_different_routes_are_told_so_at_once(transport, namespace):
    two = Route.tp("a", "b", num_kv_heads=4, from_tp=2, to_tp=1, namespace=namespace)
    one = Route.tp("a", "b", num_kv_heads=4, from_tp=1, to_tp=1, namespace=namespace)
    with KVSender(two, 0, transport=transport), KVReceiver(one, 0, transport=transport) as receiver:
        with pytest.raises(ConnectError, match="source_heads") as caught:
            receiver.receive("req", timeout_s=20)
        assert "0,1,2,3" in str(caught.value)
        assert "0,1 | 2,3" in str(caught.value)


# --- failures: told at once, nothing consumed ---------------------------------------------------------------------


def test_x16_one_missing_part_leaves_the_others_for_a_retry(transport, namespace):
    layers = full_cache()
    route = Route.tp("a", "b", num_kv_heads=3, from_tp=3, to_tp=1, namespace=namespace)
    with stages(route, transport) as (senders, [receiver]):
        send_everywhere(senders[:2], layers)
        with pytest.raises(ReceiveTimeout, match="nothing from source rank 2 by the deadline") as caught:
            receiver.receive("req", timeout_s=0.05)
        assert caught.value.retryable
        send_everywhere(senders[2:], layers)
        with receiver.receive("req", timeout_s=10) as kv:
            assert_same(kv.layers, layers)


def test_a_sender_that_gives_up_wakes_its_receivers_with_the_cause(transport, namespace):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, "req", timeout_s=60)
        sender.fail("req", "prefill ran out of memory")
        with pytest.raises(ProducerFailed, match="prefill ran out of memory"):
            waiting.result(timeout=30)


def test_a_copy_that_fails_reaches_the_sender_and_its_receivers(transport, namespace):
    class Unreadable(PagedKV):
        def layer_sources(self, head_positions=None):
            def explode(out):
                raise RuntimeError("device side assert")

            sources = super().layer_sources(head_positions)
            broken = type("Broken", (), {"shape": sources[0].value.shape, "dtype": sources[0].value.dtype})()
            broken.write_into = explode
            return [sources[0]._replace(value=broken)]

    paged = Unreadable([torch.zeros(2, 4, 2, 3, 4)], [0], 2, Layout.stacked(2, dim=0))
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        with pytest.raises(HandoffError, match=r"'req' could not be copied.*device side assert"):
            sender.send("req", paged)
        with pytest.raises(ProducerFailed, match="device side assert"):
            receiver.receive("req", timeout_s=30)
        assert sender.drain(timeout_s=0) == 0


def test_a_request_that_does_not_fit_is_rejected_whole_and_its_receivers_are_told(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=2, namespace=namespace)
    options = {"pool_nbytes": 1 << 20}
    with KVSender(route, 0, transport=transport, options=options) as sender:
        with KVReceiver(route, 0, transport=transport) as receiver:
            with pytest.raises(PutRejected):
                sender.send("req", full_cache(num_tokens=100_000, num_heads=2))
            with pytest.raises(ProducerFailed, match="PutRejected"):
                receiver.receive("req", timeout_s=30)
        assert sender.drain(timeout_s=0) == 0
        sender.send("small", full_cache(num_heads=2))


def test_x03_parts_with_different_layer_counts_do_not_become_one_cache(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    with stages(route, transport) as (senders, [receiver]):
        senders[0].send("req", full_cache(num_heads=1, num_layers=2))
        senders[1].send("req", full_cache(num_heads=1, num_layers=1))
        with pytest.raises(RemoteProtocolError, match="source ranks 1 and 0 differ in 1 against 2 layers"):
            receiver.receive("req", timeout_s=10)


def test_x04_parts_of_different_dtype_are_not_promoted(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    with stages(route, transport) as (senders, [receiver]):
        senders[0].send("req", full_cache(num_heads=1))
        senders[1].send("req", full_cache(num_heads=1, dtype=torch.float16))
        with pytest.raises(RemoteProtocolError, match=r"layer 0: .*float16 against .*float32"):
            receiver.receive("req", timeout_s=10)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"source_rank": 1}, "source rank 1's, role 'primary', attempt 0"),
        ({"role": "cfg_text"}, "source rank 0's, role 'cfg_text', attempt 0"),
        ({"attempt": 2}, "source rank 0's, role 'primary', attempt 2"),
    ],
)
def test_x05_a_payload_of_another_origin_is_refused_although_it_would_fit(namespace, stated, words):
    route = one_to_one(namespace)
    identity = PayloadId(edge=route.edge, transfer_id="req", source_rank=0, target_rank=0)
    [piece] = route.pieces()
    own = own_layers(full_cache(), route.source_boxes[0])
    plan = plan_piece(replace(identity, **stated), piece, own, plain=True, metadata=None, checksum=True)
    endpoint = Endpoint(edge=route.edge, side="source", rank=0, peer_ranks=(0,), facts=route.facts())
    with MemoryTransport(endpoint) as source, KVReceiver(route, 0, transport="memory") as receiver:
        with source.reserve(identity, plan.nbytes) as slot:
            plan.write_into(slot.buffer)
            slot.publish()
        with pytest.raises(RemoteProtocolError, match=f"says that it is {words}"):
            receiver.receive("req", timeout_s=10)


def test_parts_with_different_metadata_do_not_become_one_request(namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    with stages(route, "memory") as (senders, [receiver]):
        for rank, sender in enumerate(senders):
            sender.send("req", full_cache(num_heads=1), metadata={"first_token": rank})
        with pytest.raises(RemoteProtocolError, match="differ in their metadata"):
            receiver.receive("req", timeout_s=10)


@pytest.mark.parametrize("end", [ReceivedKV.close, ReceivedKV.give_back])
def test_views_cannot_be_used_after_they_were_closed_or_given_back(transport, namespace, end):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send("req", full_cache())
        kv = receiver.receive("req", timeout_s=10)
        end(kv)
        with pytest.raises(LocalProtocolError, match="the KV of request 'req' was closed or given back"):
            _ = kv.layers


def test_detached_layers_outlive_their_lease(transport, namespace):
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send("req", full_cache())
        kv = receiver.receive("req", timeout_s=10)
        kv.detach()
        kv.close()
        assert_same(kv.layers, full_cache())


def test_x17_a_flipped_byte_is_refused_where_a_checksum_is_carried(transport, namespace, monkeypatch):
    write = PayloadPlan.write_into

    def write_and_flip(plan, buffer, *threads):
        write(plan, buffer, *threads)
        buffer[-1] ^= 1

    monkeypatch.setattr(PayloadPlan, "write_into", write_and_flip)
    route = one_to_one(namespace)
    with (
        KVSender(route, 0, transport=transport, checksum=True) as sender,
        KVReceiver(route, 0, transport=transport) as receiver,
    ):
        sender.send("req", full_cache())
        with pytest.raises(WireError) as caught:
            receiver.receive("req", timeout_s=10)
        assert caught.value.reason is WireReason.CHECKSUM


def test_many_requests_from_many_threads_do_not_mix(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    requests = [f"r{number}" for number in range(40)]
    with stages(route, transport) as (senders, [receiver]), ThreadPoolExecutor(8) as pool:

        def send(job):
            sender, request_id = job
            tokens = int(request_id[1:]) + 1
            sender.send(request_id, part(full_cache(num_tokens=tokens, num_heads=2), [sender.rank]))

        def receive(request_id):
            with receiver.receive(request_id, timeout_s=60) as kv:
                assert_same(kv.layers, full_cache(num_tokens=int(request_id[1:]) + 1, num_heads=2))

        received = [pool.submit(receive, request_id) for request_id in requests[:4]]
        sent = pool.map(send, [(sender, request_id) for request_id in requests for sender in senders])
        received += [pool.submit(receive, request_id) for request_id in requests[4:]]
        list(sent)
        for job in received:
            job.result(timeout=60)
        assert [sender.drain(timeout_s=10) for sender in senders] == [0, 0]


def test_closing_leaves_no_thread(transport, namespace):
    before = set(threading.enumerate())
    with stages(one_to_one(namespace), transport) as ([sender], [receiver]):
        sender.send("req", full_cache())
        receiver.receive("req", timeout_s=10).close()
    assert set(threading.enumerate()) - before == set()
