"""The published methods over our own transports."""

from __future__ import annotations

import threading
import time
import uuid

import pytest
import torch
from tests.support.keyed import receive_kv

from omnikv.core.topology import KVTPTopology
from omnikv.errors import (
    AlreadyConsumed,
    ConfigError,
    ConnectError,
    ProducerFailed,
    PutRejected,
    ReceiveTimeout,
    TransportError,
)
from omnikv.handoff.engine_connector import Stages
from omnikv.handoff.keyed_assemble import ReceiveRoute
from omnikv.handoff.keyed_send import SendRoute, announce_failure, send_kv
from omnikv.handoff.transport_connector import TransportConnector
from omnikv.tensors.pack import KVCacheTransferData

EDGE = Stages("prefill", "decode")
SOON_S = 20.0


@pytest.fixture(params=["memory", "shm"])
def connect(request):
    """Makes connectors of one kind in a namespace of their own, closed at the end."""
    opened, namespace = [], f"connector-{uuid.uuid4().hex[:12]}"

    def make(source=1, target=1, rank=0, **more):
        topology = KVTPTopology(source, target, rank)
        connector = TransportConnector(request.param, topology, namespace=namespace, **more)
        opened.append(connector)
        return connector

    yield make
    for connector in opened:
        connector.close()


def kv(heads, request_id="r1", tokens=3):
    key = torch.tensor(heads, dtype=torch.float32).view(1, -1, 1).expand(tokens, len(heads), 4).contiguous()
    return KVCacheTransferData(request_id, {"key_cache": [key], "value_cache": [key + 100]}, [0], {"seq_len": tokens})


def send(connector, payload, topo=(1, 1, 0), hook=None):
    where = SendRoute(stages=EDGE, topo=KVTPTopology(*topo), key_hook=hook)
    return send_kv(connector, payload, where, closing=threading.Event())


def receive(connector, topo=(1, 1, 0), request_id="r1", timeout_s=SOON_S):
    where = ReceiveRoute(stages=EDGE, topo=KVTPTopology(*topo))
    return receive_kv(connector, request_id, where, timeout_s=timeout_s)


def heads_of(received):
    return received.data["layer_blocks"]["key_cache"][0][0, :, 0].tolist()


@pytest.mark.parametrize("request_id", ["r1", "a/b", "a_1", "with space", "ünï→", "x" * 300])
def test_x08_any_request_id_goes_through(connect, request_id):
    sender, receiver = connect(), connect()
    nbytes = send(sender, kv([5], request_id))
    received = receive(receiver, request_id=request_id)
    assert heads_of(received) == [5]
    assert received.nbytes == nbytes


def test_a_receiver_that_waits_is_woken(connect):
    sender, receiver = connect(), connect()
    got = []
    waiting = threading.Thread(target=lambda: got.append(heads_of(receive(receiver))))
    waiting.start()
    send(sender, kv([5]))
    waiting.join()
    assert got == [[5]]


def test_two_senders_serve_one_receiver(connect):
    senders, receiver = [connect(2, 1, rank) for rank in (0, 1)], connect(2, 1, 0)
    for rank, sender in enumerate(senders):
        send(sender, kv([10 + rank]), (2, 1, rank))
    assert heads_of(receive(receiver, (2, 1, 0))) == [10, 11]


def test_one_sender_serves_two_receivers_each_with_its_own_heads(connect):
    sender, receivers = connect(1, 2, 0), [connect(1, 2, rank) for rank in (0, 1)]
    send(sender, kv([10, 11]), (1, 2, 0))
    assert [heads_of(receive(receiver, (1, 2, rank))) for rank, receiver in enumerate(receivers)] == [[10], [11]]


def test_an_incomplete_set_is_not_lost_and_a_later_receive_has_it(connect):
    senders, receiver = [connect(2, 1, rank) for rank in (0, 1)], connect(2, 1, 0)
    send(senders[0], kv([10]), (2, 1, 0))
    with pytest.raises(ReceiveTimeout):
        receive(receiver, (2, 1, 0), timeout_s=0.05)
    send(senders[1], kv([11]), (2, 1, 1))
    assert heads_of(receive(receiver, (2, 1, 0))) == [10, 11]


def test_a_payload_is_consumed_once(connect):
    sender, receiver = connect(), connect()
    send(sender, kv([5]))
    receive(receiver)
    with pytest.raises(AlreadyConsumed):
        receive(receiver)


def test_x07_the_same_key_twice_is_refused_while_the_first_is_unread(connect):
    sender, receiver = connect(), connect()
    send(sender, kv([5]))
    with pytest.raises(PutRejected):
        sender.put(*EDGE, "omni_prefill_to_decode_kv_cache_r1", kv([6]).to_bytes())
    assert heads_of(receive(receiver)) == [5]


def test_x07_a_request_sent_twice_does_not_lose_its_first_payloads(connect):
    sender, receivers = connect(1, 2, 0), [connect(1, 2, rank) for rank in (0, 1)]
    send(sender, kv([10, 11]), (1, 2, 0))
    with pytest.raises(PutRejected):
        send(sender, kv([20, 21]), (1, 2, 0))
    assert [heads_of(receive(receiver, (1, 2, rank))) for rank, receiver in enumerate(receivers)] == [[10], [11]]


def test_when_one_of_several_puts_fails_every_receiver_is_told(connect, monkeypatch):
    sender, receivers = connect(1, 2, 0), [connect(1, 2, rank) for rank in (0, 1)]
    put = sender.put_plan

    def second_fails(*where, target_rank):
        if target_rank == 1:
            raise TransportError("the cable is out")
        return put(*where, target_rank=target_rank)

    monkeypatch.setattr(sender, "put_plan", second_fails)
    with pytest.raises(TransportError):
        send(sender, kv([10, 11]), (1, 2, 0))
    for rank, receiver in enumerate(receivers):
        with pytest.raises(ProducerFailed, match="the cable is out"):
            receive(receiver, (1, 2, rank))


def test_x06_equal_published_keys_on_different_edges_do_not_meet(connect):
    sender, receiver = connect(), connect()
    for to_stage, head in (("1", 5), ("2", 6)):
        sender.put("0", to_stage, "same key", kv([head]).to_bytes())
    leased, _ = receiver.get_with_deadline("0", "2", "same key", deadline=time.monotonic() + SOON_S)
    fields = KVCacheTransferData.from_bytes(leased.tensor.numpy().tobytes())
    assert fields["layer_blocks"]["key_cache"][0].unique().tolist() == [6]
    leased.release()


def test_d04_peers_that_state_different_topologies_refuse_each_other_at_once(connect):
    sender, receiver = connect(2, 2, 0), connect(1, 1, 0)
    send(sender, kv([5]), (2, 2, 0))
    with pytest.raises(ConnectError, match="from_tp"):
        receive(receiver, timeout_s=SOON_S)


def test_a_receiver_is_told_at_once_that_a_request_will_not_come(connect):
    sender, receiver = connect(), connect()
    where = SendRoute(stages=EDGE, topo=KVTPTopology(1, 1, 0))
    announce_failure(sender, "r1", where, "block 99 is outside the pool")
    with pytest.raises(ProducerFailed, match="block 99"):
        receive(receiver)


def test_a_hook_that_gives_the_wrong_number_of_keys_cannot_be_addressed(connect):
    with pytest.raises(ConfigError, match="gave 1 keys for the 2 receivers"):
        send(connect(1, 2, 0), kv([1, 2]), (1, 2, 0), hook=lambda *_: ["only one"])


def test_what_was_put_can_be_withdrawn(connect):
    sender, receiver = connect(), connect()
    sender.put(*EDGE, "k", kv([5]).to_bytes())
    sender.cleanup("k")
    with pytest.raises(ProducerFailed, match="withdrawn"):
        receiver.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + SOON_S)


def test_nothing_there_is_none_at_once(connect):
    sender, receiver = connect(), connect()
    sender.put(*EDGE, "k", kv([5]).to_bytes())
    assert receiver.get(*EDGE, "other") is None


def test_health_counts_and_a_closed_connector_says_so(connect):
    sender = connect()
    ok, nbytes, _ = sender.put(*EDGE, "k", torch.ones(16, dtype=torch.uint8))
    assert ok
    assert sender.health()["status"] == "healthy"
    assert (sender.health()["puts"], sender.health()["bytes_transferred"]) == (1, nbytes) == (1, 16)
    sender.close()
    sender.close()
    assert sender.health()["status"] == "closed"
    with pytest.raises(TransportError, match="closed"):
        sender.put(*EDGE, "k", b"x")


@pytest.mark.parametrize("data", [b"", {"a": 1}, torch.ones(3), torch.empty(0, dtype=torch.uint8), None])
def test_what_is_no_packed_payload_is_refused(connect, data):
    with pytest.raises(ConfigError, match="packed payload"):
        connect().put(*EDGE, "k", data)


def test_without_tensor_parallelism_an_engines_local_rank_does_not_matter(connect):
    sender, receiver = connect(1, 1, 0), connect(1, 1, 5)
    send(sender, kv([5]))
    assert heads_of(receive(receiver, (1, 1, 5))) == [5]


def test_a_payload_put_back_can_be_asked_for_again(connect):
    sender, receiver = connect(), connect()
    sender.put(*EDGE, "k", b"payload")
    for _ in range(2):
        leased, nbytes = receiver.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + SOON_S)
        assert nbytes == 7
        assert bytes(leased.tensor.tolist()) == b"payload"
        leased.put_back()


def test_a_namespace_must_have_a_name():
    with pytest.raises(ConfigError, match="namespace"):
        TransportConnector("memory", KVTPTopology(1, 1, 0), namespace="")
