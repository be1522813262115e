"""Blocks on a GPU: gathered into host memory or into the GPU's own, and written back from the host."""

import contextlib

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.tensors.blocks import PagedKV, scatter_into_blocks
from omnikv.tensors.fill import fill
from omnikv.transports.shm_pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

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


def test_a_gpus_blocks_go_straight_into_a_pinned_pool():
    torch.zeros(1, device="cuda")
    cache = torch.randn(64, 3, 4, 16, device="cuda").bfloat16()
    ids = list(range(0, 64, 2))
    sources = [half for layer in PagedKV([cache], ids, 125, LAYOUT).layer_sources() for half in layer]
    with contextlib.closing(Pool(None, 1 << 20)) as pool:
        data = torch.frombuffer(pool.take(1 << 20).view, dtype=torch.uint8)
        assert data.is_pinned()
        outs = [data[at * 65536 :][: 125 * 3 * 8 * 2].view(torch.bfloat16).view(125, 3, 8) for at in range(2)]
        # What the engine queued on its own stream is waited for.
        cache.mul_(2)
        fill(list(zip(sources, outs, strict=True)))
        (there,) = PagedKV([cache.cpu()], ids, 125, LAYOUT).layer_sources()
        for source, out in zip(there, outs, strict=True):
            expected = torch.empty(source.shape, dtype=source.dtype)
            source.write_into(expected)
            assert torch.equal(out, expected)
        del data, outs, out
