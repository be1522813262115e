"""A sender that lends its paged caches over nixl, in a process of its own: obeys one JSON command a line."""

import json
import os
import random
import sys

import torch

from omnikv import KVSender, Route
from omnikv.core.layout import Layout
from omnikv.tensors.blocks import PagedKV

LAYERS, SLOTS, HEADS, DIM = 4, 32, 8, 128


def whole_caches(blocks):
    """A (key, value) pair a layer, `[blocks, SLOTS, HEADS, DIM]`, in bits that both ends can make up."""
    generator = torch.Generator().manual_seed(blocks)
    numbers = torch.randint(-(1 << 15), 1 << 15, (LAYERS, 2, SLOTS, HEADS, DIM), generator=generator, dtype=torch.int16)
    turns = torch.arange(blocks, dtype=torch.int16).view(blocks, 1, 1, 1)
    return [(key + turns, value + turns) for key, value in numbers.unsqueeze(2)]


def shuffled(blocks, seed):
    """Every second block's place in a pool, in no order."""
    return random.Random(seed).sample(range(blocks), blocks // 2)


def main():
    torch.set_num_threads(1)
    rank, namespace, from_tp, to_tp, listen, blocks, ttl_s = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    # Whatever an engine prints must not come between the answers.
    os.dup2(2, 1)
    route = Route.tp("prefill", "decode", num_kv_heads=HEADS, from_tp=from_tp, to_tp=to_tp, namespace=namespace)
    heads = list(route.source_heads[rank])
    caches = [tuple(half[:, :, heads].clone().view(torch.bfloat16) for half in pair) for pair in whole_caches(blocks)]
    options = {"listen": listen, "lend": True, "pool_nbytes": 1 << 20}
    with KVSender(route, rank, transport="nixl", options=options, payload_ttl_s=ttl_s) as sender:
        print(json.dumps("open"), file=out, flush=True)
        for line in sys.stdin:
            call, *arguments = json.loads(line)
            answer = None
            if call == "send":
                request_id, ids, num_tokens = arguments
                sender.send(request_id, PagedKV(caches, ids, num_tokens, Layout.split_pair(SLOTS)))
            elif call == "abort":
                sender.abort(*arguments)
            elif call == "drain":
                answer = sender.drain(timeout_s=60)
            elif call == "free":
                request_id, timeout_s = arguments
                answer = sender.wait_until_free(request_id, timeout_s=timeout_s)
            elif call == "census":
                answer = sender.census()
            elif call == "resident":
                with open("/proc/self/statm") as statm:
                    answer = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
