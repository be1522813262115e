"""Plans: minimal, balanced, proven; and what cannot be proven is named."""

from __future__ import annotations

from collections import Counter

import pytest

from omnikv.core.boxes import Box, Region, Span
from omnikv.core.coverage import Part, find_flaw
from omnikv.core.keys import Edge
from omnikv.core.partition import LayerRule, Parallel, split_heads
from omnikv.core.reshard import Route
from omnikv.core.tokens import ALL_TOKENS, Chunks, Cyclic, LastTokens, State, Stripe
from omnikv.errors import TopologyError

EDGE = Edge(from_stage="prefill", to_stage="decode")


@pytest.mark.parametrize("num_heads", range(1, 17))
def test_d18_d19_every_pair_of_tensor_parallel_sizes_is_planned_minimal_and_balanced(num_heads):
    for from_tp in range(1, 13):
        for to_tp in range(1, 13):
            route = Route.tp("a", "b", num_kv_heads=num_heads, from_tp=from_tp, to_tp=to_tp)
            got = Counter((piece.target_rank, head) for piece in route.pieces() for head in piece.heads)
            assert got == Counter((rank, head) for rank, heads in enumerate(route.target_heads) for head in heads)
            given = Counter((head, piece.source_rank) for piece in route.pieces() for head in piece.heads)
            for head in range(num_heads):
                holders = [rank for rank, heads in enumerate(route.source_heads) if head in heads]
                loads = [given[head, rank] for rank in holders]
                assert max(loads) - min(loads) <= 1
                assert sum(loads) == sum(head in heads for heads in route.target_heads)


def test_a_latent_that_all_hold_is_read_from_all_alike_by_context_parallel_ranks():
    route = Route.parallel(EDGE, num_kv_heads=1, num_layers=2, source=Parallel(tp=8), target=Parallel(cp=8))
    assert [piece.source_rank for piece in route.pieces()] == list(range(8))


def test_replicas_within_a_share_of_tokens_take_turns():
    route = Route.parallel(EDGE, num_kv_heads=1, source=Parallel(tp=2, cp=2), target=Parallel(tp=2, cp=2))
    assert [(piece.source_rank, piece.target_rank) for piece in route.pieces()] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_neighbouring_layers_from_one_rank_are_one_box():
    route = Route.parallel(EDGE, num_kv_heads=2, num_layers=6, source=Parallel(pp=2), target=Parallel(pp=3))
    assert [(p.source_rank, p.target_rank, [tuple(box.layers) for box in p.boxes]) for p in route.pieces()] == [
        (0, 0, [(0, 2)]),
        (0, 1, [(2, 3)]),
        (1, 1, [(3, 4)]),
        (1, 2, [(4, 6)]),
    ]


def test_only_ranks_whose_tokens_can_meet_deal_with_each_other():
    source, target = Parallel(cp=4), Parallel(cp=2)
    route = Route.parallel(EDGE, num_kv_heads=1, source=source, target=target)
    assert [(p.source_rank, p.target_rank) for p in route.pieces()] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    interleaved = Route.parallel(
        EDGE, num_kv_heads=1, source=Parallel(cp=4, cp_block=2), target=Parallel(cp=2, cp_block=2)
    )
    assert [(p.source_rank, p.target_rank) for p in interleaved.pieces()] == [(0, 0), (2, 0), (1, 1), (3, 1)]


def route_of(source, target):
    return Route(edge=EDGE, source_boxes=source, target_boxes=target)


def box(heads, layers=(0, 4), tokens=ALL_TOKENS):
    return Box(heads=tuple(heads), layers=Span(*layers), tokens=tokens)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (
            [[box([0])]],
            [[box([0, 1])]],
            "no source holds head 1 of layers 0-3, which target rank 0 needs; sources",
        ),
        ([[box([0], (0, 2))], [box([0], (3, 4))]], [[box([0])]], "no source holds head 0 of layer 2, which target"),
        (
            [[box([0], tokens=Chunks(4, (0, 1)))], [box([0], tokens=Chunks(4, (3,)))]],
            [[box([0])]],
            r"no source holds head 0 of layers 0-3, token 2, which target rank 0 needs \(in a request of 4 tokens\)",
        ),
        (
            [[box([0], tokens=Cyclic(2, 3, 0))], [box([0], tokens=Cyclic(2, 3, 2))]],
            [[box([0])]],
            "head 0 of layers 0-3, tokens 2-3, which target rank 0 needs",
        ),
        (
            [[box([0])], [box([0], tokens=Chunks(2, (0,)))]],
            [[box([0])]],
            "source ranks 0 and 1 both give head 0 of layers 0-3, token 0, which target rank 0 needs",
        ),
        ([[box([0], tokens=LastTokens(4))]], [[box([0])]], "no source holds head 0 of layers 0-3, token"),
        ([[box([0], tokens=State())]], [[box([0])]], "no source holds head 0 of layers 0-3, which"),
        ([[box([0], (0, 2)), box([1], (1, 3))]], [[box([0])]], "source rank 0 names layer 1 in two boxes"),
        ([[box([0], (2, 2))]], [[box([0])]], "source rank 0 has a box of layers 2 to 2"),
        ([[box([0], tokens="all")]], [[box([0])]], "whose tokens are no share"),
        ([[]], [[box([0])]], "source rank 0 holds nothing"),
        ([["box"]], [[box([0])]], "source rank 0 must be given as a list of Box"),
        ([[box([0])]], [[box([0, 0])]], "target rank 0 names a head twice"),
    ],
)
def test_a_route_that_is_not_proven_says_what_is_wrong(source, target, message):
    with pytest.raises(TopologyError, match=message):
        route_of(source, target)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (3, "rules must be a list of LayerRule, got 3"),
        ([Span(0, 1)], "rules must be a list of LayerRule"),
    ],
)
def test_rules_that_are_none_are_refused(rules, message):
    with pytest.raises(TopologyError, match=message):
        Parallel().boxes(2, 4, rules)


@pytest.mark.parametrize(
    ("layers", "num_heads", "message"),
    [
        ((0, 1.5), 2, "a rule must be of layers 0 to 1.5"),
        ((2, 2), 2, "a rule must be of layers 2 to 2"),
        (3, 2, "a rule must be of layers 3"),
        ((0, 1), 0, "num_heads must be a positive integer, got 0"),
        ((0, 1), "a", "num_heads must be a positive integer, got 'a'"),
    ],
)
def test_a_rule_without_layers_or_heads_is_refused(layers, num_heads, message):
    with pytest.raises(TopologyError, match=message):
        LayerRule(layers=layers, num_heads=num_heads, split=False)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (3, "the source stage must be given as a list of boxes a rank, got 3"),
        ([[Box(heads=1)]], "source rank 0 must be given its KV heads as a list of global ids, got 1"),
        ([[Box(heads=(0,), layers=2)]], "source rank 0 has a box of layers 2"),
        ([[Box(heads=(0,), layers=(0, 1, 2))]], r"source rank 0 has a box of layers \(0, 1, 2\)"),
    ],
)
def test_stages_that_are_none_are_refused(boxes, message):
    with pytest.raises(TopologyError, match=message):
        route_of(boxes, [[box([0])]])
    with pytest.raises(TopologyError, match="target must be the parallel sizes of that stage, got None"):
        Route.parallel(EDGE, num_kv_heads=2, source=Parallel(), target=None)


def test_a_route_is_plain_whether_or_not_its_number_of_layers_is_known():
    for num_layers in (None, 4):
        tp = {"num_kv_heads": 2, "num_layers": num_layers, "source": Parallel(tp=2)}
        assert Route.parallel(EDGE, **tp, target=Parallel()).is_plain
        # One rank has all tokens, however they would be dealt out to more.
        assert Route.parallel(EDGE, **tp, target=Parallel(cp_block=16)).is_plain
        assert Route.parallel(EDGE, **tp, target=Parallel(cp_zigzag=True)).is_plain
        assert not Route.parallel(EDGE, **tp, target=Parallel(cp=2)).is_plain
    assert not Route.parallel(EDGE, num_kv_heads=2, num_layers=4, source=Parallel(pp=2), target=Parallel()).is_plain
    assert not route_of([[box([0], (1, 3))]], [[box([0], (1, 3))]]).is_plain


def test_heads_and_boxes_that_contradict_each_other_are_refused():
    with pytest.raises(TopologyError, match="source_heads and source_boxes contradict each other"):
        Route(edge=EDGE, source_heads=((1,),), source_boxes=[[box([0])]], target_boxes=[[box([0])]])


def test_open_layers_end_where_the_other_stage_says():
    route = route_of([[box([0], (0, 2))], [box([0], (2, 5))]], [[Box(heads=(0,))]])
    assert route.target_boxes[0][0].layers == Span(0, 5)
    assert not route.is_plain


def test_peers_compare_boxes_where_heads_do_not_tell():
    route = route_of([[box([0, 1], tokens=Cyclic(2, 2, 0))], [box([0, 1], tokens=Cyclic(2, 2, 1))]], [[box([1])]])
    assert route.facts() == {
        "source_boxes": "0,1 in layers 0-3 for Cyclic(block_tokens=2, num_ranks=2, rank=0) | "
        "0,1 in layers 0-3 for Cyclic(block_tokens=2, num_ranks=2, rank=1)",
        "target_boxes": "1 in layers 0-3",
    }


def test_data_parallel_copies_of_a_stage_are_edges_of_their_own():
    edges = [Edge(from_stage="a", to_stage="b", replica=number) for number in (0, 1)]
    routes = [Route.parallel(edge, num_kv_heads=2, source=Parallel(tp=2), target=Parallel()) for edge in edges]
    assert routes[0] != routes[1]
    assert routes[0].pieces() == routes[1].pieces()


WHOLE = (Stripe.of(0, 8),)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0, (0, 2), (0, 1), WHOLE)], None),
        ([(0, (0, 1), (0, 1), WHOLE), (1, (1, 2), (1, 0), WHOLE)], None),
        (
            [(0, (0, 2), (0,), WHOLE), (1, (0, 2), (1,), (Stripe.of(0, 3),)), (2, (0, 2), (1,), (Stripe.of(3, 8),))],
            None,
        ),
        ([], "no source holds heads 0, 1 of layers 0-1"),
        ([(0, (0, 1), (0, 1), WHOLE)], "no source holds heads 0, 1 of layer 1"),
        ([(0, (0, 2), (0, 1), (Stripe(0, 1, 2, 4),))], "no source holds heads 0, 1 of layers 0-1, token 1"),
        ([(0, (0, 2), (0, 1), WHOLE), (3, (0, 2), (1,), (Stripe.of(6, 7),))], "source ranks 0 and 3 both give head 1"),
        ([(0, (0, 2), (0, 1, 2), WHOLE)], "source rank 0 gives head 2 of layers 0-1, which is not needed"),
        ([(0, (0, 3), (0, 1), WHOLE)], "source rank 0 gives heads 0, 1 of layer 2, which is not needed"),
        ([(0, (0, 2), (0, 1), (Stripe.of(0, 9),))], "gives heads 0, 1 of layers 0-1, token 8, which is not needed"),
    ],
)
def test_d20_a_need_and_its_parts_fit_exactly_or_the_flaw_is_named(parts, words):
    need = Region(Span(0, 2), (0, 1), WHOLE)
    flaw = find_flaw(
        [need], [Part(rank, Region(Span(*layers), heads, tokens)) for rank, layers, heads, tokens in parts]
    )
    if words is None:
        assert flaw is None
    else:
        assert words in flaw.spell()


@pytest.mark.parametrize(
    ("num_heads", "num_layers", "sizes", "rules", "message"),
    [
        (2, None, {"pp": 2}, [], "num_layers must be given to spread layers over 2 pipeline stages"),
        (2, 3, {"pp": 4}, [], "each stage needs a layer, got 3 layers on 4 stages"),
        (2, 5, {"pp": 2, "pp_layers": (2, 2)}, [], r"pp_layers \[2, 2\] add up to 4, not 5"),
        (2, None, {}, [(0, 1)], "num_layers must be given where some layers have rules"),
        (2, 4, {}, [(0, 2), (1, 3)], "another rule names one of them"),
        (2, 4, {}, [(3, 5)], "outside the 4 layers"),
        (0, 4, {}, [], "num_kv_heads must be a positive integer, got 0"),
        (True, 4, {}, [], "num_kv_heads must be a positive integer, got True"),
        (2, "4", {}, [], "num_layers must be a positive integer, got '4'"),
        (2, 2.0, {"pp": 2, "pp_layers": (1, 1)}, [], "num_layers must be a positive integer, got 2.0"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(num_heads, num_layers, sizes, rules, message):
    listed = [LayerRule(layers=Span(*layers), num_heads=1) for layers in rules]
    with pytest.raises(TopologyError, match=message):
        Parallel(**sizes).boxes(num_heads, num_layers, listed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp must be a positive integer, got 0"),
        ({"cp": 2.0}, "cp must be a positive integer, got 2.0"),
        ({"cp_block": 0}, "cp_block must be a positive integer, got 0"),
        ({"cp": 2, "cp_block": 4, "cp_zigzag": True}, "choose one"),
        ({"pp": 2, "pp_layers": (3,)}, "pp_layers must be 2 positive counts"),
        ({"pp": 2, "pp_layers": (1.5, 2.5)}, "pp_layers must be 2 positive counts"),
        ({"pp": 2, "pp_layers": 4}, "pp_layers must be 2 positive counts"),
    ],
)
def test_parallel_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(TopologyError, match=message):
        Parallel(**sizes)


def test_ranks_are_numbered_as_engines_do():
    boxes = Parallel(tp=2, cp=2, pp=2, pp_layers=(3, 1)).boxes(2, 4)
    assert [rank[0].heads for rank in boxes] == [(0,), (1,)] * 4
    assert [rank[0].layers for rank in boxes] == [Span(0, 3)] * 4 + [Span(3, 4)] * 4
    assert [rank[0].tokens for rank in boxes] == [Chunks(2, (0,))] * 2 + [Chunks(2, (1,))] * 2 + [
        Chunks(2, (0,))
    ] * 2 + [Chunks(2, (1,))] * 2
    assert split_heads(2, 2) == ((0,), (1,))
