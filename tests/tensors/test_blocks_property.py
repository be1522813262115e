"""For any layout, ids and heads, the gather equals a plain loop over tokens, and writing back restores the blocks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import PAGED, WHOLE, bits, element_of, make_cache, random_bits

from omnikv.tensors.blocks import PagedKV, scatter_into_blocks

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8)


@st.composite
def _cases(draw):
    slots, heads, dim = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    name = draw(st.sampled_from([*PAGED, *WHOLE]))
    layout = PAGED[name](slots) if name in PAGED else WHOLE[name]()
    blocks = 1 if name == "tokens" else draw(st.integers(1, 7))
    # A request that is not in blocks has one.
    most = blocks if layout.block_size else 1
    ids = draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=most, unique=True))
    tokens = draw(st.integers(1, len(ids) * slots))
    positions = draw(st.none() | st.lists(st.integers(0, heads - 1), min_size=1, max_size=heads, unique=True))
    make = random_bits(draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20)))
    caches = [make_cache(layout, blocks, slots, heads, dim, make) for _ in range(draw(st.integers(1, 3)))]
    return layout, caches, ids, tokens, slots, heads, None if positions is None else tuple(positions)


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
    layout, caches, ids, tokens, slots, heads, positions = case
    gathered = _gather(PagedKV(caches, ids, tokens, layout), positions)
    for cache, pair in zip(caches, gathered, strict=True):
        for which, tensor in enumerate(pair):
            rows = [
                element_of(layout, cache, which, ids[token // slots], token % slots, head)
                for token in range(tokens)
                for head in (range(heads) if positions is None else positions)
            ]
            assert torch.equal(bits(tensor), bits(torch.stack(rows).view(tensor.shape)))


@given(case=_cases(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_was_gathered_and_written_back_elsewhere_is_gathered_again(case, data):
    layout, caches, ids, tokens, *_ = case
    layers = _gather(PagedKV(caches, ids, tokens, layout))
    there = [torch.zeros_like(c) if torch.is_tensor(c) else tuple(map(torch.zeros_like, c)) for c in caches]
    other_ids = data.draw(st.permutations(ids))
    scatter_into_blocks(layers, there, other_ids, layout)
    for before, after in zip(layers, _gather(PagedKV(there, other_ids, tokens, layout)), strict=True):
        assert all(torch.equal(bits(one), bits(two)) for one, two in zip(before, after, strict=True))
