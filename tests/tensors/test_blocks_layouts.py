"""Layouts: declared, checked against the tensors, and inferred only where a shape has one reading."""

import pytest
import torch
from kv_layouts import PAGED, WHOLE, element_of, make_cache

from omnikv.core.layout import Layout
from omnikv.errors import ConfigError
from omnikv.tensors.layouts import infer_layout, layer_views, normalize_layer_kv

BS = 4
INFERRED = ("split_pair", "stacked(dim=0)", "stacked(dim=1)", "packed")


def _zeros(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize("name", [*PAGED, *WHOLE])
def test_every_layout_gives_views_of_the_same_shape_over_the_engines_memory(name):
    layout = PAGED[name](BS) if name in PAGED else WHOLE[name]()
    blocks = 1 if name == "tokens" else 6
    cache = make_cache(layout, blocks, BS, 3, 8, torch.zeros)
    key, value = layer_views(cache, layout, layer=0)
    assert key.shape == value.shape == (blocks, BS, 3, 8)
    key[blocks - 1, 1, 2, 7], value[blocks - 1, 1, 2, 7] = 1.0, 2.0
    assert element_of(layout, cache, 0, blocks - 1, 1, 2)[7] == 1.0
    assert element_of(layout, cache, 1, blocks - 1, 1, 2)[7] == 2.0
    assert sum(float(part.sum()) for part in (cache if isinstance(cache, tuple) else (cache,))) == 3.0


@pytest.mark.parametrize("name", INFERRED)
def test_a_shape_with_one_reading_is_inferred(name):
    layout = PAGED[name](BS)
    assert infer_layout(make_cache(layout, 6, BS, 3, 8, torch.zeros), BS) == layout


def test_layouts_describe_themselves_differently():
    layouts = [
        *(make(16) for make in PAGED.values()),
        *(make() for make in WHOLE.values()),
        Layout.split_pair(32),
        Layout.latent(16),
        Layout.of("block head dim slot kv", 16),
        Layout.packed(16).stating(dtype=torch.bfloat16),
        Layout.packed(16).stating(rope="halves"),
        Layout.packed(16).stating(dtype="float8_e5m2", scales="head"),
    ]
    assert len({layout.describe() for layout in layouts}) == len(layouts)


def test_a_layout_of_axes_alone_reads_what_no_name_describes():
    cache = torch.randn(6, 3, 8, BS, 2)
    key, value = layer_views(cache, Layout.of("block head dim slot kv", BS), layer=0)
    assert torch.equal(key, cache[..., 0].permute(0, 3, 1, 2))
    assert torch.equal(value, cache[..., 1].permute(0, 3, 1, 2))


def test_a_latent_cache_is_one_head_of_keys_and_values_without_elements():
    cache = torch.randn(6, BS, 24)
    key, value = layer_views(cache, Layout.latent(BS), layer=0)
    assert torch.equal(key, cache[:, :, None])
    assert value.shape == (6, BS, 1, 0)


def test_8_bit_floats_that_an_engine_keeps_as_bytes_are_read_as_what_is_declared():
    values = torch.randn(2, 6, BS, 3, 8).to(torch.float8_e4m3fn)
    layout = Layout.stacked(BS, dim=0).stating(dtype=torch.float8_e4m3fn)
    for cache in (values, values.view(torch.uint8)):
        key, value = layer_views(cache, layout, layer=0)
        assert key.dtype == value.dtype == torch.float8_e4m3fn
        assert torch.equal(key.view(torch.uint8), values[0].view(torch.uint8))
    with pytest.raises(ConfigError, match=r"float16 on cpu, but the layout .*float8_e4m3fn"):
        layer_views(values.half(), layout, layer=0)


@pytest.mark.parametrize("block_size", [0, -1, True, 16.0])
def test_d21_a_block_size_that_is_no_positive_number_is_refused(block_size):
    with pytest.raises(ConfigError, match="block_size must be a positive number"):
        Layout.packed(block_size)


def test_a_stacking_dimension_other_than_0_and_1_is_refused():
    with pytest.raises(ConfigError, match="dimension 0 or 1, got dim=2"):
        Layout.stacked(BS, dim=2)


@pytest.mark.parametrize("axes", ["", "block slot head", "block slot head dim dim", "block slot head dim page"])
def test_axes_that_name_no_layout_are_refused(axes):
    with pytest.raises(ConfigError, match="names no layout: give slot and dim once each"):
        Layout.of(axes, BS)


def test_axes_joined_so_that_their_lengths_are_unknown_are_refused():
    with pytest.raises(ConfigError, match="joins two axes whose lengths nothing states"):
        Layout.of("block slot head*dim kv", BS)


@pytest.mark.parametrize("wrong", [{"dtype": "float31"}, {"rope": "thirds"}, {"scales": "row"}])
def test_an_unknown_statement_is_refused_with_the_known_ones(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} of a layout must be one of .*, got '{value}'"):
        Layout.packed(BS).stating(**wrong)


@pytest.mark.parametrize(
    ("layout", "cache"),
    [
        (Layout.split_pair(BS), _zeros(2, 6, BS, 3, 8)),
        (Layout.split_pair(BS), (_zeros(6, BS, 3, 8), None)),
        (Layout.split_pair(BS), (_zeros(6, BS, 3, 8),)),
        (Layout.stacked(BS, dim=0), _zeros(6, 2, BS, 3, 8)),
        (Layout.stacked(BS, dim=1), _zeros(6, 3, BS, 16)),
        (Layout.packed(BS), _zeros(6, 3, BS, 15)),
        (Layout.packed(BS), None),
        (Layout.transformers(), _zeros(6, 3, 4, 8)),
        (Layout.latent(BS), _zeros(6, BS + 1, 8)),
        (Layout.vllm_cpu(BS), _zeros(6, BS, 3, 16).transpose(1, 2)),
    ],
)
def test_a_cache_of_another_layout_is_refused_with_what_was_expected(layout, cache):
    with pytest.raises(ConfigError, match=r"layer 7 has the KV cache .* needs .*, each \[|one tensor \["):
        layer_views(cache, layout, layer=7)


@pytest.mark.parametrize(
    "pair",
    [
        (_zeros(6, BS, 3, 8), _zeros(5, BS, 3, 8)),
        (_zeros(6, BS, 3, 8), _zeros(6, BS, 2, 8)),
        (_zeros(6, BS, 3, 8), _zeros(6, BS, 3, 8).half()),
    ],
)
def test_key_and_value_that_differ_are_refused(pair):
    with pytest.raises(ConfigError, match=r"layer 0 .* the same blocks, heads, dtype and device"):
        layer_views(pair, Layout.split_pair(BS), layer=0)


def test_key_and_value_of_a_pair_may_differ_in_head_dim():
    key, value = layer_views((_zeros(6, BS, 3, 8), _zeros(6, BS, 3, 5)), Layout.split_pair(BS), layer=0)
    assert (key.shape[3], value.shape[3]) == (8, 5)


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        pytest.param(_zeros(2, 2, BS, 3, 8), r"stacked\(dim=0\).* or .*stacked\(dim=1\)", id="two-blocks"),
        pytest.param(_zeros(2, 6, BS, BS, 8), "as many heads as tokens a block", id="heads-equal-block-size"),
        pytest.param(_zeros(6, BS, BS, 16), "as many heads as tokens a block", id="packed-heads-equal-block-size"),
        pytest.param((_zeros(6, BS, BS, 8),) * 2, "as many heads as tokens a block", id="pair-heads-equal-block-size"),
    ],
)
def test_a_shape_with_two_readings_is_not_guessed_and_the_remedy_is_named(cache, why):
    with pytest.raises(ConfigError, match=rf"ambiguous.*{why}.*Layout\.split_pair"):
        infer_layout(cache, BS)


def test_two_heads_or_two_blocks_are_no_ambiguity_where_dimensions_differ():
    assert infer_layout(_zeros(6, 2, BS, 16), BS) == Layout.packed(BS)
    assert infer_layout(_zeros(2, 3, BS, 16), BS) == Layout.packed(BS)
    assert infer_layout(_zeros(2, 6, BS, 2, 8), BS) == Layout.stacked(BS, dim=0)


@pytest.mark.parametrize("cache", [_zeros(2, 6, 5, 3, 8), _zeros(6, 3), None, (_zeros(6, 5, 3, 8),) * 2])
def test_a_shape_that_fits_nothing_is_refused_with_the_known_layouts(cache):
    with pytest.raises(ConfigError, match=r"fits no known layout with blocks of 4 tokens.*2 \* head_dim"):
        infer_layout(cache, BS)


def test_the_published_rule_reads_a_packed_tensor_of_two_heads_as_packed():
    packed = torch.randn(6, 2, BS, 16)
    key, value = normalize_layer_kv(packed, block_size=BS)
    assert torch.equal(key, packed[..., :8].transpose(1, 2))
    assert torch.equal(value, packed[..., 8:].transpose(1, 2))


@pytest.mark.parametrize("block_size", [None, BS])
def test_the_published_rule_prefers_the_first_dimension_of_two(block_size):
    both = torch.randn(2, 2, BS, 3, 8)
    key, value = normalize_layer_kv(both, block_size=block_size)
    assert torch.equal(key, both[0])
    assert torch.equal(value, both[1])
    second = torch.randn(6, 2, BS, 3, 8)
    key, value = normalize_layer_kv(second, block_size=block_size)
    assert torch.equal(key, second[:, 0])
    assert torch.equal(value, second[:, 1])


def test_the_published_rule_takes_a_pair_as_it_is():
    pair = (torch.randn(6, BS, 3, 8), torch.randn(5, BS, 3, 8))
    assert normalize_layer_kv(pair, req_id="r", layer_idx=3) == pair


@pytest.mark.parametrize(
    "layer_kv",
    [_zeros(3, 4, 5), _zeros(2, 4)[0], (_zeros(2, 2),), (_zeros(2, 2), None), (_zeros(2), _zeros(2)), "kv", None],
)
def test_the_published_rule_gives_none_for_what_has_no_known_form(layer_kv):
    assert normalize_layer_kv(layer_kv, block_size=BS) is None


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("split_pair", Layout.split_pair(BS)),
        ("stacked_0", Layout.stacked(BS, dim=0)),
        ("stacked_1", Layout.stacked(BS, dim=1)),
        ("packed", Layout.packed(BS)),
        ("vllm_cpu", Layout.vllm_cpu(BS)),
        ("latent", Layout.latent(BS)),
        ("block head kv slot dim", Layout.of("block head kv slot dim", BS)),
    ],
)
def test_a_setting_names_a_layout(name, layout):
    assert Layout.named(name, BS) == layout


@pytest.mark.parametrize("name", ["", "stacked", "stacked_2", "of", "named", "transformers"])
def test_a_setting_that_names_no_layout_is_refused_with_the_names(name):
    with pytest.raises(ConfigError, match=f"no layout is named '{name}'; there are split_pair, stacked_0, stacked_1"):
        Layout.named(name, BS)


@pytest.mark.parametrize("wrong", [None, 5, ["block", "slot"]])
def test_axes_and_names_that_are_no_text_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be text"):
        Layout.of(wrong, BS)
    with pytest.raises(ConfigError, match="named by text"):
        Layout.named(wrong, BS)


@pytest.mark.parametrize("block_size", [None, 0, -4, "4", 4.0, True])
def test_d21_no_layout_is_inferred_for_a_block_size_that_is_none(block_size):
    with pytest.raises(ConfigError, match="block_size must be a positive number"):
        infer_layout(_zeros(6, 3, BS, 16), block_size)


def test_a_sparse_cache_fits_no_layout():
    with pytest.raises(ConfigError, match="fits no known layout"):
        infer_layout(_zeros(6, 3, BS, 16).to_sparse(), BS)
    with pytest.raises(ConfigError, match="layer 2 has the KV cache"):
        layer_views(_zeros(6, 3, BS, 16).to_sparse(), Layout.packed(BS), layer=2)


ODD_VIEWS = {
    "at an offset": lambda whole: torch.cat([torch.zeros(7), whole.flatten()])[7:].view(whole.shape),
    "of every other element": lambda whole: torch.stack([whole, whole + 1], -1)[..., 0],
    "with its dimensions stored backwards": lambda whole: whole.mT.contiguous().mT,
    "that is trained": lambda whole: whole.clone().requires_grad_(),
}


@pytest.mark.parametrize("odd", ODD_VIEWS.values(), ids=ODD_VIEWS)
@pytest.mark.parametrize("name", INFERRED)
def test_a_cache_may_be_any_view(name, odd):
    layout = PAGED[name](BS)
    cache = make_cache(layout, 6, BS, 3, 8, lambda *shape: torch.randn(*shape))
    parts = tuple(map(odd, cache)) if isinstance(cache, tuple) else odd(cache)
    for mine, theirs in zip(layer_views(parts, layout, layer=0), layer_views(cache, layout, layer=0), strict=True):
        assert torch.equal(mine, theirs)
        assert not mine.requires_grad
