"""From noise to latents, on one rank or on many: guidance and sequence parallelism around `OmniModel.velocity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omnikv.cli.pipeline.conditions import Cache, guided
from omnikv.cli.pipeline.model import OmniModel


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks along one dimension of a stage, and this rank's place; without a group this rank is alone."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in order; all have the same shape."""
        if self.size == 1:
            return [mine]
        mine = mine.contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return everyone

    def joined(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of every rank behind one another."""
        return torch.cat(self.gather(mine))


def draw(
    model: OmniModel,
    noise: torch.Tensor,
    caches: Mapping[str, Cache],
    branches: Sequence[str],
    *,
    steps: int,
    cfg: Peers,
    sp: Peers,
) -> torch.Tensor:
    """The latents `[tokens, channels]` of the whole picture, on every rank.

    `caches` are those of the branches that this rank runs: all of `branches`, or the one of its number in the guidance
    group. Each rank of the sequence group moves its own stretch of the latents.
    """
    count = len(noise) // sp.size
    first = sp.rank * count
    latents = noise[first : first + count]
    mine = branches if cfg.size == 1 else [branches[cfg.rank]]
    for step in range(steps):
        time = 1 - step / steps
        velocities = [model.velocity(latents, time, caches[name], first=first, gather=sp.joined) for name in mine]
        if cfg.size > 1:
            velocities = cfg.gather(velocities[0])
        latents = latents - guided(velocities) / steps
    return sp.joined(latents)
