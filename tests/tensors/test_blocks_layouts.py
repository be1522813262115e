"""Layouts: declared, checked against the tensors, and inferred only where a shape has one reading."""

import pytest
import torch

from omnikv.errors import ConfigError
from omnikv.tensors.blocks import BlockLayout, infer_block_layout, normalize_layer_kv

BS = 4


def _zeros(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("layout", "cache"),
    [
        (BlockLayout.split_pair(BS), (_zeros(6, BS, 3, 8), _zeros(6, BS, 3, 8))),
        (BlockLayout.stacked(BS, dim=0), _zeros(2, 6, BS, 3, 8)),
        (BlockLayout.stacked(BS, dim=1), _zeros(6, 2, BS, 3, 8)),
        (BlockLayout.packed(BS), _zeros(6, 3, BS, 16)),
    ],
)
def test_every_layout_gives_views_of_the_same_shape_over_the_engines_memory(layout, cache):
    key, value = layout.views(cache, layer=0)
    assert key.shape == value.shape == (6, BS, 3, 8)
    key[5, 1, 2, 7], value[5, 1, 2, 7] = 1.0, 2.0
    assert sum(float(part.sum()) for part in (cache if isinstance(cache, tuple) else (cache,))) == 3.0
    assert infer_block_layout(cache, BS) == layout


def test_layouts_describe_themselves_differently():
    layouts = [
        BlockLayout.split_pair(16),
        BlockLayout.split_pair(32),
        BlockLayout.stacked(16, dim=0),
        BlockLayout.stacked(16, dim=1),
        BlockLayout.packed(16),
    ]
    assert len({layout.describe() for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("block_size", [0, -1, True, 16.0, None])
def test_a_block_size_that_is_no_positive_number_is_refused(block_size):
    with pytest.raises(ConfigError, match="block_size must be a positive number"):
        BlockLayout.packed(block_size)


def test_a_stacking_dimension_other_than_0_and_1_is_refused():
    with pytest.raises(ConfigError, match="dimension 0 or 1, got dim=2"):
        BlockLayout.stacked(BS, dim=2)


@pytest.mark.parametrize(
    ("layout", "cache"),
    [
        (BlockLayout.split_pair(BS), _zeros(2, 6, BS, 3, 8)),
        (BlockLayout.split_pair(BS), (_zeros(6, BS, 3, 8), None)),
        (BlockLayout.split_pair(BS), (_zeros(6, BS, 3, 8),)),
        (BlockLayout.stacked(BS, dim=0), _zeros(6, 2, BS, 3, 8)),
        (BlockLayout.stacked(BS, dim=1), _zeros(6, 3, BS, 16)),
        (BlockLayout.packed(BS), _zeros(6, 3, BS, 15)),
        (BlockLayout.packed(BS), None),
    ],
)
def test_a_cache_of_another_layout_is_refused_with_what_was_expected(layout, cache):
    with pytest.raises(ConfigError, match=r"layer 7 has the KV cache .* needs .*, each \[|one tensor \["):
        layout.views(cache, layer=7)


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
        BlockLayout.split_pair(BS).views(pair, layer=0)


def test_key_and_value_of_a_pair_may_differ_in_head_dim():
    key, value = BlockLayout.split_pair(BS).views((_zeros(6, BS, 3, 8), _zeros(6, BS, 3, 5)), layer=0)
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
    with pytest.raises(ConfigError, match=rf"ambiguous.*{why}.*BlockLayout\.split_pair"):
        infer_block_layout(cache, BS)


def test_two_heads_or_two_blocks_are_no_ambiguity_where_dimensions_differ():
    assert infer_block_layout(_zeros(6, 2, BS, 16), BS) == BlockLayout.packed(BS)
    assert infer_block_layout(_zeros(2, 3, BS, 16), BS) == BlockLayout.packed(BS)
    assert infer_block_layout(_zeros(2, 6, BS, 2, 8), BS) == BlockLayout.stacked(BS, dim=0)


@pytest.mark.parametrize("cache", [_zeros(2, 6, 5, 3, 8), _zeros(6, 3), None, (_zeros(6, 5, 3, 8),) * 2])
def test_a_shape_that_fits_nothing_is_refused_with_the_known_layouts(cache):
    with pytest.raises(ConfigError, match=r"fits no known layout with blocks of 4 tokens.*2 \* head_dim"):
        infer_block_layout(cache, BS)


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
