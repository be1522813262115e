"""A route gives every target each of its heads exactly once, from a source that holds it, or refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.keys import Edge
from omnikv.core.reshard import MAX_FACT_CHARS, Route, split_heads
from omnikv.errors import TopologyError

EDGE = Edge(from_stage="prefill", to_stage="decode")


def layouts(num_heads):
    heads = st.lists(st.integers(0, num_heads - 1), min_size=1, max_size=num_heads, unique=True).map(tuple)
    return st.lists(heads, min_size=1, max_size=6).map(tuple)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), layouts(n), layouts(n))))
def test_every_needed_head_comes_from_exactly_one_holder_at_the_right_place(case):
    _, source, target = case
    held = {head for heads in source for head in heads}
    if any(head not in held for heads in target for head in heads):
        with pytest.raises(TopologyError, match="no source holds head"):
            Route(edge=EDGE, source_heads=source, target_heads=target)
        return
    got: Counter[tuple[int, int]] = Counter()
    for piece in Route(edge=EDGE, source_heads=source, target_heads=target).pieces():
        [box] = piece.boxes
        for head, at_source, at_target in zip(box.heads, box.source_positions, box.target_positions, strict=True):
            assert source[piece.source_rank][at_source] == head
            assert target[piece.target_rank][at_target] == head
            got[piece.target_rank, head] += 1
    assert got == Counter((rank, head) for rank, heads in enumerate(target) for head in heads)


@pytest.mark.parametrize(
    ("num_heads", "tp", "expected"),
    [
        (3, 1, ((0, 1, 2),)),
        (3, 2, ((0, 1), (2,))),
        (3, 3, ((0,), (1,), (2,))),
        (2, 4, ((0,), (0,), (1,), (1,))),
        (8, 3, ((0, 1, 2), (3, 4, 5), (6, 7))),
        (2, 3, ((0,), (0,), (1,))),
    ],
)
def test_heads_are_spread_as_engines_do(num_heads, tp, expected):
    assert split_heads(num_heads, tp) == expected


@pytest.mark.parametrize(("num_heads", "tp"), [(0, 1), (1, 0)])
def test_heads_that_cannot_be_spread_are_refused(num_heads, tp):
    with pytest.raises(TopologyError):
        split_heads(num_heads, tp)


def test_x01_replicated_heads_are_read_once():
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=4, to_tp=2)
    assert [(p.source_rank, p.target_rank, p.heads) for p in route.pieces()] == [(0, 0, (0,)), (2, 1, (1,))]


def test_x02_fewer_heads_than_receiving_ranks_is_no_obstacle():
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=4)
    assert [(p.source_rank, p.target_rank, p.heads) for p in route.pieces()] == [
        (0, 0, (0,)),
        (0, 1, (0,)),
        (1, 2, (1,)),
        (1, 3, (1,)),
    ]


def test_replicas_share_the_load():
    route = Route(edge=EDGE, source_heads=((0,), (0,)), target_heads=((0,), (0,), (0,), (0,)))
    assert Counter(piece.source_rank for piece in route.pieces()) == {0: 2, 1: 2}


def test_a_rank_knows_its_own_pieces():
    route = Route.tp("a", "b", num_kv_heads=3, from_tp=2, to_tp=3)
    assert [(p.target_rank, p.heads) for p in route.pieces_from(0)] == [(0, (0,)), (1, (1,))]
    assert [(p.source_rank, p.heads) for p in route.pieces_to(2)] == [(1, (2,))]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ((), ((0,),), "source stage has no ranks"),
        (((0,),), (), "target stage has no ranks"),
        (((0,), ()), ((0,),), "source rank 1 holds no KV heads"),
        (((0, 0),), ((0,),), "names a head twice"),
        (((-1,),), ((0,),), "no integers of at least 0"),
        (((True,),), ((0,),), "no integers of at least 0"),
        ((0, 1), ((0,),), "the source stage must be one list of KV-head ids a rank, got (0, 1)"),
        (((0,), (1,)), ((0, 1, 2),), "no source holds head 2, which target rank 0 needs; sources hold 0 | 1"),
    ],
)
def test_a_route_that_cannot_work_is_refused_when_it_is_made(source, target, message):
    with pytest.raises(TopologyError) as caught:
        Route(edge=EDGE, source_heads=source, target_heads=target)
    assert message in str(caught.value)


def test_a_route_between_no_stages_is_refused():
    with pytest.raises(TopologyError, match="needs an Edge between two stages, got None"):
        Route(edge=None, source_heads=((0,),), target_heads=((0,),))


@pytest.mark.parametrize("sizes", [(3.0, 1), ("3", 1), (3, None), (True, 1)])
def test_sizes_that_are_no_integers_are_refused(sizes):
    with pytest.raises(TopologyError, match="num_kv_heads and tp_size must be positive integers"):
        split_heads(*sizes)


def test_every_process_makes_the_same_plan_of_the_same_route():
    program = """
from omnikv.core.boxes import Span
from omnikv.core.keys import Edge
from omnikv.core.partition import LayerRule, Parallel
from omnikv.core.reshard import Route
from omnikv.core.tokens import LastTokens, State
rules = [LayerRule(layers=Span(1, 2), num_heads=5, tokens=LastTokens(7)),
         LayerRule(layers=Span(3, 4), num_heads=9, tokens=State())]
for target in (Parallel(tp=12), Parallel(pp=2, cp=3, cp_block=4), Parallel(tp=2, cp=2, cp_zigzag=True)):
    route = Route.parallel(Edge(from_stage="a", to_stage="b"), num_kv_heads=6, num_layers=5,
                           source=Parallel(tp=8, cp=2, cp_block=2), target=target, rules=rules)
    print(route.pieces(), route.facts(), [box.tokens(99) for piece in route.pieces() for box in piece.boxes])
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(seen) == 1


def test_a_rank_outside_the_route_is_named():
    route = Route.tp("a", "b", num_kv_heads=4, from_tp=2, to_tp=1)
    with pytest.raises(TopologyError, match="rank 2 is outside the source stage, which has 2 ranks"):
        route.pieces_from(2)
    with pytest.raises(TopologyError, match="rank -1 is outside the target stage, which has 1 ranks"):
        route.pieces_to(-1)


def test_lists_of_heads_are_taken_and_frozen():
    route = Route(edge=EDGE, source_heads=[[0, 1]], target_heads=[[1], [0]])
    assert route.source_heads == ((0, 1),)
    assert route.facts() == {"source_heads": "0,1", "target_heads": "1 | 0"}
    assert hash(route) == hash(Route(edge=EDGE, source_heads=((0, 1),), target_heads=((1,), (0,))))


def test_the_facts_of_a_stage_with_very_many_heads_are_short_and_its_own():
    edge = Edge(from_stage="a", to_stage="b")
    heads = tuple(range(20_000))
    swapped = (*heads[:-2], heads[-1], heads[-2])
    routes = [Route(edge=edge, source_heads=(order,), target_heads=(heads,)) for order in (heads, swapped)]
    facts, others = [route.facts() for route in routes]
    assert all(len(text) <= MAX_FACT_CHARS for text in facts.values())
    assert facts["source_heads"] != others["source_heads"]
    assert facts["target_heads"] == others["target_heads"]
