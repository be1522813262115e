"""Writes `vllm_cpu.json` beside it: keys and values that transformers computes, and the blocks that vLLM keeps them in.

A tiny seeded Llama runs a prompt through transformers, whose cache gives each token's key and value. They are written
into blocks one element at a time, from what the vector kernels of vLLM 0.30.0 for a CPU do and not by omnikv's code: a
block of one head is `block_size * 2 * head_dim` elements, first all keys as `[head_dim, block_size]`, then all values
as `[block_size, head_dim]`. What no token fills is -1. Run it after a change:

    python tests/corpus/layouts/make_vllm_cpu.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 4, 4, 2, 4
BLOCK_IDS = [2, 0]
PROMPT = [3, 14, 15, 9, 2, 6]


def main() -> None:
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        initializer_range=0.5,
    )
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        LlamaForCausalLM(config).eval()(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True)
    layers = [{"key": by_token(layer.keys), "value": by_token(layer.values)} for layer in cache.layers]
    table = {
        "block_size": BLOCK_SIZE,
        "block_ids": BLOCK_IDS,
        "shape": [NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_DIM],
        "layers": [{**layer, "blocks": packed(layer["key"], layer["value"])} for layer in layers],
    }
    (HERE / "vllm_cpu.json").write_text(json.dumps(table) + "\n", encoding="utf-8")


def by_token(cached: torch.Tensor) -> list[list[list[float]]]:
    """`[1, heads, tokens, head_dim]` as `[tokens][heads][head_dim]`, in as few digits as float32 needs."""
    _, heads, tokens, dim = cached.shape
    return [
        [[float(f"{cached[0, head, token, at]:.9g}") for at in range(dim)] for head in range(heads)]
        for token in range(tokens)
    ]


def packed(keys: list[list[list[float]]], values: list[list[list[float]]]) -> list[float]:
    """The blocks, flat."""
    half = BLOCK_SIZE * HEAD_DIM
    flat = [-1.0] * (NUM_BLOCKS * HEADS * 2 * half)
    for token, (key, value) in enumerate(zip(keys, values, strict=True)):
        block, slot = BLOCK_IDS[token // BLOCK_SIZE], token % BLOCK_SIZE
        for head in range(HEADS):
            start = (block * HEADS + head) * 2 * half
            for at in range(HEAD_DIM):
                flat[start + at * BLOCK_SIZE + slot] = key[head][at]
                flat[start + half + slot * HEAD_DIM + at] = value[head][at]
    return flat


if __name__ == "__main__":
    main()
