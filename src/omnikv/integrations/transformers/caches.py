"""A transformers cache as layers `[tokens, kv_heads, head_dim]`, and layers as a cache again.

Transformers keeps each layer as `[batch, kv_heads, tokens, head_dim]`, a static cache with `max_len` in place of the
tokens; under tensor parallelism the heads are those of this rank only. One row of that is a transpose away from what
omnikv moves. Keys are stored after the rotary embedding, so positions travel with them: a row of a left-padded batch
is handed over without its padding and continues as if it had been alone.

Only layers that hold every token are taken. A sliding window has forgotten the front of the prompt, a quantised or
recurrent layer holds no plain keys and values: each is refused by name rather than sent wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omnikv.errors import ConfigError
from omnikv.tensors.kv import LayerKV


def layers_from_cache(cache: Any, *, row: int = 0, left_pad: int = 0) -> list[LayerKV]:
    """One `LayerKV` a layer, key and value `[tokens, kv_heads, head_dim]`: views into `cache`, nothing is copied.

    `cache` is a `DynamicCache` or `StaticCache` after its forward pass; `row` the sequence of the batch to take and
    `left_pad` how many padding tokens stand before it. The views stay right until the cache is used again.

    Raises:
        ConfigError: the cache is empty or of a kind that holds no plain keys and values of every token, its layers
            differ in length, or there is no such row or no token left after the padding.
    """
    layers = list(getattr(cache, "layers", ()))
    if not layers:
        raise ConfigError(f"a {type(cache).__name__} holds no layers to hand over: run the prompt through it first")
    taken = [_row_of(layer, index, row, left_pad) for index, layer in enumerate(layers)]
    lengths = {len(layer.key) for layer in taken}
    if len(lengths) > 1:
        raise ConfigError(
            f"the cache's layers hold different numbers of tokens, {sorted(lengths)}: hand over between steps"
        )
    return taken


def cache_from_layers(layers: Sequence[LayerKV | tuple[torch.Tensor, torch.Tensor]], config: Any) -> Any:
    """A `DynamicCache` for a model of `config` that holds a copy of `layers`, with a batch of one.

    Each key and value is `[tokens, kv_heads, head_dim]`; the heads are those of this rank. The layers' memory may be
    freed or reused as soon as this returns.

    Raises:
        ConfigError: the layers do not fit the model (count, shape or kind of cache), or differ among themselves.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    _require_plain(cache.layers, layers)
    for index, (key, value) in enumerate(layers):
        # The cache concatenates what it is given to what it has, which is the one copy made here.
        cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], index)
    return cache


def _row_of(layer: Any, index: int, row: int, left_pad: int) -> LayerKV:
    _require_full_attention(layer, index)
    num_tokens = int(layer.get_seq_length())
    if num_tokens == 0:
        raise ConfigError(f"layer {index} of the cache is empty: run the prompt through the model first")
    batch = layer.keys.shape[0]
    if not isinstance(row, int) or not 0 <= row < batch:
        raise ConfigError(f"there is no row {row} in a cache with a batch of {batch}: rows are 0 to {batch - 1}")
    if not isinstance(left_pad, int) or not 0 <= left_pad < num_tokens:
        raise ConfigError(f"left_pad={left_pad} must be at least 0 and leave a token of the {num_tokens} in the cache")
    key, value = (tensor[row, :, left_pad:num_tokens].transpose(0, 1) for tensor in (layer.keys, layer.values))
    return LayerKV(key, value)


def _require_full_attention(layer: Any, index: int) -> None:
    from transformers.cache_utils import DynamicLayer, StaticLayer

    # Exact types: a subclass keeps its tokens in some other way, which this code would misread.
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ConfigError(
            f"layer {index} of the cache is a {type(layer).__name__}, which does not hold plain keys and values of "
            "every token; DynamicLayer and StaticLayer can be handed over"
        )


def _require_plain(into: Sequence[Any], layers: Sequence[LayerKV | tuple[torch.Tensor, torch.Tensor]]) -> None:
    if len(into) != len(layers):
        raise ConfigError(f"the model has {len(into)} layers, {len(layers)} were handed over: are both of one model?")
    for index, layer in enumerate(into):
        _require_full_attention(layer, index)
    for index, (key, value) in enumerate(layers):
        _require_pair(index, key, value)
    tokens = {key.shape[0] for key, _ in layers}
    if len(tokens) > 1:
        raise ConfigError(f"the layers hold different numbers of tokens, {sorted(tokens)}: are all of one request?")


def _require_pair(index: int, key: object, value: object) -> None:
    for tensor in (key, value):
        shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            raise ConfigError(
                f"keys and values must have the shape [tokens, kv_heads, head_dim], layer {index} has {shape}"
            )
    assert isinstance(key, torch.Tensor)
    assert isinstance(value, torch.Tensor)
    for what, of_key, of_value in (
        ("tokens", key.shape[0], value.shape[0]),
        ("heads", key.shape[1], value.shape[1]),
        ("dtype", key.dtype, value.dtype),
    ):
        if of_key != of_value:
            raise ConfigError(f"layer {index} has {what} {of_key} in its key and {of_value} in its value")
