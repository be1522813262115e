"""Ranks of an engine's stage as real processes, forked from one that has imported everything: seconds saved each.

`python engine_rank_program.py` reads one JSON line a rank on stdin and forks it. A rank sets up its groups as an
engine does, says so over the Unix socket at `control`, and then receives each request that a JSON line there names. One
line an answer: what the receive said, or the error's name; whether the request holds KV; how long past its vote's
deadline it ended, by this rank's own clock; what went over the wire. With `tells_rounds` each round that ends without a
ruling is a line too; `host` is the host that the rank pretends to run on.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.engine_groups import DIMENSIONS, GlooCoordinator, ObjectsOnly, rank_groups

from omnikv.groups import channel_form
from omnikv.integrations.vllm_omni import diffusion_parallel_state, vllm_parallel_state
from omnikv.integrations.vllm_omni.manager import OmniKVCacheConfig, OmniKVTransferManager


class Words(logging.Handler):
    """Keeps what is logged, to be said with the next answer."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Rounds(logging.Handler):
    """Says of each round of a vote that it ended and that another follows."""

    def __init__(self, say):
        super().__init__(logging.DEBUG)
        self.say = say

    def emit(self, record):
        if ", round " in record.getMessage():
            self.say(state="round", words=record.getMessage())


def listen_to_logs(words, say, tells_rounds):
    logging.getLogger("omnikv").addHandler(words)
    if tells_rounds:
        logging.getLogger("omnikv.agree").setLevel(logging.DEBUG)
        logging.getLogger("omnikv.agree").addHandler(Rounds(say))


def pretend_host(host):
    shown = channel_form._own_card
    channel_form._own_card = lambda facts: msgspec.structs.replace(shown(facts), host=host)


def set_up_groups(role):
    """The groups along each dimension; every process makes all of them, in one order, as torch.distributed wants."""
    rank, sizes, world = role["rank"], role["sizes"], role["world"]
    store = f"file://{role['store']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    mine = {"world": GlooCoordinator(range(world))}
    for dimension in DIMENSIONS:
        for ranks in rank_groups(dimension, **sizes):
            group = GlooCoordinator(ranks)
            if rank in ranks:
                mine[dimension] = ObjectsOnly(group) if role["objects_only"] else group
    vllm_parallel_state.set_groups(tp=mine.pop("tp"))
    diffusion_parallel_state.set_groups(**mine)
    return vllm_parallel_state.get_tp_group(), mine["world"]


def collect(request_id, companion_ids, manager, device):
    found = {}
    for role, companion_id in companion_ids.items():
        data, _ = manager.receive_kv_cache_for_request(companion_id, device)
        if data:
            found[f"{role}_past_key_values"] = SimpleNamespace(**data["layer_blocks"])
    return found


def receive(manager, request_id, companions):
    params = SimpleNamespace(cfg_kv_request_ids=companions) if companions else SimpleNamespace()
    req = SimpleNamespace(request_id=request_id, sampling_params=params)
    vote_deadline = time.monotonic() + manager.config.recv_timeout + manager.config.kv_vote_timeout
    try:
        outcome = manager.receive_multi_kv_cache_distributed(req, collect if companions else None)
    except Exception as error:  # noqa: BLE001
        outcome = type(error).__name__
    late_s = time.monotonic() - vote_deadline
    held = getattr(req, "past_key_values", None)
    return {
        "outcome": outcome,
        "head": None if held is None else float(held.key_cache[0].flatten()[0]),
        "roles": sorted(role for role in companions if getattr(params, f"{role}_past_key_values", None) is not None),
        "late_s": late_s,
        "moved": manager.connector.health(),
        "refetched": manager.counters["refetched"],
    }


def run_rank(role):
    # The watchdog: a rank that hangs shows where, and ends.
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(role["control"])
        lines = control.makefile("rw")

        def say(**facts):
            lines.write(json.dumps(facts) + "\n")
            lines.flush()

        say(state="born", rank=role["rank"], pid=os.getpid())
        words = Words()
        listen_to_logs(words, say, role["tells_rounds"])
        if role["host"]:
            pretend_host(role["host"])
        tp_group, world = set_up_groups(role)
        os.environ["LOCAL_RANK"] = str(tp_group.rank_in_group)
        tp = tp_group.world_size
        manager = OmniKVTransferManager(
            OmniKVCacheConfig(stage_id=1, need_recv_cache=True, from_tp=tp, to_tp=tp, **role["config"])
        )
        say(state="ready")
        for line in lines:
            words.lines.clear()
            asked = json.loads(line)
            answer = receive(manager, asked["request_id"], asked["companions"])
            calls = {"tp_calls": len(tp_group.calls), "world_calls": len(world.calls)}
            say(state="done", **answer, **calls, words=words.lines)
        manager.close()
    # A torn group's destructors may wait for peers that are gone.
    os._exit(0)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            os.close(0)
            run_rank(json.loads(line))


main()
