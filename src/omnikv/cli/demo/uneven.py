"""Tensor parallelism for sizes that do not divide a model's heads, where transformers' own refuses.

Each rank loads the whole model and keeps its share of it: whole query and KV heads, and a range of the feed-forward
units. What ranks compute apart, the output of attention and of the feed-forward, is summed over them. Everything else,
rotary embedding, attention and cache, is transformers' code as it stands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from omnikv.cli.demo.plan import ModelShape
from omnikv.core.partition import split_heads
from omnikv.errors import ConfigError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def keep_share(model: Any, shape: ModelShape, rank: int, tp_size: int) -> None:
    """Nothing; `model`, a whole Llama-like one, is then the share of `rank` and runs only with its peers.

    Raises:
        ConfigError: the model's layers are built in another way.
    """
    kv_heads = split_heads(shape.num_kv_heads, tp_size)[rank]
    queries = shape.query_heads(tp_size)[rank]
    units = range(rank * shape.intermediate_size // tp_size, (rank + 1) * shape.intermediate_size // tp_size)
    for layer in model.model.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        _require_parts(attention, _ATTENTION)
        _require_parts(feed_forward, _FEED_FORWARD)
        dim = int(attention.head_dim)
        for name, heads in (("q_proj", queries), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            _keep_rows(getattr(attention, name), _elements(heads, dim))
        for name in ("gate_proj", "up_proj"):
            _keep_rows(getattr(feed_forward, name), units)
        _keep_columns(attention.o_proj, _elements(queries, dim), is_first=rank == 0)
        _keep_columns(feed_forward.down_proj, units, is_first=rank == 0)
        attention.num_key_value_groups = len(queries) // len(kv_heads)


def _elements(heads: tuple[int, ...], dim: int) -> list[int]:
    return [head * dim + at for head in heads for at in range(dim)]


def _require_parts(module: Any, names: tuple[str, ...]) -> None:
    absent = [name for name in names if not hasattr(module, name)]
    if absent:
        raise ConfigError(
            f"a {type(module).__name__} of this model has no {', '.join(absent)}, so it cannot be spread over ranks "
            "that do not divide its heads; choose a number of ranks that does"
        )


def _keep_rows(linear: Any, rows: range | list[int]) -> None:
    index = torch.tensor(rows)
    linear.weight = torch.nn.Parameter(linear.weight.detach()[index], requires_grad=False)
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias.detach()[index], requires_grad=False)


def _keep_columns(linear: Any, columns: range | list[int], *, is_first: bool) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.detach()[:, torch.tensor(columns)], requires_grad=False)
    if not is_first:
        # Added once, by the first rank.
        linear.bias = None
    linear.register_forward_hook(_sum_over_ranks)


def _sum_over_ranks(linear: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output
