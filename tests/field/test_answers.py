"""Field reports about answers: absent, broken and foreign are three, and each is said with what it is about."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omnikv import KVReceiver, KVSender, PayloadId, Route
from omnikv.core.keys import Edge
from omnikv.errors import (
    ConfigError,
    ConnectError,
    HandoffError,
    OmniKVError,
    ProducerFailed,
    PutRejected,
    ReceiveTimeout,
    WireError,
)
from omnikv.transports.shm_address import open_socket, rank_address

SOON_S = 60.0
_names = (f"answers-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(params=["memory", "shm"])
def transport(request):
    return request.param


@pytest.fixture
def route():
    return Route.tp("prefill", "decode", num_kv_heads=2, from_tp=1, to_tp=1, namespace=next(_names))


@pytest.fixture
def ends(transport, route):
    with KVSender(route, 0, transport=transport) as sender, KVReceiver(route, 0, transport=transport) as receiver:
        yield sender, receiver


def layers_of(value, heads=2, num_layers=3):
    return [
        (torch.full((4, heads, 8), float(value)), torch.full((4, heads, 8), -float(value))) for _ in range(num_layers)
    ]


def put_bytes(sender, request_id, data):
    (identity,) = sender._payloads(request_id, "primary", 0)
    with sender._transport.reserve(identity, len(data)) as slot:
        slot.buffer[:] = data
        slot.publish()


FOREIGN = {
    "of another format": b"\x80\x05\x95 a pickle, for instance" * 10,
    "cut short": None,
    "empty": b"",
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_d16_what_is_there_but_no_payload_is_an_error_of_its_own_at_once_and_absent_is_waited_for(ends, kind):
    sender, receiver = ends
    data = FOREIGN[kind]
    if data is None:
        sender.send("whole", layers_of(1))
        (identity,) = receiver._payloads("whole", "primary", 0)
        with receiver._transport.get(identity, deadline=time.monotonic() + SOON_S) as lease:
            data = bytes(lease.buffer)[:-100]
    put_bytes(sender, "r1", data)
    with pytest.raises(WireError):
        receiver.receive("r1", timeout_s=1000.0)
    with pytest.raises(ReceiveTimeout) as absent:
        receiver.receive("r2", timeout_s=0.01)
    assert absent.value.retryable
    assert not absent.value.consumed


def answer_all(listener, words, connections):
    with contextlib.suppress(OSError):
        while True:
            connections.append(listener.accept()[0])
            connections[-1].send(words)


def test_d16_a_foreign_process_at_the_address_is_an_error_and_not_an_absent_producer(route):
    connections = []
    with open_socket() as squatter, ThreadPoolExecutor(1) as pool:
        squatter.setblocking(True)
        squatter.bind(rank_address(route.edge, "source", 0))
        squatter.listen(4)
        pool.submit(answer_all, squatter, b"220 another service ready\r\n", connections)
        with (
            KVReceiver(route, 0, transport="shm") as receiver,
            pytest.raises(ConnectError, match="no message that this side takes"),
        ):
            receiver.receive("r1", timeout_s=1000.0)
        squatter.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


def test_d15_a_send_that_fails_half_way_and_a_payload_that_does_not_decode_leave_nothing(ends, transport):
    sender, receiver = ends
    before = sorted(os.listdir("/dev/shm"))
    broken = layers_of(1)
    broken[1] = (torch.ones(4, 2, 8), torch.ones(5, 2, 8))
    with pytest.raises(ConfigError):
        sender.send("r1", broken)
    put_bytes(sender, "r2", b"no payload")
    for _ in range(3):
        with pytest.raises(WireError):
            receiver.receive("r2", timeout_s=SOON_S)
    sender.abort("r2")
    sender.send("r1", layers_of(2))
    receiver.receive("r1", timeout_s=SOON_S).close()
    assert sender.drain(timeout_s=SOON_S) == 0
    assert sorted(os.listdir("/dev/shm")) == before


def test_d24_a_request_that_the_two_sides_call_by_different_names_fails_with_both_of_them(ends):
    sender, receiver = ends
    sender.send("abc-1a2b3c4d", layers_of(1))
    sender.send("unrelated", layers_of(2))
    with pytest.raises(ReceiveTimeout, match=r"'abc-9f8e7d6c'.*'abc-1a2b3c4d'.*one id"):
        receiver.receive("abc-9f8e7d6c", timeout_s=0.05)


def test_d24_local_names_play_no_part_where_both_sides_state_one_transfer_id(ends):
    sender, receiver = ends
    sender.send("abc", layers_of(1), metadata={"local_id": "abc-1a2b3c4d"})
    with receiver.receive("abc", timeout_s=SOON_S) as kv:
        assert (kv.request_id, kv.metadata["local_id"]) == ("abc", "abc-1a2b3c4d")


def test_d24_a_timeout_where_nothing_is_there_names_the_one_id_that_is_known(ends):
    _, receiver = ends
    with pytest.raises(
        ReceiveTimeout, match="request 'abc-9f8e7d6c': nothing from source rank 0 by the deadline; nothing"
    ):
        receiver.receive("abc-9f8e7d6c", timeout_s=0.01)


def test_d35_a_payload_that_turns_out_broken_after_some_layers_is_never_handed_out(transport):
    """get fails in the middle: the caller gets the failure, and no tensor of it."""
    route = Route.tp("p", "d", num_kv_heads=2, from_tp=2, to_tp=1, namespace=next(_names))
    with (
        KVSender(route, 0, transport=transport) as first,
        KVSender(route, 1, transport=transport) as second,
        KVReceiver(route, 0, transport=transport) as receiver,
    ):
        first.send("r1", layers_of(1, heads=1, num_layers=8))
        second.send("r1", layers_of(1, heads=1, num_layers=3))
        with pytest.raises(OmniKVError, match="3 against 8 layers"):
            receiver.receive("r1", timeout_s=SOON_S)
        first.send("r2", layers_of(1, heads=1))
        second.fail("r2", "died after layer 3 of 8")
        with pytest.raises(ProducerFailed, match="after layer 3 of 8"):
            receiver.receive("r2", timeout_s=SOON_S)
        # What the first one sent was given back, not used.
        assert first.census()["ready"] == 2


def test_x07_a_live_identity_is_not_put_twice_and_the_first_payload_stays(ends):
    sender, receiver = ends
    sender.send("r1", layers_of(1))
    with pytest.raises(PutRejected, match="already live") as refused:
        sender.send("r1", layers_of(2))
    assert refused.value.already_live
    with receiver.receive("r1", timeout_s=SOON_S) as kv:
        assert kv.layers[0].key.unique().item() == 1
        with pytest.raises(PutRejected):
            sender.send("r1", layers_of(3))


STRANGE = ["a/b", "x" * 300, "x" * 1024, "..", "%2F", "a_b_0_1", "Grüße-日本-🙂", "a\nb", " ", "/dev/shm/../etc"]


@pytest.mark.parametrize("request_id", STRANGE)
def test_x08_any_text_is_a_request_id(ends, request_id):
    sender, receiver = ends
    sender.send(request_id, layers_of(1))
    with receiver.receive(request_id, timeout_s=SOON_S) as kv:
        assert kv.request_id == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 1025, "\ud800", 7])
def test_x08_what_is_no_request_id_is_refused_on_both_sides_with_the_reason(ends, request_id):
    sender, receiver = ends
    with pytest.raises(ConfigError, match="transfer_id"):
        sender.send(request_id, layers_of(1))
    with pytest.raises(ConfigError, match="transfer_id"):
        receiver.receive(request_id, timeout_s=1000.0)


@pytest.mark.parametrize("late", ["times out", "fails", "is aborted"])
def test_x16_one_of_two_shards_is_given_back_and_a_retry_gets_both(transport, late):
    route = Route.tp("p", "d", num_kv_heads=2, from_tp=2, to_tp=1, namespace=next(_names))
    with (
        KVSender(route, 0, transport=transport) as first,
        KVSender(route, 1, transport=transport) as second,
        KVReceiver(route, 0, transport=transport) as receiver,
    ):
        first.send("r1", layers_of(1, heads=1))
        if late == "fails":
            second.fail("r1", "slow disk")
        elif late == "is aborted":
            second.abort("r1")
        kinds = {"times out": ReceiveTimeout, "fails": ProducerFailed, "is aborted": HandoffError}
        with pytest.raises(kinds[late]):
            receiver.receive("r1", timeout_s=0.05)
        second.send("r1", layers_of(2, heads=1))
        with receiver.receive("r1", timeout_s=SOON_S) as kv:
            assert kv.layers[0].key[0, :, 0].tolist() == [1, 2]


def test_x06_d24_an_identity_keeps_its_fields_apart_and_the_published_key_is_a_projection_of_it():
    def identity(request_id, from_stage, to_stage="1", **terms):
        edge = Edge(from_stage=from_stage, to_stage=to_stage, namespace=terms.pop("namespace", "n"))
        return PayloadId(edge=edge, transfer_id=request_id, source_rank=0, target_rank=terms.pop("target", 0), **terms)

    one, other = identity("a_1", "0"), identity("a", "1_0")
    assert one.published_key(ranks=True) == other.published_key(ranks=True) == "a_1_0_0_0_0"
    different = [
        one,
        other,
        identity("a_1", "0", to_stage="2"),
        identity("a_1", "0", namespace="m"),
        identity("a_1", "0", role="cfg_text"),
        identity("a_1", "0", attempt=1),
        identity("a_1", "0", target=1),
    ]
    assert len({entry.encode() for entry in different}) == len(different)
    assert [PayloadId.decode(entry.encode()) for entry in different] == different
    assert one.published_key(ranks=False) == "omni_0_to_1_kv_cache_a_1"


def test_d34_an_identity_is_spelled_alike_in_every_process():
    program = (
        "from omnikv import PayloadId; from omnikv.core.keys import Edge;"
        "edge = Edge(from_stage='a/b', to_stage='é');"
        "print(PayloadId(edge=edge, transfer_id='r 1', source_rank=0, target_rank=1).encode())"
    )
    spelled = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(spelled) == 1
