"""Any layout to any layout: what every target rank gets is exactly its part of the request, byte for byte."""

from __future__ import annotations

import math

import pytest
import torch
from boxed_caches import HEAD_DIM, boxed_cache, carry, positions
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import assert_same

from omnikv import Edge, Route
from omnikv.core.boxes import Box, Span
from omnikv.core.partition import LayerRule, Parallel
from omnikv.core.tokens import LastTokens, State
from omnikv.errors import RemoteProtocolError

EDGE = Edge(from_stage="prefill", to_stage="decode")
ITEM_NBYTES = 8


def arrive(route, num_tokens, num_layers=2):
    """Carries a request over the route and checks every target; returns the bytes that travelled."""
    caches = [boxed_cache(boxes, num_tokens, num_layers) for boxes in route.source_boxes]
    received, nbytes = carry(route, caches, num_tokens)
    for boxes, kv in zip(route.target_boxes, received, strict=True):
        assert_same(kv.layers, boxed_cache(boxes, num_tokens, num_layers))
        assert kv.num_tokens == num_tokens
    return nbytes


def reversed_route(route):
    return Route(edge=EDGE, source_boxes=route.target_boxes, target_boxes=route.source_boxes)


def needed_nbytes(stage, num_tokens):
    return sum(
        2 * HEAD_DIM * ITEM_NBYTES * box.layers.num_layers * len(box.heads) * len(positions(box, num_tokens))
        for boxes in stage
        for box in boxes
    )


def stages(max_ranks=12):
    cp = st.one_of(
        st.just({}),
        st.integers(2, 4).flatmap(
            lambda size: (
                st.sampled_from([{"cp": size}, {"cp": size, "cp_zigzag": True}])
                | st.integers(1, 3).map(lambda block: {"cp": size, "cp_block": block})
            )
        ),
    )
    sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), cp)
    return sizes.map(lambda s: Parallel(tp=s[0], pp=s[1], **s[2])).filter(lambda p: p.num_ranks <= max_ranks)


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16), st.integers(0, 3))
def test_tensor_parallel_sizes_need_not_divide_each_other(from_tp, to_tp, num_heads, num_tokens):
    route = Route.tp("a", "b", num_kv_heads=num_heads, from_tp=from_tp, to_tp=to_tp)
    arrive(route, num_tokens, num_layers=1)
    arrive(reversed_route(route), num_tokens, num_layers=1)


@settings(deadline=None, max_examples=120)
@given(stages(), stages(), st.integers(1, 5), st.integers(4, 6), st.integers(0, 23))
def test_every_layer_head_and_token_arrives_once_whatever_the_stages(source, target, num_heads, num_layers, num_tokens):
    route = Route.parallel(EDGE, num_kv_heads=num_heads, num_layers=num_layers, source=source, target=target)
    nbytes = arrive(route, num_tokens, num_layers)
    # Padding apart, nothing travels that a target does not need.
    spans = sum(2 * box.layers.num_layers for piece in route.pieces() for box in piece.boxes)
    assert needed_nbytes(route.target_boxes, num_tokens) <= nbytes
    assert nbytes <= needed_nbytes(route.target_boxes, num_tokens) + 64 * spans


@settings(deadline=None, max_examples=60)
@given(stages(6), stages(6), st.integers(1, 4), st.integers(1, 17))
def test_a_route_and_its_reverse_give_every_rank_back_what_it_had(source, target, num_heads, num_tokens):
    route = Route.parallel(EDGE, num_kv_heads=num_heads, num_layers=4, source=source, target=target)
    before = [boxed_cache(boxes, num_tokens) for boxes in route.source_boxes]
    there, _ = carry(route, before, num_tokens)
    back, _ = carry(reversed_route(route), [kv.layers for kv in there], num_tokens)
    for mine, again in zip(before, back, strict=True):
        assert_same(again.layers, mine)


@pytest.mark.parametrize("from_pp", [1, 2, 3, 4])
@pytest.mark.parametrize("to_pp", [1, 2, 3, 4])
def test_pipeline_stages_of_any_number(from_pp, to_pp):
    source, target = Parallel(pp=from_pp, tp=2), Parallel(pp=to_pp, tp=1)
    arrive(Route.parallel(EDGE, num_kv_heads=2, num_layers=7, source=source, target=target), 3, 7)


def test_layers_from_one_pipeline_stage_are_handed_out_without_a_copy():
    route = Route.parallel(EDGE, num_kv_heads=2, num_layers=4, source=Parallel(pp=2), target=Parallel())
    [kv], _ = carry(route, [boxed_cache(boxes, 3) for boxes in route.source_boxes], 3)
    assert not kv.owns_memory
    assert kv.layer_ids == (0, 1, 2, 3)


def test_x10_a_latent_has_no_heads_to_cut_and_is_read_once_by_each_target():
    route = Route.parallel(EDGE, num_kv_heads=1, num_layers=2, source=Parallel(tp=4), target=Parallel(tp=2))
    assert arrive(route, 8) == needed_nbytes(route.target_boxes, 8)
    assert [(piece.source_rank, piece.target_rank) for piece in route.pieces()] == [(0, 0), (2, 1)]


@pytest.mark.parametrize(("from_tp", "to_tp", "num_heads"), [(8, 16, 8), (4, 8, 4), (4, 8, 2)])
def test_d18_each_of_more_receivers_than_heads_gets_its_copy_of_one(from_tp, to_tp, num_heads):
    route = Route.tp("a", "b", num_kv_heads=num_heads, from_tp=from_tp, to_tp=to_tp)
    assert route.target_heads == tuple((rank * num_heads // to_tp,) for rank in range(to_tp))
    arrive(route, 3)


@pytest.mark.parametrize("from_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("to_tp", [1, 2, 4, 8])
def test_x01_x02_d19_two_heads_arrive_once_each_between_any_sizes(from_tp, to_tp):
    sizes = {"source": Parallel(tp=from_tp), "target": Parallel(tp=to_tp)}
    route = Route.parallel(EDGE, num_kv_heads=2, num_layers=2, **sizes)
    assert arrive(route, 4) == needed_nbytes(route.target_boxes, 4)


def test_x10_a_latent_that_two_ranks_hold_is_not_doubled():
    latent = torch.randn(2, 1, 4)
    route = Route.parallel(EDGE, num_kv_heads=1, source=Parallel(tp=2), target=Parallel())
    [kv], _ = carry(route, [[(latent, None)], [(latent, None)]], 2)
    assert torch.equal(kv.layers[0].key, latent)


def hybrid(source, target):
    """Four entries of a cache: attention, a sliding window, a state that is cut by channels, and one that is not."""
    rules = [
        LayerRule(layers=Span(1, 2), num_heads=4, tokens=LastTokens(4)),
        LayerRule(layers=Span(2, 3), num_heads=6, tokens=State()),
        LayerRule(layers=Span(3, 4), num_heads=1, split=False, tokens=State()),
    ]
    return Route.parallel(EDGE, num_kv_heads=4, num_layers=4, source=source, target=target, rules=rules)


@pytest.mark.parametrize(("from_tp", "to_tp"), [(1, 2), (2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("num_tokens", [2, 4, 9])
def test_d33_the_parts_of_a_layer_follow_rules_of_their_own(from_tp, to_tp, num_tokens):
    arrive(hybrid(Parallel(tp=from_tp), Parallel(tp=to_tp)), num_tokens, 4)


def test_d33_a_state_with_one_part_cut_and_two_replicated_comes_back_byte_for_byte():
    rules = [
        LayerRule(layers=Span(at, at + 1), num_heads=heads, split=split, tokens=State())
        for at, (heads, split) in enumerate([(6, True), (2, False), (2, False)])
    ]
    sizes = {"num_kv_heads": 1, "num_layers": 3, "rules": rules}
    there = Route.parallel(EDGE, **sizes, source=Parallel(tp=1), target=Parallel(tp=2))
    x, b, c = torch.randn(1, 6, 4), torch.randn(1, 2, 3), torch.randn(1, 2, 3)
    halves, _ = carry(there, [[(x, None), (b, None), (c, None)]], 9)
    for rank, kv in enumerate(halves):
        for got, expected in zip(kv.layers, (x[:, 3 * rank : 3 * rank + 3], b, c), strict=True):
            assert torch.equal(got.key, expected)
    [back], _ = carry(reversed_route(there), [[(layer.key, None) for layer in kv.layers] for kv in halves], 9)
    for got, expected in zip(back.layers, (x, b, c), strict=True):
        assert torch.equal(got.key, expected)


def test_a_state_of_any_rank_and_a_latent_without_a_value_are_carried():
    rules = [LayerRule(layers=Span(1, 2), num_heads=6, tokens=State())]
    source, target = Parallel(tp=1), Parallel(tp=2)
    route = Route.parallel(EDGE, num_kv_heads=1, num_layers=2, source=source, target=target, rules=rules)
    latent, state = torch.randn(5, 1, 8), torch.randn(1, 6, 3, 2)
    received, _ = carry(route, [[(latent, None), (state, None)]], 5)
    for rank, kv in enumerate(received):
        assert torch.equal(kv.layers[0].key, latent)
        assert torch.equal(kv.layers[1].key, state[:, 3 * rank : 3 * rank + 3])
        assert kv.layers[1].value.numel() == 0


def test_layers_that_share_a_cache_share_an_entry_that_several_pipeline_stages_may_need():
    # The model's layer 4 uses the cache of layer 0: the second stage needs that entry too.
    source, *target = [
        tuple(Box(heads=(0, 1), layers=Span(*layers)) for layers in rank)
        for rank in [[(0, 4)], [(0, 2)], [(0, 1), (2, 4)]]
    ]
    route = Route(edge=EDGE, source_boxes=[source], target_boxes=target)
    arrive(route, 3, 4)
    [_, second], _ = carry(route, [boxed_cache(source, 3)], 3)
    assert second.layer_ids == (0, 2, 3)


def test_d20_a_request_is_not_handed_out_while_a_part_of_it_is_absent():
    route = Route.tp("a", "b", num_kv_heads=4, from_tp=8, to_tp=1)
    caches = [boxed_cache(boxes, 3) for boxes in route.source_boxes]
    with pytest.raises(RemoteProtocolError, match="did not arrive whole: no source holds heads 1, 2, 3 of layers 0-1"):
        carry(route, caches, 3, lose=lambda piece: piece.source_rank != 0)


def test_the_tokens_that_did_not_arrive_are_named():
    route = Route.parallel(EDGE, num_kv_heads=1, num_layers=2, source=Parallel(cp=3), target=Parallel())
    caches = [boxed_cache(boxes, 9) for boxes in route.source_boxes]
    with pytest.raises(RemoteProtocolError, match="no source holds head 0 of layers 0-1, tokens 3-5"):
        carry(route, caches, 9, lose=lambda piece: piece.source_rank == 1)


def test_most_of_an_interleaved_share_moves_in_few_strided_copies():
    source, target = Parallel(cp=4, cp_block=1), Parallel(cp=2, cp_block=16)
    route = Route.parallel(EDGE, num_kv_heads=1, num_layers=1, source=source, target=target)
    [piece, *_] = route.pieces()
    assert len(piece.boxes[0].tokens(128 << 10)) <= math.lcm(4, 32) // 4
    arrive(route, 1000, 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", range(1, 17))
def test_every_pair_of_tensor_parallel_sizes_arrives_byte_for_byte(num_heads):
    for from_tp in range(1, 13):
        for to_tp in range(1, 13):
            route = Route.tp("a", "b", num_kv_heads=num_heads, from_tp=from_tp, to_tp=to_tp)
            moved = arrive(route, 3, num_layers=1)
            # Each of a piece's two tensors is padded to 64 bytes at most.
            needed = sum(len(heads) for heads in route.target_heads) * 3 * 2 * HEAD_DIM * ITEM_NBYTES
            assert needed <= moved < needed + 2 * 64 * len(route.pieces())
