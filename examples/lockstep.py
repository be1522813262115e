"""Two decode ranks in lockstep: they keep a request's KV together, or both recompute it, whatever happens to one.

One prefill rank sends to two decode ranks, three processes in all. The decode ranks form a channel over their gloo
group and receive three requests: one that arrives, one without its optional companion, and one that the prefill rank
gives up. Each prints what its group decided; both always print the same.

Run it: python examples/lockstep.py
"""

import multiprocessing
import os
import tempfile
import time
from multiprocessing.synchronize import Event

import torch
import torch.distributed as dist

from omnikv import KVReceiver, KVSender, Route
from omnikv.groups.channel import Channel
from omnikv.groups.torch_dist import TorchDistGroup

HEADS, DECODE_RANKS = 4, 2


def route_of(namespace: str) -> Route:
    """One prefill rank holds all heads, each decode rank half of them."""
    return Route.tp("prefill", "decode", num_kv_heads=HEADS, from_tp=1, to_tp=DECODE_RANKS, namespace=namespace)


def prefill(namespace: str, decoded: Event) -> None:
    """Sends two requests, gives the third one up, and stays until the decode ranks have heard of all."""
    layers = [(torch.randn(6, HEADS, 16), torch.randn(6, HEADS, 16)) for _ in range(2)]
    with KVSender(route_of(namespace), rank=0) as sender:
        sender.send("whole", layers)
        sender.send("whole", layers, role="cfg_text")
        sender.send("no companion", layers)
        sender.fail("no companion", "this request has no negative prompt", role="cfg_text")
        sender.fail("given up", "prefill ran out of memory")
        decoded.wait(60.0)


def decode(namespace: str, rank: int, store: str) -> None:
    """Receives in lockstep with the other decode rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=DECODE_RANKS)
    with (
        Channel.form(TorchDistGroup(), deadline=time.monotonic() + 60.0) as channel,
        KVReceiver(route_of(namespace), rank, group=channel) as receiver,
    ):
        for request_id in ("whole", "no companion", "given up"):
            outcome = receiver.receive_together(request_id, timeout_s=60.0, optional=["cfg_text"])
            if outcome.verdict == "keep":
                print(f"rank {rank}: {request_id}: keep {', '.join(sorted(outcome.roles))}", flush=True)
            else:
                print(f"rank {rank}: {request_id}: recompute, because {outcome.cause_of(rank)}", flush=True)
            outcome.close()
    dist.destroy_process_group()


def main() -> None:
    """Start the three ranks and wait for them."""
    namespace = f"lockstep-{os.getpid()}"
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        decoded, store = spawn.Event(), os.path.join(folder, "store")
        prefilling = spawn.Process(target=prefill, args=(namespace, decoded))
        decoding = [spawn.Process(target=decode, args=(namespace, rank, store)) for rank in range(DECODE_RANKS)]
        for process in (prefilling, *decoding):
            process.start()
        for process in decoding:
            process.join()
        decoded.set()
        prefilling.join()
    assert all(process.exitcode == 0 for process in (prefilling, *decoding))


if __name__ == "__main__":
    main()
