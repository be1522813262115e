"""Metadata queries to a sender's Mooncake connector, over real sockets on the loopback interface."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import msgspec
import pytest

from omnikv.core.messages import INFO_NOT_FOUND, QUERY_INFO, QueryRequest, QueryResponse
from omnikv.errors import TransportUnavailable
from omnikv.integrations.vllm_omni import mooncake_query
from omnikv.integrations.vllm_omni.mooncake_query import SenderQueries

zmq = pytest.importorskip("zmq", reason="pyzmq is an optional library")
HOST = "127.0.0.1"


class Sender:
    """A sender's listener: a ROUTER socket that answers as `answer(payload)` says, or not at all when that is None."""

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port: int = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._stop_address = f"inproc://stop-{self.port}"
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(self._stop_address)
        self.questions: list[bytes] = []
        self.peers: set[bytes] = set()
        self._thread = threading.Thread(target=self._serve, name="sender")
        self._thread.start()

    def _serve(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect(self._stop_address)
        poller = zmq.Poller()
        poller.register(stop, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while stop not in (ready := dict(poller.poll())):
            if self._socket in ready:
                peer, _, payload = self._socket.recv_multipart()
                self.questions.append(payload)
                self.peers.add(peer)
                answer = self._answer(payload)
                if answer is not None:
                    self._socket.send_multipart([peer, b"", answer])
        stop.close(linger=0)

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)


def holding(data_size_by_key: dict[str, int]) -> Callable[[bytes], bytes]:
    """Answers like an engine's listener that holds these keys."""

    def answer(payload: bytes) -> bytes:
        assert payload.startswith(QUERY_INFO)
        query = msgspec.msgpack.decode(payload[len(QUERY_INFO) :], type=QueryRequest)
        if query.request_id not in data_size_by_key:
            return INFO_NOT_FOUND
        size = data_size_by_key[query.request_id]
        return msgspec.msgpack.encode({"request_id": query.request_id, "data_size": size, "is_fast_path": True})

    return answer


@pytest.fixture
def start_sender():
    senders: list[Sender] = []

    def start(answer: Callable[[bytes], bytes | None]) -> Sender:
        senders.append(Sender(answer))
        return senders[-1]

    yield start
    for sender in senders:
        sender.close()


@pytest.fixture
def connector(monkeypatch):
    monkeypatch.setattr(mooncake_query, "QUERY_TIMEOUT_MS", 300)
    connector = SenderQueries({"role": "receiver"})
    yield connector
    connector.close()


def test_a_sender_that_holds_the_key_tells_size_and_kind(connector, start_sender):
    sender = start_sender(holding({"r1@a_b": 4096}))
    assert connector._query_metadata_at("r1@a_b", HOST, sender.port) == {
        "source_host": HOST,
        "source_port": sender.port,
        "data_size": 4096,
        "is_fast_path": True,
    }


def test_a_key_that_the_sender_does_not_hold_is_none_and_the_next_query_still_works(connector, start_sender):
    sender = start_sender(holding({"r2": 7}))
    assert connector._query_metadata_at("r1", HOST, sender.port) is None
    found = connector._query_metadata_at("r2", HOST, sender.port)
    assert found is not None
    assert found["data_size"] == 7


def test_queries_to_one_address_share_a_socket_and_threads_do_not(connector, start_sender):
    keys = {f"r{n}": n for n in range(40)}
    sender = start_sender(holding(keys))
    assert connector._query_metadata_at("r1", HOST, sender.port) == connector._query_metadata_at(
        "r1", HOST, sender.port
    )
    assert len(sender.peers) == 1
    everyone_here = threading.Barrier(4, timeout=30)

    def ask_ten(first: int) -> list[int]:
        everyone_here.wait()
        answers = [connector._query_metadata_at(f"r{n}", HOST, sender.port) for n in range(first, first + 10)]
        return [answer["data_size"] for answer in answers if answer is not None]

    with ThreadPoolExecutor(4) as pool:
        sizes = [size for part in pool.map(ask_ten, range(0, 40, 10)) for size in part]
    assert sizes == list(range(40))
    assert len(sender.peers) == 5


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not msgpack",
        msgspec.msgpack.encode({"request_id": "r1"}),
        msgspec.msgpack.encode({"request_id": "r1", "data_size": "big", "is_fast_path": True}),
        msgspec.msgpack.encode({"request_id": "r1", "data_size": -1, "is_fast_path": True}),
        msgspec.msgpack.encode({"request_id": "another", "data_size": 1, "is_fast_path": True}),
    ],
    ids=["empty", "garbage", "fields missing", "wrong type", "negative size", "another key"],
)
def test_an_answer_that_cannot_be_trusted_is_none_and_its_socket_is_thrown_away(connector, start_sender, answer):
    sender = start_sender(lambda payload: answer)
    assert connector._query_metadata_at("r1", HOST, sender.port) is None
    assert connector._query_metadata_at("r1", HOST, sender.port) is None
    assert len(sender.peers) == 2


def test_a_sender_that_stays_silent_is_none_and_answers_again_later(connector, start_sender):
    silent_once = iter([None, b"late"])
    answer = holding({"r1": 5})
    sender = start_sender(lambda payload: next(silent_once, b"") and answer(payload))
    assert connector._query_metadata_at("r1", HOST, sender.port) is None
    found = connector._query_metadata_at("r1", HOST, sender.port)
    assert found is not None
    assert found["data_size"] == 5


@pytest.mark.parametrize(("host", "port"), [(HOST, 1), ("no such host!", 5), (HOST, 99999)])
def test_a_sender_that_cannot_be_reached_is_none(connector, host, port):
    assert connector._query_metadata_at("r1", host, port) is None


def test_the_known_sender_of_a_rank_is_asked_else_the_default_one(connector, start_sender):
    default, of_rank_2 = start_sender(holding({"r": 1})), start_sender(holding({"r": 2}))
    assert connector._query_metadata_from_sender("r") is None
    connector.update_sender_info("auto", default.port)
    assert connector._query_metadata_from_sender("r") is None
    connector.update_sender_info(HOST, default.port)
    connector.update_sender_info(HOST, of_rank_2.port, sender_rank=2)
    sizes = [connector._query_metadata_from_sender("r", rank)["data_size"] for rank in (None, 2, 3)]
    assert sizes == [1, 2, 1]


def test_a_default_sender_may_come_with_the_configuration(start_sender):
    sender = start_sender(holding({"r": 9}))
    connector = SenderQueries({"sender_host": HOST, "sender_zmq_port": sender.port})
    try:
        assert connector._query_metadata_from_sender("r")["data_size"] == 9
    finally:
        connector.close()


def test_a_closed_connector_says_so_and_closes_twice(connector, start_sender):
    sender = start_sender(holding({"r1": 1}))
    assert connector._query_metadata_at("r1", HOST, sender.port) is not None
    connector.close()
    connector.close()
    with pytest.raises(TransportUnavailable, match="closed"):
        connector._query_metadata_at("r1", HOST, sender.port)


def test_without_pyzmq_a_query_says_what_to_install(connector, monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(TransportUnavailable, match=r"pip install .*pyzmq") as refusal:
        connector._query_metadata_at("r1", HOST, 5)
    assert refusal.value.transport == "mooncake"
    assert isinstance(refusal.value.__cause__, ImportError)


def test_a_query_needs_nothing_of_its_connector_but_a_socket():
    connector = MagicMock(spec=SenderQueries)
    answer = QueryResponse(request_id="k", data_size=3, is_fast_path=False)
    connector._get_req_socket.return_value.recv.return_value = msgspec.msgpack.encode(answer)
    found = SenderQueries._query_metadata_at(connector, "k", "host", 4)
    assert found == {"source_host": "host", "source_port": 4, "data_size": 3, "is_fast_path": False}
    connector._get_req_socket.assert_called_once_with("tcp://host:4", 5000)
    connector._invalidate_req_socket.assert_not_called()
