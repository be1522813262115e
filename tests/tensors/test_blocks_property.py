"""For any layout, ids and heads, the gather equals a plain loop over tokens, and writing back restores the blocks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnikv.tensors.blocks import BlockLayout, PagedKV, scatter_into_blocks

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8)


def _make_cache(layout, blocks, heads, head_dim, dtype, seed):
    """A cache of random bits in this layout, and nothing else: NaNs and odd values must survive too."""
    if layout.arrangement == "packed":
        shape = (blocks, heads, layout.block_size, 2 * head_dim)
    elif layout.arrangement == "stacked" and layout.pair_dim == 1:
        shape = (blocks, 2, layout.block_size, heads, head_dim)
    else:
        shape = (2, blocks, layout.block_size, heads, head_dim)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(seed))
    cache = bits.view(dtype).squeeze(-1)
    return (cache[0].clone(), cache[1].clone()) if layout.arrangement == "split_pair" else cache


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def _token(layout, cache, which, block, offset, head):
    """One head of one token, straight from the definition of each layout."""
    if layout.arrangement == "split_pair":
        return cache[which][block, offset, head]
    if layout.arrangement == "packed":
        head_dim = cache.shape[-1] // 2
        return cache[block, head, offset, which * head_dim : (which + 1) * head_dim]
    return cache[which, block, offset, head] if layout.pair_dim == 0 else cache[block, which, offset, head]


@st.composite
def _cases(draw):
    block_size = draw(st.integers(1, 5))
    layout = draw(
        st.sampled_from(
            [
                BlockLayout.split_pair(block_size),
                BlockLayout.stacked(block_size, dim=0),
                BlockLayout.stacked(block_size, dim=1),
                BlockLayout.packed(block_size),
            ]
        )
    )
    blocks, heads = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    ids = draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=blocks, unique=True))
    tokens = draw(st.integers(1, len(ids) * block_size))
    positions = draw(st.none() | st.lists(st.integers(0, heads - 1), min_size=1, max_size=heads, unique=True))
    seed, head_dim, layers = draw(st.integers(0, 2**20)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    caches = [_make_cache(layout, blocks, heads, head_dim, dtype, seed + layer) for layer in range(layers)]
    return layout, caches, ids, tokens, heads, None if positions is None else tuple(positions)


def _gather(paged, positions=None):
    gathered = []
    for layer in paged.layer_sources(positions):
        outs = tuple(torch.zeros(source.shape, dtype=source.dtype) for source in layer)
        for source, out in zip(layer, outs, strict=True):
            source.write_into(out)
        gathered.append(outs)
    return gathered


@given(case=_cases())
@settings(max_examples=150, deadline=None)
def test_a_gather_equals_a_loop_over_the_tokens(case):
    layout, caches, ids, tokens, heads, positions = case
    gathered = _gather(PagedKV(caches, ids, tokens, layout), positions)
    for cache, pair in zip(caches, gathered, strict=True):
        for which, tensor in enumerate(pair):
            rows = [
                _token(layout, cache, which, ids[token // layout.block_size], token % layout.block_size, head)
                for token in range(tokens)
                for head in (range(heads) if positions is None else positions)
            ]
            assert torch.equal(_bits(tensor), _bits(torch.stack(rows).view(tensor.shape)))


@given(case=_cases(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_was_gathered_and_written_back_elsewhere_is_gathered_again(case, data):
    layout, caches, ids, tokens, *_ = case
    layers = _gather(PagedKV(caches, ids, tokens, layout))
    there = [torch.zeros_like(c) if torch.is_tensor(c) else tuple(map(torch.zeros_like, c)) for c in caches]
    other_ids = data.draw(st.permutations(ids))
    scatter_into_blocks(layers, there, other_ids, layout)
    for before, after in zip(layers, _gather(PagedKV(there, other_ids, tokens, layout)), strict=True):
        assert all(torch.equal(_bits(one), _bits(two)) for one, two in zip(before, after, strict=True))
