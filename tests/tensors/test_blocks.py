"""Paged blocks: what PagedKV refuses, what it gathers, and what is written back."""

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.errors import ConfigError
from omnikv.tensors.blocks import PagedKV, scatter_into_blocks

BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 6, 4, 3, 8
STACKED = Layout.stacked(BLOCK_SIZE, dim=0)


def _cache(seed=0, *, blocks=BLOCKS, heads=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, blocks, BLOCK_SIZE, heads, HEAD_DIM, generator=generator).to(dtype)


def _written(source):
    out = torch.empty(source.shape, dtype=source.dtype)
    source.write_into(out)
    return out


def test_tokens_come_in_the_order_of_the_block_ids_and_end_at_num_tokens():
    cache = _cache()
    paged = PagedKV([cache], [5, 0, 3], 10, STACKED)
    (layer,) = paged.layer_sources()
    assert layer.key.shape == (10, HEADS, HEAD_DIM)
    assert torch.equal(_written(layer.key), torch.cat([cache[0, 5], cache[0, 0], cache[0, 3, :2]]))
    assert torch.equal(_written(layer.value), torch.cat([cache[1, 5], cache[1, 0], cache[1, 3, :2]]))


def test_sources_of_some_heads_hold_them_in_the_order_asked_for():
    cache = _cache()
    (layer,) = PagedKV([cache], [1, 2], 8, STACKED).layer_sources((2, 0))
    assert torch.equal(_written(layer.key), torch.cat([cache[0, 1], cache[0, 2]])[:, [2, 0]])


def test_a_source_reads_the_blocks_when_it_is_written_and_not_before():
    cache = _cache()
    (layer,) = PagedKV([cache], [1], 4, STACKED).layer_sources()
    cache.zero_()
    assert not _written(layer.key).any()


def test_fewer_tokens_than_one_block_are_gathered():
    cache = _cache()
    (layer,) = PagedKV([cache], [4], 1, STACKED).layer_sources()
    assert torch.equal(_written(layer.value), cache[1, 4, :1])


def test_surplus_blocks_reserved_ahead_are_not_sent():
    cache = _cache()
    (layer,) = PagedKV([cache], [4, 1, 0], 4, STACKED).layer_sources()
    assert torch.equal(_written(layer.key), cache[0, 4])


def test_caches_that_require_gradients_are_gathered_without_them():
    (layer,) = PagedKV([_cache().requires_grad_()], [1, 2], 7, STACKED).layer_sources()
    assert not _written(layer.key).requires_grad


def test_layers_may_differ_in_dtype_and_pool_but_not_in_heads():
    paged = PagedKV([_cache(), _cache(blocks=9, dtype=torch.bfloat16)], [5], 4, STACKED)
    assert (paged.num_layers, paged.num_heads) == (2, HEADS)
    with pytest.raises(ConfigError, match=r"layer 1 has 2 KV heads and layer 0 has 3"):
        PagedKV([_cache(), _cache(heads=2)], [5], 4, STACKED)


@pytest.mark.parametrize("ids", [[0, 99, 1], [-1, 0, 1]])
def test_x11_a_block_id_outside_the_pool_is_an_error_that_names_it(ids):
    (bad,) = {99, -1} & set(ids)
    with pytest.raises(ConfigError, match=rf"block ids \[{bad}\] are outside the 6 blocks of layer 0"):
        PagedKV([_cache()], ids, 6, STACKED)


def test_x11_an_id_that_only_a_later_layer_lacks_is_found_before_anything_is_sent():
    with pytest.raises(ConfigError, match=r"outside the 3 blocks of layer 1"):
        PagedKV([_cache(), _cache(blocks=3)], [5], 4, STACKED)


def test_x11_a_surplus_id_outside_the_pool_is_an_error_too():
    with pytest.raises(ConfigError, match=r"block ids \[99\]"):
        PagedKV([_cache()], [0, 99], 4, STACKED)


def test_more_tokens_than_the_blocks_hold_are_an_error_with_both_numbers():
    with pytest.raises(ConfigError, match=r"9 tokens do not fit 2 blocks of 4 tokens \(8\)"):
        PagedKV([_cache()], [0, 1], 9, STACKED)


@pytest.mark.parametrize("num_tokens", [0, -4, True, 1.5, None])
def test_num_tokens_must_be_a_positive_whole_number(num_tokens):
    with pytest.raises(ConfigError, match=r"num_tokens must be a positive number"):
        PagedKV([_cache()], [0], num_tokens, STACKED)


def test_a_block_given_twice_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"block ids \[2\] come more than once"):
        PagedKV([_cache()], [2, 1, 2], 12, STACKED)


@pytest.mark.parametrize("layout", [None, "packed"])
def test_a_layout_that_is_none_is_an_error(layout):
    with pytest.raises(ConfigError, match=f"layout must be a Layout, .*, got {layout!r}"):
        PagedKV([_cache()], [0], 1, layout)


def test_caches_that_are_none_are_an_error():
    with pytest.raises(ConfigError, match="kv_caches must be the KV cache of every layer, in order, got None"):
        PagedKV(None, [0], 1, STACKED)


def test_a_paged_request_shows_itself_without_the_cache():
    assert repr(PagedKV([_cache()], [0], 1, STACKED)).startswith("PagedKV(block_ids=[0], num_tokens=1, layout=")


@pytest.mark.parametrize("block_ids", [None, 5])
def test_block_ids_that_are_no_list_are_an_error(block_ids):
    with pytest.raises(ConfigError, match=f"block ids must be whole numbers, got {block_ids}"):
        PagedKV([_cache()], block_ids, 1, STACKED)


def test_block_ids_that_are_no_whole_numbers_are_an_error():
    with pytest.raises(ConfigError, match=r"block ids must be whole numbers, got \[0, 1.5\]"):
        PagedKV([_cache()], [0, 1.5], 4, STACKED)


def test_no_blocks_and_no_layers_are_errors():
    with pytest.raises(ConfigError, match=r"4 tokens do not fit 0 blocks"):
        PagedKV([_cache()], [], 4, STACKED)
    with pytest.raises(ConfigError, match=r"there are no layers"):
        PagedKV([], [0], 4, STACKED)


@pytest.mark.parametrize("positions", [(), (0, 0), (3,), (-1,)])
def test_head_positions_must_be_different_heads_of_the_caches(positions):
    with pytest.raises(ConfigError, match=r"of the 3 KV heads"):
        PagedKV([_cache()], [0], 4, STACKED).layer_sources(positions)


def test_a_wrong_shape_is_an_error_that_names_layer_shape_and_layout():
    wrong = torch.zeros(2, BLOCKS, BLOCK_SIZE + 1, HEADS, HEAD_DIM)
    with pytest.raises(ConfigError, match=r"layer 1 .*\[2, 6, 5, 3, 8\].*\[2, blocks, 4, kv_heads, head_dim\]"):
        PagedKV([_cache(), wrong], [0], 4, STACKED)


def test_written_back_blocks_hold_the_tokens_and_the_rest_is_untouched():
    cache = torch.full((2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM), 7.0)
    key, value = torch.zeros(6, HEADS, HEAD_DIM), torch.ones(6, HEADS, HEAD_DIM)
    scatter_into_blocks([(key, value)], [cache], [3, 1, 5], STACKED)
    assert not cache[0, 3].any()
    assert not cache[0, 1, :2].any()
    assert (cache[1, 3] == 1).all()
    assert (cache[0, 1, 2:] == 7).all()
    assert (cache[:, [0, 2, 4, 5]] == 7).all()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"0 layers cannot be written into the KV caches of 1 layers"),
        ([(torch.zeros(4, 2, HEAD_DIM), torch.zeros(4, HEADS, HEAD_DIM))], r"key of layer 0 is \[4, 2, 8\]"),
        ([(torch.zeros(4, HEADS, HEAD_DIM), torch.zeros(3, HEADS, HEAD_DIM))], r"value of layer 0 is \[3, 3, 8\]"),
        ([(torch.zeros(4, HEADS, HEAD_DIM).half(), torch.zeros(4, HEADS, HEAD_DIM))], r"torch.float16"),
        ([(torch.zeros(9, HEADS, HEAD_DIM), torch.zeros(9, HEADS, HEAD_DIM))], r"9 tokens do not fit 2 blocks"),
    ],
)
def test_what_does_not_fit_the_blocks_is_refused_before_anything_is_written(layers, message):
    cache = torch.full((2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM), 7.0)
    with pytest.raises(ConfigError, match=message):
        scatter_into_blocks(layers, [cache], [0, 1], STACKED)
    assert (cache == 7).all()


def test_a_request_sent_twice_reads_its_blocks_twice():
    cache = _cache()
    paged = PagedKV([cache], [1], 4, STACKED)
    first = paged.layer_sources()
    assert torch.equal(_written(first[0].key), cache[0, 1])
    cache.zero_()
    assert not _written(paged.layer_sources()[0].key).any()
