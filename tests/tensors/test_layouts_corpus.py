"""vLLM-on-CPU's packing against values that transformers computed: read exactly, and written back exactly."""

import json
from pathlib import Path

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.tensors.blocks import PagedKV, scatter_into_blocks

CORPUS = Path(__file__).parents[1] / "corpus" / "layouts" / "vllm_cpu.json"


@pytest.fixture(scope="module")
def table():
    return json.loads(CORPUS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def layers(table):
    """`[tokens, heads, head_dim]`, as transformers computed them."""
    return [(torch.tensor(layer["key"]), torch.tensor(layer["value"])) for layer in table["layers"]]


@pytest.fixture(scope="module")
def caches(table):
    return [torch.tensor(layer["blocks"]).view(table["shape"]) for layer in table["layers"]]


def test_blocks_are_read_as_what_transformers_computed(table, layers, caches):
    layout = Layout.vllm_cpu(table["block_size"])
    paged = PagedKV(caches, table["block_ids"], len(layers[0][0]), layout)
    for sources, layer in zip(paged.layer_sources(), layers, strict=True):
        for source, expected in zip(sources, layer, strict=True):
            out = torch.empty(source.shape)
            source.write_into(out)
            assert torch.equal(out, expected)


def test_what_transformers_computed_is_written_into_the_same_blocks(table, layers, caches):
    written = [torch.full_like(cache, -1) for cache in caches]
    scatter_into_blocks(layers, written, table["block_ids"], Layout.vllm_cpu(table["block_size"]))
    for one, other in zip(written, caches, strict=True):
        assert torch.equal(one, other)


def test_the_same_shape_read_as_packed_is_something_else(table, layers, caches):
    paged = PagedKV(caches, table["block_ids"], len(layers[0][0]), Layout.packed(table["block_size"]))
    (source, _), *_ = paged.layer_sources()
    out = torch.empty(source.shape)
    source.write_into(out)
    assert not torch.equal(out, layers[0][0])
