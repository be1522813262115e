"""One rank of an engine's stage between real processes: python engine_rank_program.py '<json>'.

It sets up its groups as an engine does, says so, and then receives each request that a line on stdin names. One JSON
line an answer: what the receive said, or the error's name; whether the request holds KV; how long it took.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.engine_groups import DIMENSIONS, GlooCoordinator, ObjectsOnly, rank_groups

from omnikv.integrations.vllm_omni import diffusion_parallel_state, vllm_parallel_state
from omnikv.integrations.vllm_omni.manager import OmniKVCacheConfig, OmniKVTransferManager

ROLE = json.loads(sys.argv[1])


def say(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Words(logging.Handler):
    """Keeps what is logged, to be said with the next answer."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def set_up_groups():
    """The groups along each dimension; every process makes all of them, in one order, as torch.distributed wants."""
    rank, sizes = ROLE["rank"], ROLE["sizes"]
    dist.init_process_group("gloo", init_method=f"file://{ROLE['store']}", rank=rank, world_size=ROLE["world"])
    mine = {"world": GlooCoordinator(range(ROLE["world"]))}
    for dimension in DIMENSIONS:
        for ranks in rank_groups(dimension, **sizes):
            group = GlooCoordinator(ranks)
            if rank in ranks:
                mine[dimension] = ObjectsOnly(group) if ROLE["objects_only"] else group
    vllm_parallel_state.set_groups(tp=mine.pop("tp"))
    diffusion_parallel_state.set_groups(**mine)
    return vllm_parallel_state.get_tp_group(), mine["world"]


def receive(manager, request_id):
    req = SimpleNamespace(request_id=request_id, sampling_params=SimpleNamespace())
    started = time.monotonic()
    try:
        outcome = manager.receive_multi_kv_cache_distributed(req)
    except Exception as error:  # noqa: BLE001
        outcome = type(error).__name__
    held = getattr(req, "past_key_values", None)
    return {
        "outcome": outcome,
        "head": None if held is None else float(held.key_cache[0].flatten()[0]),
        "waited_s": time.monotonic() - started,
    }


def main():
    torch.set_num_threads(1)
    words = Words()
    logging.getLogger("omnikv").addHandler(words)
    tp_group, world = set_up_groups()
    os.environ["LOCAL_RANK"] = str(tp_group.rank_in_group)
    tp = tp_group.world_size
    config = OmniKVCacheConfig(stage_id=1, need_recv_cache=True, from_tp=tp, to_tp=tp, **ROLE["config"])
    manager = OmniKVTransferManager(config)
    say(state="ready")
    for line in sys.stdin:
        words.lines.clear()
        answer = receive(manager, line.strip())
        say(state="done", **answer, words=words.lines, tp_calls=len(tp_group.calls), world_calls=len(world.calls))
    manager.close()
    # A torn group's destructors may wait for peers that are gone.
    os._exit(0)


main()
