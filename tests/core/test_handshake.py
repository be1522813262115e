"""The handshake: what converts passes, what does not is refused on both sides in the same words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.boxes import Span
from omnikv.core.handshake import ModelFacts, judge, model_differences
from omnikv.core.keys import Edge
from omnikv.core.layout import Layout
from omnikv.core.partition import LayerRule, Parallel
from omnikv.core.reshard import Route
from omnikv.core.tokens import State
from omnikv.errors import ConfigError

STACKED = Layout.stacked(16, dim=0).stating(dtype="bfloat16", rope="halves")


def facts(**changes):
    stated = {
        "num_layers": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "value_head_dim": 128,
        "layout": STACKED,
        "sender": Parallel(tp=4),
        "receiver": Parallel(tp=6),
    }
    return ModelFacts(**{**stated, **changes}).texts()


def test_what_is_stated_of_the_model_makes_its_route():
    edge = Edge(from_stage="prefill", to_stage="decode")
    sizes = {"sender": Parallel(tp=4, pp=2), "receiver": Parallel(tp=6)}
    model = ModelFacts(num_layers=32, num_kv_heads=8, head_dim=128, value_head_dim=128, layout=STACKED, **sizes)
    rules = [LayerRule(layers=Span(31, 32), num_heads=3, tokens=State())]
    assert model.route(edge, rules) == Route.parallel(
        edge, num_kv_heads=8, num_layers=32, source=Parallel(tp=4, pp=2), target=Parallel(tp=6), rules=rules
    )


def without(name, statement):
    return {key: text for key, text in statement.items() if key != f"model.{name}"}


def restated(name, text, statement):
    return {**statement, f"model.{name}": text}


def test_two_sides_of_one_mind_agree_and_convert_nothing():
    assert judge(facts(), facts()) == judge(facts(), facts())
    agreed = judge(facts(), facts())
    assert (agreed.differences, agreed.conversions) == ((), ())


@pytest.mark.parametrize(("sender", "receiver"), [(32, 16), (16, 32), (16, 24)])
def test_d30_unlike_block_sizes_convert_and_the_agreement_says_so(sender, receiver):
    agreed = judge(
        facts(layout=Layout.packed(sender).stating(dtype="bfloat16")),
        facts(layout=Layout.packed(receiver).stating(dtype="bfloat16")),
    )
    assert agreed.differences == ()
    assert agreed.conversions == (f"sender: block_size {sender}, receiver: block_size {receiver}",)


def test_any_order_of_dimensions_converts_into_any_other():
    plain = {"dtype": "float32"}
    agreed = judge(
        facts(layout=Layout.vllm_cpu(16).stating(**plain)), facts(layout=Layout.transformers().stating(**plain))
    )
    assert agreed.differences == ()
    assert [words.split()[1] for words in agreed.conversions] == ["layout", "block_size"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("num_layers", {"num_layers": 31}),
        ("num_kv_heads", {"num_kv_heads": 4}),
        ("head_dim", {"head_dim": 64}),
        ("value_head_dim", {"value_head_dim": None}),
        ("sender_sizes", {"sender": Parallel(tp=1)}),
        ("receiver_sizes", {"receiver": Parallel(tp=8)}),
        ("rope", {"layout": Layout.packed(16).stating(dtype="bfloat16", rope="interleaved")}),
    ],
)
def test_d21_what_does_not_convert_is_one_difference_that_names_both_values(name, changes):
    (difference,) = judge(facts(), facts(**changes)).differences
    ours, theirs = facts()[f"model.{name}"], facts(**changes)[f"model.{name}"]
    assert difference == f"sender: {name} {ours}, receiver: {name} {theirs}; not convertible"


def test_every_difference_is_named_at_once():
    differences = judge(facts(), facts(num_layers=31, head_dim=64)).differences
    assert [difference.split(",")[0] for difference in differences] == ["sender: num_layers 32", "sender: head_dim 128"]


@pytest.mark.parametrize("name", [key.removeprefix("model.") for key in facts()])
def test_d21_a_fact_that_one_side_does_not_state_is_a_difference(name):
    assert judge(facts(), without(name, facts())).differences == (f"receiver: {name} not stated",)
    assert judge(without(name, facts()), facts()).differences == (f"sender: {name} not stated",)


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "x", "٣"])
@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "value_head_dim", "block_size"])
def test_d21_a_size_of_zero_or_none_is_a_difference_even_if_both_state_it(name, text):
    both = restated(name, text, facts())
    assert judge(both, both).differences == (f"sender: {name} {text!r} is none", f"receiver: {name} {text!r} is none")


@pytest.mark.parametrize("text", ["tp=0 pp=1 cp=1", "tp=4", "4", "tp=4 pp=1", "pp=1 tp=4 cp=1", "tp=4 pp=1 cp=1 dp=2"])
def test_d21_parallel_sizes_are_stated_whole(text):
    both = restated("sender_sizes", text, facts())
    assert len(judge(both, both).differences) == 2


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "value_head_dim"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8"])
def test_d21_a_size_that_is_no_positive_number_cannot_be_stated(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a positive number, got {value!r}"):
        facts(**{name: value})


@pytest.mark.parametrize("sizes", [None, 4, (4, 1, 1)])
def test_d21_parallel_sizes_have_no_defaults(sizes):
    with pytest.raises(ConfigError, match="sender must be the parallel sizes of that stage, got"):
        facts(sender=sizes)


def test_a_layout_without_a_dtype_is_no_statement():
    with pytest.raises(ConfigError, match=r"states no dtype; add it with \.stating"):
        facts(layout=Layout.packed(16))


FLOATS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("sender", "receiver", "converts"),
    [
        *((one, other, True) for one in FLOATS for other in FLOATS if one != other),
        *(("float8_e4m3fn", other, True) for other in FLOATS),
        *((one, "float8_e5m2", False) for one in (*FLOATS, "float8_e4m3fn", "int8")),
        ("int8", "float32", False),
        ("float64", "float32", False),
    ],
)
def test_dtypes_convert_to_wider_ones_and_among_16_and_32_bits(sender, receiver, converts):
    agreed = judge(facts(layout=STACKED.stating(dtype=sender)), facts(layout=STACKED.stating(dtype=receiver)))
    words = f"sender: dtype {sender}, receiver: dtype {receiver}"
    expected = ((words,), ()) if converts else ((), (f"{words}; not convertible",))
    assert (agreed.conversions, agreed.differences) == expected


def test_scales_must_be_alike_only_where_the_8_bit_values_are_kept():
    a_head = facts(layout=STACKED.stating(dtype="float8_e4m3fn", scales="head"))
    a_tensor = facts(layout=STACKED.stating(dtype="float8_e4m3fn", scales="tensor"))
    assert judge(a_head, a_tensor).differences == ("sender: scales head, receiver: scales tensor; not convertible",)
    assert judge(a_head, a_head).differences == ()
    assert judge(a_head, facts()).differences == ()


def test_both_sides_refuse_in_the_same_words_and_other_facts_are_not_judged_here():
    own, peer = {"route": "a", **facts()}, {"route": "b", **facts(num_layers=31)}
    here, there = model_differences("source", own, peer), model_differences("target", peer, own)
    assert here == there == ["sender: num_layers 32, receiver: num_layers 31; not convertible"]


def test_a_side_that_states_no_model_is_told_to():
    assert model_differences("source", facts(), {}) == model_differences("target", {}, facts())
    assert model_differences("source", facts(), {}) == [
        "receiver: states nothing of its model, while its peer does; pass model= on both sides"
    ]
    assert model_differences("source", {"route": "a"}, {"route": "b"}) == []


@given(st.dictionaries(st.sampled_from([*facts(), "model.x", "other"]), st.text(max_size=12), max_size=14))
def test_whatever_a_peer_states_is_judged_and_never_raises(statement):
    here = model_differences("source", facts(), statement)
    assert here == model_differences("target", statement, facts())
    assert here


def test_a_size_of_more_digits_than_python_reads_is_compared_like_any_other():
    endless = restated("num_layers", "9" * 5000, facts())
    assert judge(endless, endless).differences == ()
    assert len(judge(endless, facts()).differences) == 1
    assert judge(restated("num_layers", "0" * 5000, facts()), facts()).differences
