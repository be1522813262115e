"""Blocks on a GPU: gathered into host memory or into the GPU's own, and written back from the host."""

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.tensors.blocks import PagedKV, scatter_into_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYOUT = Layout.packed(4)
IDS, TOKENS = [5, 0, 3], 10


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("heads", [None, (2, 0)])
def test_blocks_on_a_gpu_are_gathered_as_those_on_the_host_are(device, heads):
    cache = torch.randn(6, 3, 4, 16).bfloat16()
    (there,) = PagedKV([cache.cuda()], IDS, TOKENS, LAYOUT).layer_sources(heads)
    (here,) = PagedKV([cache], IDS, TOKENS, LAYOUT).layer_sources(heads)
    for one, two in zip(there, here, strict=True):
        gathered = torch.empty(one.shape, dtype=one.dtype, device=device)
        expected = torch.empty(two.shape, dtype=two.dtype)
        one.write_into(gathered)
        two.write_into(expected)
        assert torch.equal(gathered.cpu(), expected)


def test_layers_on_the_host_are_written_into_blocks_on_a_gpu():
    layers = [(torch.randn(TOKENS, 3, 8), torch.randn(TOKENS, 3, 8))]
    here, there = torch.zeros(6, 3, 4, 16), torch.zeros(6, 3, 4, 16, device="cuda")
    scatter_into_blocks(layers, [here], IDS, LAYOUT)
    scatter_into_blocks(layers, [there], IDS, LAYOUT)
    assert torch.equal(there.cpu(), here)
