"""Asks a sender's Mooncake connector what it holds, as receivers do before they pull.

A sender listens on a ZeroMQ ROUTER socket. A receiver sends `QUERY_INFO` followed by a msgpack-encoded `QueryRequest`
from a REQ socket and reads one frame: a `QueryResponse`, or `INFO_NOT_FOUND`. A REQ socket that missed an answer can
never be used again, so it is thrown away and the next query connects anew. ZeroMQ sockets belong to one thread, so
each thread has its own.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from omnikv.core.messages import INFO_NOT_FOUND, QUERY_INFO, QueryRequest, QueryResponse
from omnikv.errors import TransportUnavailable

logger = logging.getLogger("omnikv.vllm_omni")

QUERY_TIMEOUT_MS = 5000
_NAME = "mooncake"


class SenderMetadata(TypedDict):
    """What one sender holds under a key, and where to ask for it; published as a plain dict."""

    source_host: str
    source_port: int
    data_size: int
    is_fast_path: bool


class SenderQueries:
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

    def _query_metadata_at(
        self, get_key: str, host: str, port: int, timeout_ms: int | None = None
    ) -> SenderMetadata | None:
        """What the sender at `host:port` holds under `get_key`; None if nothing, or if it cannot be asked in time.

        Raises:
            TransportUnavailable: pyzmq is not installed, or this connector is closed.
        """
        zmq_addr = f"tcp://{host}:{port}"
        try:
            socket = self._get_req_socket(zmq_addr, QUERY_TIMEOUT_MS if timeout_ms is None else timeout_ms)
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
        zmq = load_zmq()
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


def load_zmq() -> Any:
    """The library `zmq`.

    Raises:
        TransportUnavailable: it is not installed.
    """
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise TransportUnavailable(
            "Mooncake connectors speak over ZeroMQ: pip install 'omnikv[mooncake]', or pyzmq alone", transport=_NAME
        ) from error


def _read_answer(answer: bytes, get_key: str, host: str, port: int) -> SenderMetadata:
    response = msgspec.msgpack.decode(answer, type=QueryResponse)
    if response.request_id != get_key or response.data_size < 0:
        raise ValueError(f"the answer does not fit the question: {response!r}")
    return SenderMetadata(
        source_host=host, source_port=port, data_size=response.data_size, is_fast_path=response.is_fast_path
    )
