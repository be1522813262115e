"""One rank of the stage that draws, as a process of its own.

    ready  ->  [receive N]  ->  waiting N  ->  outcome N (the verdict)  ->  [draw N]  ->  finished N  ->  ...
    [leave]  ->  left

The words in brackets are the orchestrator's. When a picture's caches are dropped, every rank understands the condition
of its own branch by itself. When the verdict is in doubt, the rank has left its groups and does nothing any more.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omnikv.cli.pipeline.conditions import Cache, branch_cache, prefix_tokens
from omnikv.cli.pipeline.drawing import Peers, draw
from omnikv.cli.pipeline.model import OmniModel
from omnikv.cli.pipeline.picture import as_png, decode
from omnikv.cli.pipeline.plan import StageJob, request_id
from omnikv.cli.pipeline.stage import SHM_OPTIONS, begin, condition, digests, join_stage, next_order
from omnikv.cli.ranks.channel import RankChannel
from omnikv.config import HandoffConfig
from omnikv.core.sharing import roles_of_guidance_ranks
from omnikv.errors import VerdictInDoubt
from omnikv.groups.device_mesh import MeshGroups, from_device_mesh
from omnikv.handoff.agree import Outcome
from omnikv.handoff.share import SharedReceiver, Traffic

SLICE_S, VOTE_TIMEOUT_S, FORMING_S = 0.2, 5.0, 60.0


def work(channel: RankChannel) -> None:
    """Receive the caches of this rank's branch, and draw with the other ranks of its replica, as told."""
    job, model = begin(channel)
    request = job.request
    join_stage(job, request.num_receiving)
    mesh = init_device_mesh(
        "cpu", (request.replicas, request.cfg, request.sp, request.dit_tp), mesh_dim_names=("dp", "cfg", "sp", "tp")
    )
    groups = from_device_mesh(mesh)
    config = HandoffConfig(transport="shm", options=SHM_OPTIONS, slice_s=SLICE_S, vote_timeout_s=VOTE_TIMEOUT_S)
    with SharedReceiver(
        job.route(groups.replica),
        groups,
        roles=request.roles,
        config=config,
        deadline=time.monotonic() + min(FORMING_S, request.timeout_s),
    ) as receiver:
        rank = _DrawingRank(job, model, mesh, groups, receiver, channel)
        channel.tell("ready", place=groups.places, reader=groups.is_reader)
        while (order := next_order(channel, "receive", "draw", "leave"))["command"] != "leave":
            {"receive": rank.receive, "draw": rank.draw}[order["command"]](order["number"])
        channel.tell("left")


class _DrawingRank:
    """What one rank has between its orders."""

    def __init__(
        self,
        job: StageJob,
        model: OmniModel,
        mesh: DeviceMesh,
        groups: MeshGroups,
        receiver: SharedReceiver,
        channel: RankChannel,
    ) -> None:
        if job.request.dit_tp > 1:
            model.parallelize(mesh["tp"])
        self._job, self._model, self._groups, self._receiver, self._channel = job, model, groups, receiver, channel
        self._cfg, self._sp = Peers(groups.cfg), Peers(groups.sp)
        request, place = job.request, groups.places["cfg"]
        self._roles = roles_of_guidance_ranks(request.roles, request.cfg)[place]
        self._branches = request.branches if request.cfg == 1 else request.branches[place : place + 1]
        self._outcome: Outcome | None = None

    def receive(self, number: int) -> None:
        """Take part in the receive of a picture's caches, and tell what came of it."""
        self._channel.tell(f"waiting {number}")
        started_s, before = time.monotonic(), _counted(self._receiver.traffic)
        try:
            self._outcome = self._receiver.receive_together(request_id(number), timeout_s=self._job.receive_timeout_s)
            facts = self._facts(self._outcome)
        except VerdictInDoubt as error:
            facts = {"verdict": "in doubt", "causes": [str(error)], "digests": {}, "rounds": 0}
        after = _counted(self._receiver.traffic)
        traffic = {name: after[name] - before[name] for name in after}
        self._channel.tell(
            f"outcome {number}", started_s=started_s, decided_s=time.monotonic(), traffic=traffic, **facts
        )
        if facts["verdict"] == "drop":
            # Nobody will ask for these parts again; their senders wait to hear that.
            self._receiver.discard(request_id(number))

    def draw(self, number: int) -> None:
        """Draw the picture with the peers, and tell how far it is from the one that a single process drew."""
        request, model, wanted = self._job.request, self._model, condition(self._job, number)
        outcome, self._outcome = self._outcome, None
        started_s = time.monotonic()
        caches = self._caches(outcome) if outcome and outcome.verdict == "keep" else self._own_caches(number)
        latents = draw(
            model, wanted.noise(model), caches, request.branches, steps=request.steps, cfg=self._cfg, sp=self._sp
        )
        if outcome is not None:
            outcome.close()
        folder = Path(self._job.folder)
        reference = torch.load(folder / f"reference-{number}.pt")
        if self._groups.is_reader and self._groups.places["tp"] == 0:
            (folder / f"picture-{number}.png").write_bytes(as_png(decode(latents, model.config.grid)))
        difference = float((latents - reference).abs().max())
        self._channel.tell(f"finished {number}", max_difference=difference, draw_s=time.monotonic() - started_s)

    def _caches(self, outcome: Outcome) -> dict[str, Cache]:
        roles: dict[str, Cache] = {role: kv.layers for role, kv in outcome.roles.items()}
        num_prefix_tokens = int(next(iter(outcome.roles.values())).metadata["prefix_tokens"])
        return {branch: branch_cache(branch, roles, num_prefix_tokens) for branch in self._branches}

    def _own_caches(self, number: int) -> dict[str, Cache]:
        wanted = condition(self._job, number)
        roles = {role: self._model.understand(wanted.embedded(self._model, role)) for role in self._roles}
        return {branch: branch_cache(branch, roles, prefix_tokens(self._model)) for branch in self._branches}

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        heads = self._job.route(0).target_heads[self._groups.places["tp"]]
        return {
            "verdict": outcome.verdict,
            "causes": [words for _, _, words in outcome.causes],
            "digests": digests({role: kv.layers for role, kv in outcome.roles.items()}, heads),
            "rounds": outcome.rounds,
        }


def _counted(traffic: Traffic) -> dict[str, int]:
    return {
        "fetched_nbytes": traffic.fetched_nbytes,
        "given_nbytes": traffic.given_nbytes,
        "taken_nbytes": traffic.taken_nbytes,
    }


if __name__ == "__main__":
    work(RankChannel(int(sys.argv[1])))
