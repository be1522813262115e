"""Prefill on 4 tensor-parallel ranks, decode on 2, and the reverse: every rank gets its heads, bit for bit.

The ranks of each stage are threads here, so the `memory` transport and the `threads` group serve; real ranks are
processes and change only those two arguments. The decode ranks act in lockstep: all keep the KV, or none does.

Run it: python examples/tp_resize.py
"""

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from omnikv import KVReceiver, KVSender, Route
from omnikv.groups.threads import ThreadGroup

LAYERS, TOKENS, HEADS, HEAD_DIM = 3, 100, 8, 16


def send_rank(route: Route, rank: int, model: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """One prefill rank: sends the heads that it holds; the route says to whom."""
    heads = list(route.source_heads[rank])
    with KVSender(route, rank, transport="memory") as sender:
        sender.send("request-1", [(key[:, heads], value[:, heads]) for key, value in model])
        return sender.drain(timeout_s=60.0)


def receive_rank(
    route: Route, rank: int, group: ThreadGroup, model: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[str, bool]:
    """One decode rank: the group's verdict, and whether this rank's heads came bit for bit."""
    heads = list(route.target_heads[rank])
    with KVReceiver(route, rank, transport="memory", group=group) as receiver:
        outcome = receiver.receive_together("request-1", timeout_s=60.0)
        if outcome.kv is None:
            return outcome.verdict, False
        with outcome.kv as kv:
            exact = all(
                torch.equal(got.key, key[:, heads]) and torch.equal(got.value, value[:, heads])
                for got, (key, value) in zip(kv.layers, model, strict=True)
            )
        return outcome.verdict, exact


def hand_over(from_tp: int, to_tp: int) -> bool:
    """Whether every decode rank kept exactly the heads it should have."""
    route = Route.tp(
        "prefill",
        "decode",
        num_kv_heads=HEADS,
        from_tp=from_tp,
        to_tp=to_tp,
        namespace=f"tp-resize-{os.getpid()}-{from_tp}-{to_tp}",
    )
    model = [
        (torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16(), torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16())
        for _ in range(LAYERS)
    ]
    groups = ThreadGroup.create(to_tp)
    with ThreadPoolExecutor(from_tp + to_tp) as threads:
        unread = [threads.submit(send_rank, route, rank, model) for rank in range(from_tp)]
        outcomes = [threads.submit(receive_rank, route, rank, groups[rank], model) for rank in range(to_tp)]
        results = [outcome.result() for outcome in outcomes]
        left = sum(count.result() for count in unread)
    for rank, (verdict, exact) in enumerate(results):
        print(f"TP {from_tp} -> {to_tp}, rank {rank}: heads {route.target_heads[rank]}, {verdict}, bit-exact: {exact}")
    return left == 0 and all(result == ("keep", True) for result in results)


def main() -> None:
    """Both directions."""
    assert hand_over(4, 2)
    assert hand_over(2, 4)


if __name__ == "__main__":
    main()
