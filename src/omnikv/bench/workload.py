"""The KV that is handed over: paged bf16 caches whose every value follows from where it lies, so that a receiver can
check what came without having seen the caches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omnikv.core.keys import Edge
from omnikv.core.layout import Layout
from omnikv.core.reshard import Route
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.kv import LayerKV

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model's KV shape and how much of it one request has: `size_mib`, or `tokens` where that is given.

    The engine's pool has `pool_factor` times the blocks that the request needs.
    """

    size_mib: int = 1
    tokens: int | None = None
    pool_factor: int = 2
    num_layers: int = 32
    num_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    seed: int = 0

    @property
    def token_nbytes(self) -> int:
        return self.num_layers * 2 * self.num_heads * self.head_dim * torch.bfloat16.itemsize

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.token_nbytes

    @property
    def num_tokens(self) -> int:
        return self.size_mib * MIB // self.token_nbytes if self.tokens is None else self.tokens

    @property
    def num_blocks(self) -> int:
        """The blocks that the request's tokens need."""
        return -(-self.num_tokens // self.block_size)

    @property
    def pool_blocks(self) -> int:
        """The blocks of the engine's pool."""
        return self.pool_factor * self.num_blocks

    @property
    def layout(self) -> Layout:
        return Layout.stacked(self.block_size, dim=0)

    def block_ids(self) -> tuple[int, ...]:
        """The request's blocks, scattered over the pool: the worst case, no two of them side by side on purpose."""
        return tuple(random.Random(self.seed).sample(range(self.pool_blocks), self.num_blocks))

    def build_caches(self) -> list[torch.Tensor]:
        """The pool: a tensor `[2, blocks, block_size, kv_heads, head_dim]` a layer."""
        blocks = range(self.pool_blocks)
        return [
            torch.stack([self._expected_blocks(layer, half, blocks) for half in (0, 1)])
            for layer in range(self.num_layers)
        ]

    def paged(self, caches: list[torch.Tensor], num_tokens: int | None = None) -> PagedKV:
        """The request in these caches, or only its first `num_tokens`."""
        return PagedKV(caches, self.block_ids(), num_tokens or self.num_tokens, self.layout)

    def shorter(self, number: int) -> int:
        """A number of tokens up to an eighth below the request's, another one for each of the next `number`s."""
        span = max(1, self.num_tokens // 8)
        # Neighbours are far apart, and none comes twice before all have come.
        step = next(step for step in (7, 5, 3, 1) if span % step or step == 1)
        return self.num_tokens - number * step % span

    def matches(self, layers: Sequence[LayerKV]) -> bool:
        """Whether received layers hold this request, bit for bit."""
        return len(layers) == self.num_layers and all(
            self._matches_half(layer, half, tensor)
            for layer, pair in enumerate(layers)
            for half, tensor in enumerate(pair)
        )

    def _matches_half(self, layer: int, half: int, tensor: torch.Tensor) -> bool:
        expected = self._expected_blocks(layer, half, self.block_ids()).flatten(0, 1)[: self.num_tokens]
        return tensor.dtype == expected.dtype and torch.equal(tensor.view(torch.int16), expected.view(torch.int16))

    def _expected_blocks(self, layer: int, half: int, blocks: Sequence[int]) -> torch.Tensor:
        values = self.block_size * self.num_heads * self.head_dim
        starts = torch.tensor(blocks, dtype=torch.int32) * 31 + layer * 7919 + half * 10007
        bits = (starts[:, None] + torch.arange(values, dtype=torch.int32)).to(torch.int16)
        return bits.view(torch.bfloat16).view(len(blocks), self.block_size, self.num_heads, self.head_dim)


def bench_route(namespace: str, num_heads: int) -> Route:
    """The route of one sender that holds all heads and one receiver that takes them."""
    heads = (tuple(range(num_heads)),)
    return Route(
        edge=Edge(from_stage="sender", to_stage="receiver", namespace=namespace),
        source_heads=heads,
        target_heads=heads,
    )
