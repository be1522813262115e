"""The published Mooncake connector: its wire, its memory, and its keys, with an engine that copies in this process."""

from __future__ import annotations

import ctypes
import threading
import time

import msgspec
import pytest
import torch

from omnikv.core.messages import INFO_NOT_FOUND, QUERY_INFO, QueryRequest, QueryResponse
from omnikv.errors import ConfigError, TransportError
from omnikv.integrations.vllm_omni import mooncake_memory
from omnikv.integrations.vllm_omni.mooncake import MooncakeTransferEngineConnector
from omnikv.integrations.vllm_omni.mooncake_sender import TRANS_ERROR, MooncakeAgentMetadata

zmq = pytest.importorskip("zmq", reason="pyzmq is an optional library")
HOST = "127.0.0.1"
POOL_NBYTES = 1 << 20


class CopyingEngine:
    """Writes within this process, as soon as it may, with the code that it is told to end with."""

    port = 7

    def __init__(self):
        self.code = 0
        self.writes = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.registered = []

    def register(self, address, nbytes):
        self.registered.append(address)
        return b""

    def unregister(self, address):
        self.registered.remove(address)

    def write(self, peer, locals_, remotes, sizes):
        self.writes.append(peer)
        assert self.may_write.wait(30)
        if self.code == 0:
            for here, there, nbytes in zip(locals_, remotes, sizes, strict=True):
                ctypes.memmove(there, here, nbytes)
        return self.code


@pytest.fixture
def engine(monkeypatch):
    engine = CopyingEngine()
    monkeypatch.setattr(mooncake_memory, "mooncake_engine", lambda host, protocol, devices: engine)
    yield engine
    assert engine.registered == []


@pytest.fixture
def open_connector(engine):
    made = []

    def make(role, **more):
        config = {"role": role, "host": HOST, "zmq_port": 0, "memory_pool_size": POOL_NBYTES, **more}
        made.append(MooncakeTransferEngineConnector(config))
        return made[-1]

    yield make
    engine.may_write.set()
    for connector in reversed(made):
        connector.close()


@pytest.fixture
def sender(open_connector):
    return open_connector("sender")


@pytest.fixture
def receiver(open_connector, sender):
    return open_connector("receiver", sender_host=HOST, sender_zmq_port=sender.zmq_port)


def ask(port, request):
    """The answer to one frame of a receiver's, from a bare socket."""
    with zmq.Context() as context, context.socket(zmq.REQ) as bare:
        bare.setsockopt(zmq.LINGER, 0)
        bare.setsockopt(zmq.RCVTIMEO, 30000)
        bare.connect(f"tcp://{HOST}:{port}")
        bare.send(request)
        return bare.recv()


def query(port, key):
    return ask(port, QUERY_INFO + msgspec.msgpack.encode(QueryRequest(request_id=key)))


@pytest.mark.parametrize("data", [b"raw bytes", torch.arange(100, dtype=torch.float16).reshape(10, 10)])
def test_raw_payloads_arrive_in_the_pool_and_are_consumed_by_one_pull(sender, receiver, data):
    done, nbytes, metadata = sender.put("0", "1", "r1", data)
    assert done
    assert metadata == {"source_host": HOST, "source_port": sender.zmq_port, "data_size": nbytes, "is_fast_path": True}
    buffer, size = receiver.get("0", "1", "r1")
    with buffer:
        assert (size, buffer.size) == (nbytes, nbytes)
        expected = data if isinstance(data, bytes) else bytes(data.view(torch.uint8).flatten().tolist())
        assert buffer.to_bytes() == expected
    assert receiver.get("0", "1", "r1") is None
    assert sender.health()["held"] == 0
    assert receiver._memory.rooms.free_nbytes == POOL_NBYTES


def test_an_object_arrives_as_one(sender, receiver):
    sender.put("0", "1", "r1", {"layers": [torch.ones(2, 2)]})
    got, _ = receiver.get("0", "1", "r1")
    assert got["layers"][0].tolist() == [[1, 1], [1, 1]]
    assert receiver._memory.rooms.free_nbytes == POOL_NBYTES


@pytest.mark.parametrize("told", ["everything", "where", "nothing"])
def test_metadata_in_its_published_forms_leads_to_the_payload(sender, receiver, told):
    _, _, said = sender.put("0", "1", "r1", b"payload")
    where = {name: said[name] for name in ("source_host", "source_port")}
    metadata = {"everything": said, "where": where, "nothing": None}[told]
    buffer, _ = receiver.get("0", "1", "r1", metadata)
    assert buffer.to_bytes() == b"payload"
    buffer.release()


def test_one_receiver_pulls_from_several_sender_ranks(open_connector, receiver):
    senders = [open_connector("sender") for _ in range(4)]
    for rank, sender in enumerate(senders):
        sender.put("0", "1", "r1", bytes([rank]) * 1000)
    for rank, sender in enumerate(senders):
        where = {"source_host": HOST, "source_port": sender.zmq_port}
        buffer, _ = receiver.get("0", "1", "r1", where)
        with buffer:
            assert buffer.to_bytes() == bytes([rank]) * 1000


def test_a_sender_answers_queries_in_the_published_form(sender):
    sender.put("0", "1", "r1", b"12345")
    answer = msgspec.msgpack.decode(query(sender.zmq_port, "r1@0_1"), type=QueryResponse)
    assert answer == QueryResponse(request_id="r1@0_1", data_size=5, is_fast_path=True)
    assert query(sender.zmq_port, "r1") == INFO_NOT_FOUND


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        QUERY_INFO + b"\xc1",
        msgspec.msgpack.encode(MooncakeAgentMetadata(HOST, 7, "r1@0_1", [64, 64], [3, 2])),
        msgspec.msgpack.encode(MooncakeAgentMetadata(HOST, 7, "r1@0_1", [64], [1 << 40])),
        msgspec.msgpack.encode(MooncakeAgentMetadata(HOST, 7, "r1@0_1", [0], [5])),
        msgspec.msgpack.encode(MooncakeAgentMetadata(HOST, 7, "unknown", [64], [5])),
    ],
    ids=["empty", "garbage", "garbage query", "two stretches", "another size", "nowhere", "unknown key"],
)
def test_a_request_that_does_not_fit_is_answered_and_nothing_is_written(sender, engine, request_bytes):
    sender.put("0", "1", "r1", b"12345")
    assert ask(sender.zmq_port, request_bytes) == TRANS_ERROR
    assert engine.writes == []
    assert sender.health()["held"] == 1


def test_d32_a_write_that_fails_keeps_the_payload_and_the_next_pull_brings_it(sender, receiver, engine, caplog):
    sender.put("0", "1", "r1", b"payload")
    engine.code = -17
    assert receiver.get("0", "1", "r1") is None
    assert "the engine says -17" in caplog.text
    engine.code = 0
    buffer, _ = receiver.get("0", "1", "r1")
    assert buffer.to_bytes() == b"payload"
    buffer.release()
    assert receiver.health()["errors"] == 1


def test_d11_a_deadline_holds_while_the_engine_blocks_and_late_bytes_land_in_nobodys_memory(sender, receiver, engine):
    sender.put("0", "1", "slow", b"L" * 4096)
    engine.may_write.clear()
    began = time.monotonic()
    assert receiver.get_with_deadline("0", "1", "slow", deadline=began + 0.2) is None
    assert time.monotonic() - began < 5
    rooms = receiver._memory.rooms
    assert rooms.quarantined_nbytes == 4096
    engine.may_write.set()
    while rooms.quarantined_nbytes:
        receiver._pulls.look_at_late()
    assert rooms.free_nbytes == POOL_NBYTES
    assert receiver.health()["timeouts"] == 1


def test_a_sender_that_is_not_there_costs_no_more_than_the_deadline(open_connector):
    receiver = open_connector("receiver")
    began = time.monotonic()
    nowhere = {"source_host": HOST, "source_port": 9}
    assert receiver.get_with_deadline("0", "1", "r1", nowhere, deadline=began + 0.2) is None
    assert time.monotonic() - began < 4


def test_a_payload_withdrawn_while_it_is_written_stays_until_the_write_has_ended(sender, receiver, engine):
    sender.put("0", "1", "r1", b"S" * 4096)
    free = sender._memory.rooms.free_nbytes
    engine.may_write.clear()
    pulled = []
    thread = threading.Thread(target=lambda: pulled.append(receiver.get("0", "1", "r1")))
    thread.start()
    while not engine.writes:
        time.sleep(0)
    sender.cleanup("r1", "0", "1")
    assert sender._memory.rooms.free_nbytes == free
    engine.may_write.set()
    thread.join()
    assert pulled[0][0].to_bytes() == b"S" * 4096
    pulled[0][0].release()
    assert sender._memory.rooms.free_nbytes == POOL_NBYTES


def test_a_payload_that_nobody_pulls_goes_when_its_time_is_over(open_connector):
    sender = open_connector("sender", buffer_ttl_seconds=0.01)
    sender.put("0", "1", "r1", b"payload")
    give_up = time.monotonic() + 30
    while sender.health()["held"] and time.monotonic() < give_up:
        threading.Event().wait(0.02)
    assert sender.health()["held"] == 0
    assert sender._memory.rooms.free_nbytes == POOL_NBYTES


def test_what_does_not_fit_is_refused_and_what_is_replaced_is_freed(sender):
    assert sender.put("0", "1", "big", bytes(POOL_NBYTES + 1)) == (False, 0, None)
    assert sender.put("0", "1", "none", b"") == (False, 0, None)
    for _ in range(3):
        assert sender.put("0", "1", "same", bytes(POOL_NBYTES // 2))[0]
        sender.cleanup("same@0_1")
    assert sender.health()["held"] == 0


def test_wrong_settings_and_wrong_calls_say_what_to_do(open_connector, receiver):
    with pytest.raises(ConfigError, match="role must be"):
        open_connector("both")
    with pytest.raises(ConfigError, match="cannot be put at a receiver"):
        receiver.put("0", "1", "r1", b"x")
    with pytest.raises(ConfigError, match="both stages or none"):
        receiver.cleanup("r1", "0")
    with pytest.raises(ConfigError, match="no known sender"):
        open_connector("receiver").get("0", "1", "r1")
    with pytest.raises(ConfigError, match="cannot be had here"):
        open_connector("sender", memory_pool_size=0)


def test_a_port_in_use_is_an_error_that_names_it(open_connector, sender, engine):
    with pytest.raises(TransportError, match=rf"{HOST}:{sender.zmq_port} .*change zmq_port"):
        open_connector("sender", zmq_port=sender.zmq_port)


def test_a_closed_connector_says_so_and_closes_twice(receiver, sender):
    for connector in (receiver, sender):
        connector.close()
        connector.close()
        assert connector.health()["status"] == "unhealthy"
    with pytest.raises(TransportError, match="closed"):
        receiver.get("0", "1", "r1")
    with pytest.raises(TransportError, match="closed"):
        sender.put("0", "1", "r1", b"x")


def test_the_real_engine_brings_a_payload_where_it_is_installed():
    pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake's engine cannot be loaded here")
    config = {"host": HOST, "protocol": "tcp", "memory_pool_size": 8 << 20}
    sender = MooncakeTransferEngineConnector({**config, "role": "sender", "zmq_port": 0})
    receiver = MooncakeTransferEngineConnector({**config, "role": "receiver"})
    try:
        payload = bytes(range(256)) * 4096
        _, _, metadata = sender.put("0", "1", "r1", payload)
        buffer, _ = receiver.get_with_deadline("0", "1", "r1", metadata, deadline=time.monotonic() + 30)
        with buffer:
            assert buffer.to_bytes() == payload
    finally:
        receiver.close()
        sender.close()
