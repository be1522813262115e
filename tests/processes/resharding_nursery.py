"""Both stages of a route as processes, forked from one that has imported everything: seconds saved each.

`python resharding_nursery.py` reads one JSON line a handoff on stdin, `{"source", "target", ...}`, forks a process for
every rank of both stages, and says one JSON line a handoff: what each target rank came to.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys

import torch
import torch.distributed as dist
from boxed_caches import boxed_cache

from omnikv import Edge, KVReceiver, KVSender, Route
from omnikv.core.partition import Parallel
from omnikv.groups.torch_dist import TorchDistGroup

NUM_LAYERS = 5


def route_of(job):
    return Route.parallel(
        Edge(from_stage="prefill", to_stage="decode", namespace=job["namespace"]),
        num_kv_heads=job["heads"],
        num_layers=NUM_LAYERS,
        source=Parallel(**job["source"]),
        target=Parallel(**job["target"]),
    )


def send(job, rank, say):
    route = route_of(job)
    cache = boxed_cache(route.source_boxes[rank], job["tokens"])
    with KVSender(route, rank, transport="shm") as sender:
        sender.send("req", cache, metadata={"first_token": 7}, num_tokens=job["tokens"])
        say(side="source", rank=rank, left=sender.drain(timeout_s=60))


def receive(job, rank, say):
    route = route_of(job)
    size = route.num_target_ranks
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=size)
    with KVReceiver(route, rank, transport="shm", group=TorchDistGroup()) as receiver:
        outcome = receiver.receive_together("req", timeout_s=60)
        expected = boxed_cache(route.target_boxes[rank], job["tokens"])
        kv = outcome.kv
        same = (
            kv is not None
            and len(kv.layers) == len(expected)
            and all(
                torch.equal(one, other)
                for mine, theirs in zip(kv.layers, expected, strict=True)
                for one, other in zip(mine, theirs, strict=True)
            )
        )
        outcome.close()
        say(side="target", rank=rank, verdict=outcome.verdict, causes=outcome.causes, same=same)


def run_rank(run, job, rank, pipe):
    # The watchdog: a rank that hangs shows where, and ends.
    faulthandler.dump_traceback_later(90, exit=True)
    torch.set_num_threads(1)

    def say(**facts):
        # Short enough to be written in one piece.
        os.write(pipe, (json.dumps(facts) + "\n").encode())

    run(job, rank, say)
    os._exit(0)


def hand_over(job):
    route = route_of(job)
    reader, writer = os.pipe()
    ranks = [(send, rank) for rank in range(route.num_source_ranks)]
    ranks += [(receive, rank) for rank in range(route.num_target_ranks)]
    children = []
    for run, rank in ranks:
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                run_rank(run, job, rank, writer)
            finally:
                os._exit(1)
        children.append(child)
    os.close(writer)
    with os.fdopen(reader) as heard:
        facts = [json.loads(line) for line in heard]
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return {"ranks": facts, "ended": ended}


def main():
    for line in sys.stdin:
        sys.stdout.write(json.dumps(hand_over(json.loads(line))) + "\n")
        sys.stdout.flush()


main()
