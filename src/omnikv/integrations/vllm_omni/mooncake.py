"""Asks a sender's Mooncake connector what it holds: the metadata half of that connector, without its RDMA half.

A sender listens on a ZeroMQ ROUTER socket. A receiver sends `QUERY_INFO` followed by a msgpack-encoded `QueryRequest`
from a REQ socket and reads one frame: a `QueryResponse`, or `INFO_NOT_FOUND`. A REQ socket that missed an answer can
never be used again, so it is thrown away and the next query connects anew. ZeroMQ sockets belong to one thread, so
each thread has its own.

Payload bytes travel by RDMA through an engine that is not part of this release; `put` and `get` say so.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping
from typing import Any, NoReturn, TypedDict

import msgspec

from omnikv.core.messages import INFO_NOT_FOUND, QUERY_INFO, QueryRequest, QueryResponse
from omnikv.errors import TransportUnavailable

__all__ = ["INFO_NOT_FOUND", "QUERY_INFO", "MooncakeTransferEngineConnector", "QueryRequest", "QueryResponse"]

logger = logging.getLogger("omnikv.vllm_omni")

QUERY_TIMEOUT_MS = 5000
_NAME = "mooncake"


class SenderMetadata(TypedDict):
    """What one sender holds under a key, and where to ask for it; published as a plain dict."""

    source_host: str
    source_port: int
    data_size: int
    is_fast_path: bool


class MooncakeTransferEngineConnector:
    """Reads the metadata that senders publish under their keys. Safe to use from several threads; close it once."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """`config` may name the default sender, as `sender_host` and `sender_zmq_port`; other keys are not read."""
        config = config or {}
        self.sender_host: str | None = config.get("sender_host")
        self.sender_zmq_port: int | None = config.get("sender_zmq_port")
        self._sender_endpoints: dict[int, tuple[str, int]] = {}
        # By thread and address, for a REQ socket must not be shared between threads.
        self._sockets: dict[tuple[threading.Thread, str], Any] = {}
        self._lock = threading.Lock()
        self._context: Any = None
        self._closed = False

    def update_sender_info(self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None) -> None:
        """Nothing; later queries go to this sender: the one of `sender_rank`, or the default one when it is None."""
        if sender_rank is not None:
            self._sender_endpoints[sender_rank] = (sender_host, sender_zmq_port)
            return
        self.sender_host = sender_host
        self.sender_zmq_port = sender_zmq_port

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> NoReturn:
        """Never returns.

        Raises:
            TransportUnavailable: always; payload bytes need the RDMA engine.
        """
        raise _without_rdma(f"cannot send {put_key!r} from {from_stage} to {to_stage}", put_key)

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None) -> NoReturn:
        """Never returns.

        Raises:
            TransportUnavailable: always; payload bytes need the RDMA engine.
        """
        raise _without_rdma(f"cannot fetch {get_key!r} from {from_stage} to {to_stage}", get_key)

    def _query_metadata_at(self, get_key: str, host: str, port: int) -> SenderMetadata | None:
        """What the sender at `host:port` holds under `get_key`; None if nothing, or if it cannot be asked now.

        Raises:
            TransportUnavailable: pyzmq is not installed, or this connector is closed.
        """
        zmq_addr = f"tcp://{host}:{port}"
        try:
            socket = self._get_req_socket(zmq_addr, QUERY_TIMEOUT_MS)
            socket.send(QUERY_INFO + msgspec.msgpack.encode(QueryRequest(request_id=get_key)))
            answer = socket.recv()
            return None if answer == INFO_NOT_FOUND else _read_answer(answer, get_key, host, port)
        except TransportUnavailable:
            raise
        # edge: whatever ZeroMQ or the decoder says, this sender has no usable answer; callers poll until a deadline.
        except Exception as error:  # noqa: BLE001
            logger.debug("no metadata for %s at %s: %s", get_key, zmq_addr, error)
            self._invalidate_req_socket(zmq_addr)
            return None

    def _query_metadata_from_sender(self, get_key: str, sender_rank: int | None = None) -> SenderMetadata | None:
        """What the known sender of `sender_rank`, else the default one, holds; None too when none is known.

        Raises:
            TransportUnavailable: pyzmq is not installed, or this connector is closed.
        """
        host, port = self.sender_host, self.sender_zmq_port
        if sender_rank is not None:
            host, port = self._sender_endpoints.get(sender_rank, (host, port))
        if not host or not port or host.lower() == "auto":
            return None
        return self._query_metadata_at(get_key, host, int(port))

    def _get_req_socket(self, zmq_addr: str, timeout_ms: int) -> Any:
        """This thread's REQ socket to `zmq_addr`, connected, that waits `timeout_ms` at most either way.

        Raises:
            TransportUnavailable: pyzmq is not installed, or this connector is closed.
        """
        try:
            zmq: Any = importlib.import_module("zmq")
        except ImportError as error:
            message = "asking a Mooncake sender needs pyzmq: pip install pyzmq"
            raise TransportUnavailable(message, transport=_NAME, endpoint=zmq_addr) from error
        with self._lock:
            if self._closed:
                message = "this Mooncake connector is closed; make a new one"
                raise TransportUnavailable(message, transport=_NAME, endpoint=zmq_addr)
            mine = (threading.current_thread(), zmq_addr)
            if mine not in self._sockets:
                self._close_sockets_of_ended_threads()
                self._context = self._context or zmq.Context()
                socket = self._sockets[mine] = self._context.socket(zmq.REQ)
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(zmq_addr)
            socket = self._sockets[mine]
        socket.setsockopt(zmq.SNDTIMEO, timeout_ms)
        socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        return socket

    def _invalidate_req_socket(self, zmq_addr: str) -> None:
        """Nothing; the next query of this thread to `zmq_addr` connects anew."""
        with self._lock:
            socket = self._sockets.pop((threading.current_thread(), zmq_addr), None)
        if socket is not None:
            socket.close(linger=0)

    def _close_sockets_of_ended_threads(self) -> None:
        for thread, zmq_addr in [key for key in self._sockets if not key[0].is_alive()]:
            self._sockets.pop((thread, zmq_addr)).close(linger=0)

    def close(self) -> None:
        """Nothing; closes every thread's sockets. Call it when no query is under way. Idempotent."""
        with self._lock:
            self._closed = True
            sockets, self._sockets = self._sockets, {}
            context, self._context = self._context, None
        for socket in sockets.values():
            socket.close(linger=0)
        if context is not None:
            context.term()


def _read_answer(answer: bytes, get_key: str, host: str, port: int) -> SenderMetadata:
    response = msgspec.msgpack.decode(answer, type=QueryResponse)
    if response.request_id != get_key or response.data_size < 0:
        raise ValueError(f"the answer does not fit the question: {response!r}")
    return SenderMetadata(
        source_host=host, source_port=port, data_size=response.data_size, is_fast_path=response.is_fast_path
    )


def _without_rdma(what: str, key: str) -> TransportUnavailable:
    return TransportUnavailable(
        f"{what}: the RDMA engine that moves Mooncake payloads is not part of this release, only metadata queries are; "
        'use another transport, such as omnikv.KVSender(..., transport="shm") between processes of one host',
        transport=_NAME,
        key=key,
    )
