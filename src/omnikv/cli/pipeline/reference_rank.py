"""The whole pipeline in one process, without any handoff: what the others' pictures are compared with.

finished (its latents are in the run's folder)  ->  [leave]  ->  left
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from omnikv.cli.pipeline.drawing import Peers, draw
from omnikv.cli.pipeline.stage import begin, condition, next_order
from omnikv.cli.ranks.channel import RankChannel


def work(channel: RankChannel) -> None:
    """Draw every picture of the run."""
    job, model = begin(channel)
    request = job.request
    for number in range(request.replicas):
        wanted = condition(job, number)
        caches = {branch: model.understand(wanted.embedded(model, branch)) for branch in request.branches}
        latents = draw(
            model, wanted.noise(model), caches, request.branches, steps=request.steps, cfg=Peers(), sp=Peers()
        )
        torch.save(latents, Path(job.folder) / f"reference-{number}.pt")
    channel.tell("finished")
    next_order(channel, "leave")
    channel.tell("left")


if __name__ == "__main__":
    work(RankChannel(int(sys.argv[1])))
