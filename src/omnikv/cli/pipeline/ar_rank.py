"""One rank of the stage that understands, as a process of its own.

    ready (every condition is in its caches)  ->  [send]  ->  sent N  ->  ...  ->  [leave]  ->  left

The words in brackets are the orchestrator's. An order to send says for which picture, to which replica, and which role
is to be held back, sent late, or given up.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from omnikv.cli.pipeline.conditions import Cache, prefix_tokens
from omnikv.cli.pipeline.model import OmniModel
from omnikv.cli.pipeline.plan import StageJob, request_id
from omnikv.cli.pipeline.stage import SHM_OPTIONS, begin, condition, digests, join_stage, next_order
from omnikv.cli.ranks.channel import RankChannel
from omnikv.handoff.api import KVSender


def work(channel: RankChannel) -> None:
    """Prefill every condition, send this rank's heads as told, and stay until they are read."""
    job, model = begin(channel)
    with ExitStack() as ends:
        senders = [
            ends.enter_context(KVSender(job.route(replica), job.rank, transport="shm", options=SHM_OPTIONS))
            for replica in range(job.request.replicas)
        ]
        if job.request.ar_tp > 1:
            join_stage(job, job.request.ar_tp)
            model.parallelize(init_device_mesh("cpu", (job.request.ar_tp,)))
        pictures = [_understood(job, model, number) for number in range(job.request.replicas)]
        heads = job.route(0).source_heads[job.rank]
        channel.tell("ready", digests=[digests(caches, heads) for caches in pictures])
        while (order := next_order(channel, "send", "leave"))["command"] == "send":
            _send(senders[order["replica"]], pictures[order["number"]], order, channel, prefix_tokens(model))
        unread = sum(
            sender.drain(timeout_s=job.receive_timeout_s)
            for replica, sender in enumerate(senders)
            if replica not in order["lost_replicas"]
        )
        channel.tell("left", unread=unread)


def _understood(job: StageJob, model: OmniModel, number: int) -> dict[str, Cache]:
    wanted = condition(job, number)
    return {role: model.understand(wanted.embedded(model, role)) for role in job.request.roles}


def _send(
    sender: KVSender, caches: dict[str, Cache], order: dict[str, Any], channel: RankChannel, num_prefix_tokens: int
) -> None:
    number, name = order["number"], request_id(order["number"])
    started_s, nbytes = time.monotonic(), 0
    for role, cache in caches.items():
        fate = order["fates"].get(role, "sent")
        if fate == "failed":
            sender.fail(name, "the prompt without its text could not be prefilled", role=role)
        elif fate == "sent":
            nbytes += _send_role(sender, name, role, cache, num_prefix_tokens)
    channel.tell(f"sent {number}", started_s=started_s, sent_s=time.monotonic(), nbytes=nbytes)
    for role in [role for role, fate in order["fates"].items() if fate == "late"]:
        time.sleep(order["late_s"])
        _send_role(sender, name, role, caches[role], num_prefix_tokens)


def _send_role(sender: KVSender, name: str, role: str, cache: Cache, num_prefix_tokens: int) -> int:
    # Bagel's latents stand at one place behind the condition ("ropes"); a shared cache says how much of it is shared.
    metadata = {"ropes": [len(cache[0].key)], "prefix_tokens": num_prefix_tokens}
    return sender.send(name, list(cache), role=role, metadata=metadata).nbytes


if __name__ == "__main__":
    work(RankChannel(int(sys.argv[1])))
