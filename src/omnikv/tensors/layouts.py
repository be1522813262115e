"""How an engine lays out paged KV, as a declaration: a shape alone cannot say which dimension means what.

An engine keeps each layer's cache as blocks of `block_size` tokens. Backends differ in where key and value sit, and
some shapes fit several of them (2 blocks look like a key/value pair, as many heads as tokens a block look like a
transpose), so the native API takes a `BlockLayout` and refuses tensors that do not fit it. Whatever the layout,
everything above sees two views `[blocks, block_size, kv_heads, head_dim]` over the engine's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from omnikv.errors import ConfigError

# One layer's cache as an engine holds it: one tensor, or key and value apart.
LayerCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# `(key_blocks, value_blocks)`, each `[blocks, block_size, kv_heads, head_dim]`.
BlockViews = tuple[torch.Tensor, torch.Tensor]

Arrangement = Literal["split_pair", "stacked", "packed"]

_EXPECTED = {
    "split_pair": "a (key, value) pair, each [blocks, {0}, kv_heads, head_dim]",
    "stacked0": "one tensor [2, blocks, {0}, kv_heads, head_dim]",
    "stacked1": "one tensor [blocks, 2, {0}, kv_heads, head_dim]",
    "packed": "one tensor [blocks, kv_heads, {0}, 2 * head_dim]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How one engine's cache is laid out; make one with `split_pair`, `stacked` or `packed`."""

    arrangement: Arrangement
    block_size: int
    # The dimension that holds key and value, for "stacked" alone.
    pair_dim: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.block_size):
            raise ConfigError(f"block_size must be a positive number of tokens, got {self.block_size!r}")
        if self.arrangement not in ("split_pair", "stacked", "packed"):
            raise ConfigError(f"unknown arrangement {self.arrangement!r}; use split_pair, stacked or packed")
        if self.pair_dim not in (0, 1):
            raise ConfigError(f"key and value are stacked along dimension 0 or 1, got dim={self.pair_dim!r}")

    @classmethod
    def split_pair(cls, block_size: int) -> BlockLayout:
        """The layout of a (key, value) pair of tensors, each `[blocks, block_size, kv_heads, head_dim]`."""
        return cls(arrangement="split_pair", block_size=block_size)

    @classmethod
    def stacked(cls, block_size: int, *, dim: int) -> BlockLayout:
        """The layout of one tensor of 5 dimensions with key and value stacked along `dim`.

        0: `[2, blocks, block_size, kv_heads, head_dim]`. 1: `[blocks, 2, block_size, kv_heads, head_dim]`.
        """
        return cls(arrangement="stacked", block_size=block_size, pair_dim=dim)

    @classmethod
    def packed(cls, block_size: int) -> BlockLayout:
        """The layout of one tensor `[blocks, kv_heads, block_size, 2 * head_dim]`, K|V side by side in each token.

        It is what FlashAttention on a GPU uses in vLLM >= 0.23; vLLM on a CPU gives the same shape another meaning.
        """
        return cls(arrangement="packed", block_size=block_size)

    def describe(self) -> str:
        """The layout in a few words, equal for equal layouts."""
        where = f"(dim={self.pair_dim})" if self.arrangement == "stacked" else ""
        return f"{self.arrangement}{where}, blocks of {self.block_size} tokens"

    def views(self, cache: LayerCache, *, layer: int) -> BlockViews:
        """Key and value blocks of one layer, `[blocks, block_size, kv_heads, head_dim]`: views, nothing is copied.

        Key and value have the same blocks, heads, dtype and device; their head_dim may differ in a split pair.

        Raises:
            ConfigError: the cache does not fit this layout; `layer` is named.
        """
        pair = self._split(cache)
        if pair is None or not all(view.ndim == 4 and view.shape[1] == self.block_size for view in pair):
            raise ConfigError(
                f"layer {layer} has the KV cache {describe_cache(cache)}, but the layout {self.describe()!r} needs "
                f"{self._expected()}; declare the layout that the engine uses"
            )
        key, value = pair
        if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.device != value.device:
            raise ConfigError(
                f"layer {layer} has the KV cache {describe_cache(cache)}: key and value must have the same blocks, "
                "heads, dtype and device"
            )
        return key.detach(), value.detach()

    def _split(self, cache: object) -> BlockViews | None:
        if self.arrangement == "split_pair":
            if isinstance(cache, (tuple, list)) and len(cache) == 2 and all(map(torch.is_tensor, cache)):
                return cache[0], cache[1]
            return None
        if not isinstance(cache, torch.Tensor):
            return None
        if self.arrangement == "packed":
            return unpack(cache) if cache.ndim == 4 and cache.shape[3] % 2 == 0 else None
        if cache.ndim == 5 and cache.shape[self.pair_dim] == 2:
            return cache.select(self.pair_dim, 0), cache.select(self.pair_dim, 1)
        return None

    def _expected(self) -> str:
        name = f"stacked{self.pair_dim}" if self.arrangement == "stacked" else self.arrangement
        return _EXPECTED[name].format(self.block_size)


def unpack(packed: torch.Tensor) -> BlockViews:
    """Key and value, as views `[blocks, block_size, kv_heads, head_dim]`, of a packed tensor."""
    by_token = packed.transpose(1, 2)
    head_dim = packed.shape[3] // 2
    return by_token[..., :head_dim], by_token[..., head_dim:]


def infer_block_layout(cache: LayerCache, block_size: int) -> BlockLayout:
    """The one layout that this cache can have, judged by its shape and the engine's `block_size`.

    For callers who were given no declaration. Only shapes are seen: a backend that gives the packed shape another
    meaning must be declared.

    Raises:
        ConfigError: no layout fits, or the shape can be read in more than one way.
    """
    layouts = (
        BlockLayout.split_pair(block_size),
        BlockLayout.stacked(block_size, dim=0),
        BlockLayout.stacked(block_size, dim=1),
        BlockLayout.packed(block_size),
    )
    fitting = [layout for layout in layouts if _fits(layout, cache)]
    if not fitting:
        raise ConfigError(
            f"the KV cache {describe_cache(cache)} fits no known layout with blocks of {block_size} tokens; known are: "
            + "; ".join(layout._expected() for layout in layouts)
        )
    if len(fitting) > 1:
        readings = " or ".join(repr(layout.describe()) for layout in fitting)
        raise ConfigError(f"the KV cache {describe_cache(cache)} is ambiguous: {readings}. {_REMEDY}")
    key, _ = fitting[0].views(cache, layer=0)
    if key.shape[2] == block_size:
        raise ConfigError(
            f"the KV cache {describe_cache(cache)} is ambiguous: it has as many heads as tokens a block "
            f"({block_size}), so the two dimensions cannot be told apart. {_REMEDY}"
        )
    return fitting[0]


_REMEDY = "Declare it with BlockLayout.split_pair(block_size), .stacked(block_size, dim=0|1) or .packed(block_size)"


def _fits(layout: BlockLayout, cache: LayerCache) -> bool:
    try:
        layout.views(cache, layer=0)
    except ConfigError:
        return False
    return True


def normalize_layer_kv(
    layer_kv: object, *, req_id: str = "", layer_idx: int = -1, block_size: int | None = None
) -> BlockViews | None:
    """`(key_blocks, value_blocks)` of one layer as views, or None when it has no form that is known.

    The published rule, for engines that declare nothing; in this order: a tensor of 4 dimensions whose third is
    `block_size` and whose last is even is packed `[blocks, kv_heads, block_size, 2 * head_dim]`; one of 3 or more whose
    first, else second, dimension is 2 is stacked along it; a pair of tensors is taken as it is. Each of the two must
    have 2 or more dimensions. `req_id` and `layer_idx` are part of the published signature; the caller, who may log,
    uses them.
    """
    pair = _published_split(layer_kv, block_size)
    if pair is None or any(blocks.ndim < 2 for blocks in pair):
        return None
    return pair


def _published_split(layer_kv: object, block_size: int | None) -> BlockViews | None:
    if isinstance(layer_kv, tuple):
        if len(layer_kv) == 2 and all(map(torch.is_tensor, layer_kv)):
            return layer_kv[0], layer_kv[1]
        return None
    if not isinstance(layer_kv, torch.Tensor):
        return None
    if layer_kv.ndim == 4 and layer_kv.shape[2] == block_size and layer_kv.shape[3] % 2 == 0:
        return unpack(layer_kv)
    if layer_kv.ndim >= 3 and 2 in layer_kv.shape[:2]:
        dim = 0 if layer_kv.shape[0] == 2 else 1
        return layer_kv.select(dim, 0), layer_kv.select(dim, 1)
    return None


def is_count(value: object) -> bool:
    """True for a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def describe_cache(cache: object) -> str:
    """The shape, dtype and device of a layer's cache in words, whatever it is."""
    if isinstance(cache, torch.Tensor):
        return f"{list(cache.shape)} {str(cache.dtype).removeprefix('torch.')} on {cache.device}"
    if isinstance(cache, (tuple, list)):
        return "(" + ", ".join(map(describe_cache, cache)) + ")"
    return f"of type {type(cache).__name__}"
