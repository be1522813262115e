"""Two stages whose caches differ: what converts arrives converted, what does not is refused when they meet."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from stages import assert_same, full_cache, one_to_one, part, send_everywhere

from omnikv import Edge, KVReceiver, KVSender, LayerKV, Layout, PagedKV, Route
from omnikv.core.handshake import ModelFacts
from omnikv.core.partition import Parallel
from omnikv.errors import ConfigError, ConnectError, HandoffError
from omnikv.tensors.blocks import scatter_into_blocks
from omnikv.tensors.quantised import dequantise, quantise

TOKENS, HEADS, HEAD_DIM = 21, 3, 4


def facts(layout, **changes):
    stated = {
        "num_layers": 2,
        "num_kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "value_head_dim": HEAD_DIM,
        "sender": Parallel(tp=1),
        "receiver": Parallel(tp=1),
    }
    return ModelFacts(**{**stated, "layout": layout, **changes})


def pair(stack, route, transport, *, sender=None, receiver=None, dtype=None):
    """One sender and one receiver that state these models."""
    source = stack.enter_context(KVSender(route, 0, transport=transport, model=sender, dtype=dtype))
    return source, stack.enter_context(KVReceiver(route, 0, transport=transport, model=receiver))


def paged(layers, layout, block_ids):
    """The layers in caches of this layout, as a request."""
    blocks = max(block_ids) + 2
    caches = [
        torch.full((2, blocks, layout.block_size, HEADS, HEAD_DIM), 9.0, dtype=layers[0].key.dtype) for _ in layers
    ]
    scatter_into_blocks(layers, caches, block_ids, layout)
    return PagedKV(caches, block_ids, len(layers[0].key), layout)


def stacked(block_size, dtype):
    return Layout.stacked(block_size, dim=0).stating(dtype=dtype)


@pytest.mark.parametrize(("from_size", "to_size"), [(32, 16), (16, 32), (16, 24)])
def test_d30_unlike_block_sizes_layouts_and_dtypes_arrive_converted(transport, namespace, from_size, to_size):
    layers = full_cache(num_tokens=TOKENS)
    here = stacked(from_size, torch.float32)
    there = Layout.packed(to_size).stating(dtype="float32")
    sent = here.stating(dtype="bfloat16")
    caches = [torch.zeros(4, HEADS, to_size, 2 * HEAD_DIM) for _ in layers]
    with ExitStack() as stack:
        sender, receiver = pair(stack, one_to_one(namespace), transport, sender=facts(sent), receiver=facts(there))
        report = sender.send("req", paged(layers, here, [1, 0]))
        with receiver.receive("req", timeout_s=10) as kv:
            assert all(tensor.dtype == torch.bfloat16 for layer in kv.layers for tensor in layer)
            scatter_into_blocks(kv.layers, caches, [3, 1], there)
    narrowed = [LayerKV(*(tensor.bfloat16().float() for tensor in layer)) for layer in layers]
    for cache, layer in zip(caches, narrowed, strict=True):
        by_token = torch.cat([cache[3], cache[1]], dim=1).transpose(0, 1)[:TOKENS]
        assert torch.equal(by_token[..., :HEAD_DIM], layer.key)
        assert torch.equal(by_token[..., HEAD_DIM:], layer.value)
    assert report.nbytes < 2 * 2 * TOKENS * HEADS * HEAD_DIM * 4


def test_floats_are_sent_narrow_and_detached_wide_over_any_heads(transport, namespace):
    layers = full_cache(num_tokens=TOKENS)
    route = Route.tp("a", "b", num_kv_heads=HEADS, from_tp=2, to_tp=3, namespace=namespace)
    with ExitStack() as stack:
        senders = [
            stack.enter_context(KVSender(route, rank, transport=transport, dtype=torch.float16)) for rank in range(2)
        ]
        receivers = [stack.enter_context(KVReceiver(route, rank, transport=transport)) for rank in range(3)]
        send_everywhere(senders, layers)
        for receiver in receivers:
            kv = receiver.receive("req", timeout_s=10)
            kv.detach(torch.float32)
            halves = [LayerKV(*(tensor.half().float() for tensor in layer)) for layer in layers]
            assert_same(kv.layers, part(halves, route.target_heads[receiver.rank]))
            assert kv.owns_memory
        assert all(sender.drain(timeout_s=10) == 0 for sender in senders)


@pytest.mark.parametrize(("from_tp", "to_tp"), [(1, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("grain", ["tensor", "head", "token_head"])
def test_d33_8_bit_floats_arrive_with_the_scales_of_just_their_heads(transport, namespace, from_tp, to_tp, grain):
    layers = full_cache(num_tokens=TOKENS)
    route = Route.tp("a", "b", num_kv_heads=HEADS, from_tp=from_tp, to_tp=to_tp, namespace=namespace)
    entries = quantise(layers, torch.float8_e4m3fn, grain)
    with ExitStack() as stack:
        senders = [stack.enter_context(KVSender(route, rank, transport=transport)) for rank in range(from_tp)]
        receivers = [stack.enter_context(KVReceiver(route, rank, transport=transport)) for rank in range(to_tp)]
        send_everywhere(senders, entries)
        for receiver in receivers:
            kv = receiver.receive("req", timeout_s=10)
            kv.detach(torch.bfloat16)
            expected = part(dequantise(entries, torch.bfloat16), route.target_heads[receiver.rank])
            assert_same(kv.layers, expected)
            assert kv.layer_ids == (0, 1)


def test_a_value_that_the_sent_dtype_cannot_hold_fails_the_request_on_both_sides(transport, namespace):
    layers = full_cache(num_tokens=TOKENS)
    layers[1].value[3, 1, 2] = 1e6
    with ExitStack() as stack:
        sender, receiver = pair(stack, one_to_one(namespace), transport, dtype=torch.float16)
        with pytest.raises(HandoffError, match="beyond 65504, which float16 cannot hold"):
            sender.send("req", layers)
        with pytest.raises(HandoffError, match="beyond 65504, which float16 cannot hold"):
            receiver.receive("req", timeout_s=10)


def test_layers_that_do_not_convert_into_what_is_sent_are_refused_before_anything_is(transport, namespace):
    with ExitStack() as stack:
        sender, _ = pair(stack, one_to_one(namespace), transport, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match="float8_e5m2 is not sent as bfloat16"):
            sender.send("req", quantise(full_cache(), torch.float8_e5m2))


def test_a_receiver_may_not_detach_into_8_bits(transport, namespace):
    with ExitStack() as stack:
        sender, receiver = pair(stack, one_to_one(namespace), transport)
        sender.send("req", full_cache())
        with receiver.receive("req", timeout_s=10) as kv:
            with pytest.raises(ConfigError, match="layer 0 in float32 does not convert into float8_e4m3fn"):
                kv.detach(torch.float8_e4m3fn)
            assert_same(kv.layers, full_cache())


def test_a_model_that_states_another_dtype_than_is_sent_is_refused(namespace):
    with pytest.raises(ConfigError, match=r"dtype is torch.float16, but model states torch.bfloat16"):
        KVSender(
            one_to_one(namespace),
            0,
            transport="memory",
            dtype=torch.float16,
            model=facts(stacked(16, torch.bfloat16)),
        )


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"num_layers": 3}, "sender: num_layers 2, receiver: num_layers 3; not convertible"),
        ({"num_kv_heads": 8}, "sender: num_kv_heads 3, receiver: num_kv_heads 8; not convertible"),
        (
            {"sender": Parallel(tp=8)},
            "sender: sender_sizes tp=1 pp=1 cp=1, receiver: sender_sizes tp=8 pp=1 cp=1; not convertible",
        ),
        ({"layout": stacked(16, torch.int8)}, "sender: dtype float32, receiver: dtype int8; not convertible"),
        (
            {"layout": stacked(16, torch.float32).stating(rope="interleaved")},
            "sender: rope unstated, receiver: rope interleaved; not convertible",
        ),
    ],
)
def test_d21_what_does_not_convert_is_refused_when_the_two_meet_with_both_values(
    transport, namespace, changes, difference
):
    layout = stacked(16, torch.float32)
    with ExitStack() as stack:
        sender, receiver = pair(
            stack,
            one_to_one(namespace),
            transport,
            sender=facts(layout),
            receiver=facts(**{"layout": layout, **changes}),
        )
        sender.send("req", full_cache())
        with pytest.raises(ConnectError, match=difference):
            receiver.receive("req", timeout_s=10)


@pytest.mark.parametrize("silent", ["sender", "receiver"])
def test_d21_a_side_that_states_nothing_of_its_model_is_refused(transport, namespace, silent):
    stated = {"sender": facts(stacked(16, torch.float32)), "receiver": facts(stacked(16, torch.float32))}
    with ExitStack() as stack:
        sender, receiver = pair(stack, one_to_one(namespace), transport, **{**stated, silent: None})
        sender.send("req", full_cache())
        with pytest.raises(ConnectError, match=f"{silent}: states nothing of its model, while its peer does"):
            receiver.receive("req", timeout_s=10)


def test_a_paged_latent_without_heads_arrives_in_another_block_size(transport, namespace):
    latent = torch.randn(TOKENS, 1, 6)
    pool, there = torch.zeros(4, 8, 6), torch.zeros(3, 16, 6)
    scatter_into_blocks([LayerKV(latent, latent[..., :0])], [pool], [3, 0, 2], Layout.latent(8))
    route = Route.tp("a", "b", num_kv_heads=1, from_tp=2, to_tp=1, namespace=namespace)
    with ExitStack() as stack:
        senders = [stack.enter_context(KVSender(route, rank, transport=transport)) for rank in range(2)]
        receiver = stack.enter_context(KVReceiver(route, 0, transport=transport))
        for sender in senders:
            sender.send("req", PagedKV([pool], [3, 0, 2], TOKENS, Layout.latent(8)))
        with receiver.receive("req", timeout_s=10) as kv:
            scatter_into_blocks(kv.layers, [there], [2, 0], Layout.latent(16))
    assert torch.equal(torch.cat([there[2], there[0]])[:TOKENS], latent[:, 0])


def test_an_engines_8_bit_cache_arrives_in_16_bits_over_other_ranks_and_shares_of_tokens(transport, namespace):
    layers = full_cache(num_tokens=TOKENS)
    entries = quantise(layers, torch.float8_e4m3fn, "tensor")
    values, scales = entries[::2], [tuple(float(scale[0, 0, 0]) for scale in entry) for entry in entries[1::2]]
    kept = Layout.packed(4).stating(dtype="float8_e4m3fn", scales="tensor")
    pools = [torch.zeros(8, HEADS, 4, 2 * HEAD_DIM, dtype=torch.uint8) for _ in layers]
    ids = [5, 2, 0, 7, 1, 3]
    scatter_into_blocks(values, pools, ids, Layout.packed(4).stating(dtype="float8_e4m3fn"))
    route = Route.parallel(
        Edge(from_stage="a", to_stage="b", namespace=namespace),
        num_kv_heads=HEADS,
        source=Parallel(tp=1),
        target=Parallel(tp=2, cp=2),
    )
    expected = dequantise(entries, torch.bfloat16)
    with ExitStack() as stack:
        sender = stack.enter_context(KVSender(route, 0, transport=transport))
        receivers = [stack.enter_context(KVReceiver(route, rank, transport=transport)) for rank in range(4)]
        sender.send("req", PagedKV(pools, ids, TOKENS, kept, scales=scales))
        for receiver in receivers:
            kv = receiver.receive("req", timeout_s=10)
            kv.detach(torch.bfloat16)
            (box,) = route.target_boxes[receiver.rank]
            runs = [run for stripe in box.tokens.stripes(TOKENS) for run in stripe.runs()]
            tokens = [token for run in runs for token in range(*run)]
            share = [LayerKV(*(tensor[tokens] for tensor in layer)) for layer in part(expected, box.heads)]
            assert_same(kv.layers, share)


def test_d21_a_sender_that_comes_back_with_another_model_is_judged_anew(transport, namespace):
    layout, layers = stacked(16, torch.float32), full_cache()
    route = one_to_one(namespace)
    with KVReceiver(route, 0, transport=transport, model=facts(layout)) as receiver:
        with KVSender(route, 0, transport=transport, model=facts(layout)) as sender:
            sender.send("first", layers)
            with receiver.receive("first", timeout_s=10) as kv:
                assert_same(kv.layers, layers)
        with KVSender(route, 0, transport=transport, model=facts(layout, head_dim=8)) as sender:
            sender.send("second", layers)
            with pytest.raises(ConnectError, match="sender: head_dim 8, receiver: head_dim 4; not convertible"):
                receiver.receive("second", timeout_s=10)
