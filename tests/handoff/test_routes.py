"""Every kind of route through the native API: with few tokens, with a part that is late, and with a rank that fails."""

from __future__ import annotations

import pytest
from boxed_caches import boxed_cache
from stages import assert_same, stages

from omnikv import Edge, KVReceiver, KVSender, Route
from omnikv.core.boxes import Span
from omnikv.core.partition import LayerRule, Parallel
from omnikv.core.tokens import LastTokens, State
from omnikv.errors import ConnectError, ProducerFailed, ReceiveTimeout

NUM_LAYERS = 4
WINDOW_AND_STATE = [
    LayerRule(layers=Span(1, 2), num_heads=3, tokens=LastTokens(4)),
    LayerRule(layers=Span(2, 3), num_heads=5, tokens=State()),
    LayerRule(layers=Span(3, 4), num_heads=1, split=False, tokens=State()),
]
KINDS = {
    "tensor-parallel": {"num_kv_heads": 3, "source": Parallel(tp=3), "target": Parallel(tp=2)},
    "replicated": {"num_kv_heads": 2, "source": Parallel(tp=4), "target": Parallel(tp=2)},
    "more receivers than heads": {"num_kv_heads": 2, "source": Parallel(tp=2), "target": Parallel(tp=4)},
    "latent": {"num_kv_heads": 1, "source": Parallel(tp=2), "target": Parallel(cp=3)},
    "pipeline": {"num_kv_heads": 2, "source": Parallel(pp=3), "target": Parallel(pp=2, tp=2)},
    "interleaved": {"num_kv_heads": 1, "source": Parallel(cp=3, cp_block=1), "target": Parallel(cp=2, cp_block=2)},
    "zigzag": {"num_kv_heads": 1, "source": Parallel(cp=2, cp_zigzag=True), "target": Parallel(cp=3)},
    "hybrid": {"num_kv_heads": 2, "source": Parallel(tp=2), "target": Parallel(tp=3), "rules": WINDOW_AND_STATE},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def route_of(kind, namespace):
    edge = Edge(from_stage="prefill", to_stage="decode", namespace=namespace)
    return Route.parallel(edge, num_layers=NUM_LAYERS, **KINDS[kind])


def send(sender, num_tokens, *, attempt=0):
    boxes = sender.route.source_boxes[sender.rank]
    sender.send("req", boxed_cache(boxes, num_tokens), num_tokens=num_tokens, attempt=attempt)


def assert_received(receiver, num_tokens, *, attempt=0):
    with receiver.receive("req", timeout_s=10, attempt=attempt) as kv:
        assert_same(kv.layers, boxed_cache(receiver.route.target_boxes[receiver.rank], num_tokens))
        assert kv.num_tokens == num_tokens


@kinds
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 13])
def test_a_request_arrives_however_few_tokens_it_has(transport, namespace, kind, num_tokens):
    with stages(route_of(kind, namespace), transport) as (senders, receivers):
        for sender in senders:
            send(sender, num_tokens)
        for receiver in receivers:
            assert_received(receiver, num_tokens)
        assert [sender.drain(timeout_s=10) for sender in senders] == [0] * len(senders)


@kinds
def test_d20_d35_nothing_is_handed_out_or_lost_while_one_part_is_late(transport, namespace, kind):
    with stages(route_of(kind, namespace), transport) as (senders, receivers):
        late, *others = senders
        for sender in others:
            send(sender, 13)
        for receiver in receivers:
            if any(piece.source_rank == late.rank for piece in receiver.route.pieces_to(receiver.rank)):
                with pytest.raises(ReceiveTimeout, match=r"nothing from source ranks? 0\b.* nothing was consumed"):
                    receiver.receive("req", timeout_s=0.01)
        send(late, 13)
        for receiver in receivers:
            assert_received(receiver, 13)
        assert [sender.drain(timeout_s=10) for sender in senders] == [0] * len(senders)


@kinds
def test_a_rank_that_fails_is_told_at_once_to_those_who_need_it_and_the_next_attempt_arrives(
    transport, namespace, kind
):
    with stages(route_of(kind, namespace), transport) as (senders, receivers):
        failing, *others = senders
        for sender in others:
            send(sender, 13)
        failing.fail("req", "out of memory")
        for receiver in receivers:
            if any(piece.source_rank == failing.rank for piece in receiver.route.pieces_to(receiver.rank)):
                with pytest.raises(ProducerFailed, match="out of memory"):
                    receiver.receive("req", timeout_s=10)
            receiver.discard("req")
        for sender in senders:
            send(sender, 13, attempt=1)
        for receiver in receivers:
            assert_received(receiver, 13, attempt=1)
        assert [sender.drain(timeout_s=10) for sender in senders] == [0] * len(senders)


@kinds
def test_d21_a_peer_that_has_another_number_of_layers_in_mind_is_refused(namespace, kind):
    route = route_of(kind, namespace)
    other = Route.parallel(route.edge, num_layers=NUM_LAYERS + 1, **KINDS[kind])
    [piece, *_] = route.pieces_to(0)
    with KVSender(route, piece.source_rank, transport="memory") as sender:
        send(sender, 3)
        with KVReceiver(other, 0, transport="memory") as receiver, pytest.raises(ConnectError, match="do not fit"):
            receiver.receive("req", timeout_s=5)
