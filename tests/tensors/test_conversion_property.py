"""Any layout into any other, whatever the block sizes and dtypes: exact where it can be, and nothing beside it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import PAGED, WHOLE, bits, cache_shape, element_of, make_cache, random_bits

from omnikv.core.layout import Layout
from omnikv.tensors.blocks import PagedKV, scatter_into_blocks
from omnikv.tensors.convert import cast_layer

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
GUARD = 64


class Guarded:
    """A layer's cache in a larger allocation of one poison; whatever is not in the request stays poison."""

    def __init__(self, layout, blocks, slots, heads, dim, dtype):
        self.layout, self.slots, self._allocations = layout, slots, []
        self.is_pair, _ = cache_shape(layout, blocks, slots, heads, dim)

        def make(shape):
            count = torch.Size(shape).numel()
            allocation = torch.full(((count + 2 * GUARD) * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)
            self._allocations.append(allocation)
            return allocation[GUARD : GUARD + count].view(shape)

        self.cache = make_cache(layout, blocks, slots, heads, dim, make)

    def put(self, layer, ids):
        """Write `layer` by hand, one head of one token at a time."""
        for which, tensor in enumerate(layer):
            for token in range(tensor.shape[0]):
                for head in range(tensor.shape[1]):
                    block, slot = ids[token // self.slots], token % self.slots
                    element_of(self.layout, self.cache, which, block, slot, head).copy_(tensor[token, head])

    def memory(self):
        """All bytes, margins included."""
        return torch.cat([bits(allocation) for allocation in self._allocations])


@st.composite
def _sides(draw, tokens):
    """A layout with room for so many tokens: its blocks, and the request's ids among them."""
    name = draw(st.sampled_from([*PAGED, *WHOLE]))
    slots = draw(st.integers(1, 9)) if name in PAGED else tokens + draw(st.integers(0, 3))
    needed = -(-tokens // slots)
    blocks = 1 if name == "tokens" else needed + draw(st.integers(0, 2))
    ids = draw(st.permutations(range(blocks)))[:needed]
    return (PAGED[name](slots) if name in PAGED else WHOLE[name]()), blocks, slots, ids


@st.composite
def _pairs(draw):
    tokens, heads, dim = draw(st.integers(1, 30)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**20))
    return draw(_sides(tokens)), draw(_sides(tokens)), (tokens, heads, dim), seed


def _read(paged, dtype=None):
    layers = []
    for layer in paged.layer_sources():
        sources = layer if dtype is None else cast_layer(layer, dtype)
        outs = tuple(torch.empty(source.shape, dtype=source.dtype) for source in sources)
        for source, out in zip(sources, outs, strict=True):
            source.write_into(out)
        layers.append(outs)
    return layers


@given(case=_pairs(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=150, deadline=None)
def test_d30_any_layout_becomes_any_other_and_comes_back_with_nothing_read_or_written_beside_it(case, dtype):
    (layout, blocks, slots, ids), (other, other_blocks, other_slots, other_ids), (tokens, heads, dim), seed = case
    make = random_bits(dtype, seed)
    layer = (make((tokens, heads, dim)), make((tokens, heads, dim)))
    source, target, expected, back = (
        Guarded(one, count, size, heads, dim, dtype)
        for one, count, size in [
            (layout, blocks, slots),
            *[(other, other_blocks, other_slots)] * 2,
            (layout, blocks, slots),
        ]
    )
    source.put(layer, ids)
    expected.put(layer, other_ids)

    moved = _read(PagedKV([source.cache], ids, tokens, layout))
    scatter_into_blocks(moved, [target.cache], other_ids, other)
    assert torch.equal(target.memory(), expected.memory())
    moved_back = _read(PagedKV([target.cache], other_ids, tokens, other))
    scatter_into_blocks(moved_back, [back.cache], ids, layout)
    assert torch.equal(back.memory(), source.memory())


@given(case=_pairs(), kept=st.sampled_from(FLOATS), sent=st.sampled_from(FLOATS), wanted=st.sampled_from(FLOATS))
@settings(max_examples=100, deadline=None)
def test_floats_are_narrowed_where_they_are_read_and_widened_where_they_are_written(case, kept, sent, wanted):
    (layout, blocks, slots, ids), (other, other_blocks, other_slots, other_ids), (tokens, heads, dim), seed = case
    layer = tuple(torch.randn(2, tokens, heads, dim, generator=torch.manual_seed(seed)).to(kept))
    there = (other, other_blocks, other_slots)
    source = Guarded(layout, blocks, slots, heads, dim, kept)
    target, expected = Guarded(*there, heads, dim, wanted), Guarded(*there, heads, dim, wanted)
    source.put(layer, ids)
    expected.put([tensor.to(sent).to(wanted) for tensor in layer], other_ids)

    moved = _read(PagedKV([source.cache], ids, tokens, layout), sent)
    assert all(tensor.dtype == sent for pair in moved for tensor in pair)
    scatter_into_blocks(moved, [target.cache], other_ids, other.stating(dtype=wanted))
    assert torch.equal(target.memory(), expected.memory())


def test_the_margins_of_a_guarded_cache_would_show_a_write_beside_it():
    guarded = Guarded(Layout.packed(4), 2, 4, 1, 2, torch.float32)
    before = guarded.memory()
    guarded.cache.as_strided((1,), (1,), guarded.cache.storage_offset() - 1).fill_(0)
    assert not torch.equal(before, guarded.memory())
