"""A small mixture-of-transformers in the manner of Bagel, with seeded random weights: it reads, and it draws.

Each layer has two experts that share nothing but the attention. One *understands*: it reads the condition (a picture
and a text) causally, and what it leaves behind is a KV cache. The other *generates*: latent tokens, the noise that is
to become a picture, attend to that cache and to one another, and the layer says in which direction they should move.

The two need not run in the same place: a stage that understands and a stage that generates, with the KV cache handed
from one to the other. Tensor parallelism is torch's own: after `parallelize`, each rank has some of the heads, and the
code below is the same, since it reads the number of heads off the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from omnikv.tensors.kv import LayerKV

_GAIN = 2.0
# Tensors `[tokens, ...]` of one rank in, those of all sequence-parallel ranks out, in token order.
Gather = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of the model. `grid` latents a side; `image_grid` patches a side of the picture that it reads."""

    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 16
    mlp: int = 256
    vocabulary: int = 257
    grid: int = 16
    latent_channels: int = 4
    image_grid: int = 4
    patch_values: int = 12
    seed: int = 20

    @property
    def num_latents(self) -> int:
        return self.grid * self.grid


class Expert(nn.Module):
    """One expert's share of a layer: everything but the attention itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.q = nn.Linear(config.hidden, query, bias=False)
        self.k = nn.Linear(config.hidden, kv, bias=False)
        self.v = nn.Linear(config.hidden, kv, bias=False)
        self.o = nn.Linear(query, config.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(config.hidden)
        self.gate = nn.Linear(config.hidden, config.mlp, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.hidden, bias=False)

    def heads(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of this rank's heads, each `[tokens, heads, head_dim]`."""
        h = self.attention_norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        return rotated(q, positions), rotated(k, positions), v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, given what its heads attended to."""
        x = x + self.o(attended.flatten(-2))
        h = self.mlp_norm(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class OmniModel(nn.Module):
    """The whole model; every process makes the same weights from the seed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.words = nn.Embedding(config.vocabulary, config.hidden)
            self.patches = nn.Linear(config.patch_values, config.hidden, bias=False)
            self.understanding = nn.ModuleList(Expert(config) for _ in range(config.num_layers))
            self.generating = nn.ModuleList(Expert(config) for _ in range(config.num_layers))
            self.latent_in = nn.Linear(config.latent_channels, config.hidden)
            self.time_in = nn.Linear(config.hidden, config.hidden)
            self.out_norm = nn.RMSNorm(config.hidden)
            self.latent_out = nn.Linear(config.hidden, config.latent_channels)
        self.requires_grad_(False)
        # As torch makes them, untrained weights hardly let a condition through.
        for layer in (self.understanding, self.generating, self.latent_out):
            for parameter in layer.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(_GAIN)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Spread the heads and the inner width of every expert over the ranks of a one-dimensional mesh."""
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        for expert in (*experts(self.understanding), *experts(self.generating)):
            parallelize_module(expert, mesh, {**plan, "o": RowwiseParallel(), "down": RowwiseParallel()})

    def understand(self, embedded: torch.Tensor) -> list[LayerKV]:
        """The KV cache of a condition `[tokens, hidden]`, this rank's heads, one entry a layer."""
        positions = torch.arange(len(embedded))
        cache, x = [], embedded
        for expert in experts(self.understanding):
            q, k, v = expert.heads(x, positions)
            cache.append(LayerKV(k, v))
            x = expert.finish(x, attend(q, k, v, causal=True))
        return cache

    def velocity(
        self, latents: torch.Tensor, time: float, cache: Sequence[LayerKV], *, first: int, gather: Gather
    ) -> torch.Tensor:
        """Where the latents `[tokens, channels]` should move at `time` (1 is noise, 0 a picture), given a condition.

        `latents` are those of this rank, the first one being number `first`; `gather` joins all ranks' keys and values.
        All stand at one place behind the condition, as in Bagel; where they are in the picture is added to them. The
        model says where the straight way from the noise ends, which is the same thing.
        """
        config = self.config
        positions = torch.full((len(latents),), len(cache[0].key))
        x = self.latent_in(latents) + places(config, first, len(latents))
        x = x + self.time_in(waves(torch.tensor([time * 1000]), config.hidden))
        for expert, condition in zip(experts(self.generating), cache, strict=True):
            q, k, v = expert.heads(x, positions)
            k, v = torch.cat([condition.key, gather(k)]), torch.cat([condition.value, gather(v)])
            x = expert.finish(x, attend(q, k, v, causal=False))
        end: torch.Tensor = self.latent_out(self.out_norm(x))
        return (latents - end) / time


def experts(layers: nn.ModuleList) -> list[Expert]:
    """The layers, as what they are."""
    return [layer for layer in layers if isinstance(layer, Expert)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """What each query head finds, `[tokens, heads, head_dim]`; neighbouring query heads share a KV head."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    found = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=causal)
    return found.transpose(0, 1)


def rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`heads` turned by their positions (RoPE)."""
    half = heads.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    low, high = heads[..., :half], heads[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def waves(values: torch.Tensor, width: int) -> torch.Tensor:
    """Each value as sines and cosines of many wavelengths, `[values, width]`."""
    angles = values[:, None] * torch.exp(-math.log(10000.0) * torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def places(config: ModelConfig, first: int, count: int) -> torch.Tensor:
    """Where `count` latents from number `first` on are in the picture: half of the width for the row."""
    numbers, half = torch.arange(first, first + count), config.hidden // 2
    return torch.cat([waves(numbers // config.grid, half), waves(numbers % config.grid, half)], dim=-1)
