"""Small stages over any transport, for tests: caches whose values are known, and every rank of both ends of a route."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch

from omnikv import KVReceiver, KVSender, LayerKV, Route


def full_cache(num_tokens=5, num_heads=3, num_layers=2, head_dim=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_heads)
    shape = (num_tokens, num_heads, head_dim)
    return [
        LayerKV(torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype))
        for _ in range(num_layers)
    ]


def part(layers, heads):
    return [LayerKV(layer.key[:, list(heads)], layer.value[:, list(heads)]) for layer in layers]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@contextmanager
def stages(route, transport, *, groups=None, config=None):
    with ExitStack() as stack:
        senders = [
            stack.enter_context(KVSender(route, rank, transport=transport, config=config))
            for rank in range(route.num_source_ranks)
        ]
        receivers = [
            stack.enter_context(
                KVReceiver(route, rank, transport=transport, group=groups[rank] if groups else None, config=config)
            )
            for rank in range(route.num_target_ranks)
        ]
        yield senders, receivers


def one_to_one(namespace, num_heads=3):
    return Route.tp("prefill", "decode", num_kv_heads=num_heads, from_tp=1, to_tp=1, namespace=namespace)


def send_everywhere(senders, layers, request_id="req", **keywords):
    for sender in senders:
        sender.send(request_id, part(layers, sender.route.source_heads[sender.rank]), **keywords)
