"""Two real processes: one has a request's KV in paged blocks, the other gets it over shared memory, without a copy.

Run it: python examples/two_processes_shm.py
"""

import multiprocessing
import os

import torch

from omnikv import Edge, KVReceiver, KVSender, Layout, PagedKV, Route

LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16


def route_of(namespace: str) -> Route:
    """Both processes state the same route: who holds which KV heads on either side."""
    return Route(
        edge=Edge(from_stage="prefill", to_stage="decode", namespace=namespace),
        source_heads=((0, 1),),
        target_heads=((0, 1),),
    )


def prefill(namespace: str) -> None:
    """The sending process: 40 tokens that an engine keeps in blocks 5, 2 and 7 of its caches."""
    caches = [torch.full((2, 8, BLOCK_SIZE, HEADS, HEAD_DIM), float(layer)) for layer in range(LAYERS)]
    request = PagedKV(caches, block_ids=[5, 2, 7], num_tokens=40, layout=Layout.stacked(BLOCK_SIZE, dim=0))
    with KVSender(route_of(namespace), rank=0, transport="shm") as sender:
        report = sender.send("request-1", request, metadata={"first_token": 17})
        print(f"sent {report.nbytes} bytes in {report.send_s * 1e3:.1f} ms")
        unread = sender.drain(timeout_s=30.0)
        print(f"payloads that nobody took: {unread}")


def main() -> None:
    """The receiving process."""
    namespace = f"example-{os.getpid()}"
    sending = multiprocessing.get_context("spawn").Process(target=prefill, args=(namespace,))
    sending.start()
    with (
        KVReceiver(route_of(namespace), rank=0, transport="shm") as receiver,
        receiver.receive("request-1", timeout_s=60.0) as kv,
    ):
        print(f"received {kv.num_tokens} tokens, {len(kv.layers)} layers, metadata {kv.metadata}")
        assert all(bool((layer.key == number).all()) for number, layer in enumerate(kv.layers))
    sending.join()
    assert sending.exitcode == 0


if __name__ == "__main__":
    main()
