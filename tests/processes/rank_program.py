"""One rank of a handoff between real processes, driven over its pipes: python rank_program.py '<json>'.

It says one JSON line a step on stdout and waits for a line on stdin before it sends.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from omnikv import KVReceiver, KVSender, Route

ROLE = json.loads(sys.argv[1])
HEADS, TOKENS, LAYERS, HEAD_DIM = 6, 11, 3, 8


def say(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def full_cache():
    """The whole cache, computed alike in every process: the value at (layer, side, token, head, dim) is its index."""
    count = LAYERS * 2 * TOKENS * HEADS * HEAD_DIM
    return torch.arange(count, dtype=torch.float32).view(LAYERS, 2, TOKENS, HEADS, HEAD_DIM)


def holds(layers, expected):
    pairs = [
        (side, wanted[at]) for layer, wanted in zip(layers, expected, strict=True) for at, side in enumerate(layer)
    ]
    return all(torch.equal(side, wanted) for side, wanted in pairs)


def send(route, rank):
    cache = full_cache()[:, :, :, list(route.source_heads[rank])]
    with KVSender(route, rank) as sender:
        say(state="ready")
        sys.stdin.readline()
        report = sender.send("req/1", [(layer[0], layer[1]) for layer in cache], metadata={"first_token": 7})
        say(state="sent", nbytes=report.nbytes, left=sender.drain(timeout_s=60))


def receive(route, rank):
    group = None
    if ROLE["store"]:
        import torch.distributed as dist

        from omnikv.groups.torch_dist import TorchDistGroup

        size = route.num_target_ranks
        dist.init_process_group("gloo", init_method=f"file://{ROLE['store']}", rank=rank, world_size=size)
        group = TorchDistGroup()
    expected = full_cache()[:, :, :, list(route.target_heads[rank])]
    with KVReceiver(route, rank, group=group) as receiver:
        # A source that dies before it was met counts as not there yet.
        while len(receiver._transport._target._sources) < len(route.pieces_to(rank)):
            time.sleep(0.001)
        say(state="ready")
        started = time.monotonic()
        if group is None:
            kv, causes, verdict = receiver.receive("req/1", timeout_s=ROLE["timeout_s"]), "", "keep"
        else:
            outcome = receiver.receive_together("req/1", timeout_s=ROLE["timeout_s"])
            kv, causes, verdict = outcome.kv, outcome.cause_of(1), outcome.verdict
        same = kv is not None and holds(kv.layers, expected)
        metadata = kv.metadata if kv is not None else None
        if kv is not None:
            kv.close()
        waited_s = time.monotonic() - started
        say(state="done", verdict=verdict, same=same, metadata=metadata, causes=causes, waited_s=waited_s)


def main():
    torch.set_num_threads(1)
    route = Route.tp("p", "d", num_kv_heads=HEADS, from_tp=ROLE["from"], to_tp=ROLE["to"], namespace=ROLE["namespace"])
    (send if ROLE["side"] == "source" else receive)(route, ROLE["rank"])
    sys.stdout.flush()
    # A torn group's destructors may wait for peers that are gone.
    os._exit(0)


main()
