"""Caches in every layout, and what each layout means, written out by hand: nothing here reads a layout's axes."""

import torch

from omnikv.core.layout import Layout

PAGED = {
    "split_pair": Layout.split_pair,
    "split_pair, heads first": lambda size: Layout.split_pair(size, heads_first=True),
    "stacked(dim=0)": lambda size: Layout.stacked(size, dim=0),
    "stacked(dim=1)": lambda size: Layout.stacked(size, dim=1),
    "stacked(dim=0), heads first": lambda size: Layout.stacked(size, dim=0, heads_first=True),
    "stacked(dim=1), heads first": lambda size: Layout.stacked(size, dim=1, heads_first=True),
    "packed": Layout.packed,
    "vllm_cpu": Layout.vllm_cpu,
}
WHOLE = {"transformers": Layout.transformers, "tokens": Layout.tokens}


def cache_shape(layout, blocks, slots, heads, dim):
    """The shape of one tensor of the layout, and whether there are two of them."""
    shapes = {
        "split_pair": (True, (blocks, slots, heads, dim)),
        "split_pair, heads first": (True, (blocks, heads, slots, dim)),
        "stacked(dim=0)": (False, (2, blocks, slots, heads, dim)),
        "stacked(dim=1)": (False, (blocks, 2, slots, heads, dim)),
        "stacked(dim=0), heads first": (False, (2, blocks, heads, slots, dim)),
        "stacked(dim=1), heads first": (False, (blocks, 2, heads, slots, dim)),
        "packed": (False, (blocks, heads, slots, 2 * dim)),
        "vllm_cpu": (False, (blocks, heads, slots, 2 * dim)),
        "transformers": (True, (blocks, heads, slots, dim)),
        "tokens": (True, (slots, heads, dim)),
    }
    return shapes[layout.name]


def make_cache(layout, blocks, slots, heads, dim, make):
    """A layer's cache; `make(shape)` gives each of its tensors."""
    is_pair, shape = cache_shape(layout, blocks, slots, heads, dim)
    return (make(shape), make(shape)) if is_pair else make(shape)


def random_bits(dtype, seed):
    """A `make` of random bits: NaNs and odd values must survive too."""
    generator = torch.Generator().manual_seed(seed)

    def make(shape):
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return bits.view(dtype).squeeze(-1)

    return make


def element_of(layout, cache, which, block, slot, head):
    """One head of one token, `[head_dim]`, straight from the definition of each layout: a view."""
    tensor = cache[which] if isinstance(cache, tuple) else cache
    slots, dim = tensor.shape[-2], tensor.shape[-1] // 2
    if layout.name == "vllm_cpu":
        flat = tensor[block, head].reshape(-1)
        half = slots * dim
        return flat[slot:half:slots] if which == 0 else flat[half + slot * dim : half + (slot + 1) * dim]
    return {
        "split_pair": lambda: tensor[block, slot, head],
        "split_pair, heads first": lambda: tensor[block, head, slot],
        "stacked(dim=0)": lambda: tensor[which, block, slot, head],
        "stacked(dim=1)": lambda: tensor[block, which, slot, head],
        "stacked(dim=0), heads first": lambda: tensor[which, block, head, slot],
        "stacked(dim=1), heads first": lambda: tensor[block, which, head, slot],
        "packed": lambda: tensor[block, head, slot, which * dim : (which + 1) * dim],
        "transformers": lambda: tensor[block, head, slot],
        "tokens": lambda: tensor[slot, head],
    }[layout.name]()


def bits(tensor):
    """The tensor's bytes, for comparing NaNs too."""
    return tensor.contiguous().view(torch.uint8)
