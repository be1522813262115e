"""What a picture is drawn from: a text and a picture to look at, in three versions for guidance.

Guidance compares where the latents would go with the whole condition and without a part of it. The three branches are
the roles under which their KV caches travel:

    primary    the picture and the text
    cfg_text   the text dropped: the picture alone
    cfg_img    the image dropped: the text alone

The picture comes first and is read causally, so the cache without the text is the beginning of the whole one. A model
that keeps one cache for all branches (`shared_prefix`) hands over that one alone, and says how long the beginning is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from omnikv.cli.pipeline.model import OmniModel
from omnikv.core.keys import PRIMARY_ROLE
from omnikv.tensors.kv import LayerKV

Cache = Sequence[LayerKV]
_BEGIN = 256
_TEXT_STRENGTH, _IMAGE_STRENGTH = 4.0, 1.5


@dataclass(frozen=True, slots=True)
class Condition:
    """What one picture is drawn from: `text`, and a picture to look at that `seed` makes, as it makes the noise."""

    text: str
    seed: int

    def embedded(self, model: OmniModel, branch: str) -> torch.Tensor:
        """The condition of a branch as the model reads it, `[tokens, hidden]`."""
        parts = [model.words(torch.tensor([_BEGIN]))]
        if branch != "cfg_img":
            count = model.config.image_grid**2
            seen = torch.randn(count, model.config.patch_values, generator=self._generator())
            parts.append(model.patches(seen))
        if branch != "cfg_text":
            parts.append(model.words(torch.tensor(list(self.text.encode()))))
        return torch.cat(parts)

    def noise(self, model: OmniModel) -> torch.Tensor:
        """The latents `[tokens, channels]` to begin with."""
        return torch.randn(model.config.num_latents, model.config.latent_channels, generator=self._generator())

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def prefix_tokens(model: OmniModel) -> int:
    """How long the beginning of a whole cache is that serves as the one without the text."""
    return 1 + model.config.image_grid**2


def branch_cache(branch: str, roles: Mapping[str, Cache], num_prefix_tokens: int) -> Cache:
    """The cache of a branch out of the `roles` that this rank has; of a shared one, its beginning."""
    if branch in roles:
        return roles[branch]
    return [LayerKV(*(tensor[:num_prefix_tokens] for tensor in layer)) for layer in roles[PRIMARY_ROLE]]


def guided(velocities: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where to go, from the velocities of the first branches: away from what each dropped part leaves out."""
    whole, without_text, *without_image = velocities
    towards = without_text + _TEXT_STRENGTH * (whole - without_text)
    if not without_image:
        return towards
    return without_image[0] + _IMAGE_STRENGTH * (towards - without_image[0])
