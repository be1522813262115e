"""What a Mooncake sender holds, and how it is pulled: a receiver asks, and the sender's engine writes.

A receiver sends one frame from a REQ socket to the sender's ROUTER. `QUERY_INFO` and a key asks what lies under it;
anything else is a `MooncakeAgentMetadata`, which asks to write what lies under its key to addresses in the receiver's
memory, and is answered by `TRANS_DONE` or `TRANS_ERROR` when the engine is done. A written payload is gone; one whose
write failed stays and can be pulled again; one that nobody pulls goes when its time to live is over.

Writes block, so each is made on a thread of a pool, and their answers go back through the listening thread, which owns
the socket. A payload that is withdrawn while it is being written stays in its place until the write has ended.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from omnikv.core.messages import INFO_NOT_FOUND, QUERY_INFO, QueryRequest, QueryResponse
from omnikv.errors import TransportError
from omnikv.integrations.vllm_omni.mooncake_query import load_zmq

logger = logging.getLogger("omnikv.vllm_omni")

TRANS_DONE = b"trans_done"
TRANS_ERROR = b"trans_error"
# Writes that may be under way at once; one to a dead host holds its thread until the engine gives up.
MAX_WRITES = 32
MAX_REQUEST_NBYTES = 1 << 16
_SWEEP_S = 1.0


class MooncakeAgentMetadata(msgspec.Struct, frozen=True):
    """A receiver's request to be written to: its engine's address, the key, and where each stretch goes."""

    remote_hostname: str
    remote_port: int
    request_id: str
    dst_addrs: list[int]
    lengths: list[int]


class Held(NamedTuple):
    """A payload in registered memory: where, how long, whether it is raw, and how to free it."""

    address: int
    nbytes: int
    is_fast_path: bool
    free: Callable[[], None]


class Writes(Protocol):
    """The engine that writes."""

    def write(self, peer: str, locals_: list[int], remotes: list[int], sizes: list[int]) -> int: ...


@dataclass(slots=True)
class _Entry:
    held: Held
    since: float
    num_writes: int = 0
    is_dropped: bool = False


class MooncakeSender:
    """Listens at `host` and `port` (0: any free one, see `port`) for receivers that pull what `hold` was given.

    Raises:
        TransportUnavailable: pyzmq is not installed.
        TransportError: the address is taken, or is none of this host's.
    """

    def __init__(self, engine: Writes, host: str, port: int, *, ttl_s: float) -> None:
        self._engine = engine
        self._ttl_s = ttl_s
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._zmq = zmq = load_zmq()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_NBYTES)
        try:
            where = f"tcp://{host}"
            self.port: int = self._socket.bind_to_random_port(where) if port == 0 else port
            if port:
                self._socket.bind(f"{where}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(
                f"a Mooncake sender cannot listen at {host}:{port} ({error}): change zmq_port, or host to an address "
                "of this machine",
                transport="mooncake",
                endpoint=f"{host}:{port}",
            ) from error
        self._answers: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._writers = ThreadPoolExecutor(MAX_WRITES, thread_name_prefix="omnikv-mooncake-write")
        self._thread = threading.Thread(target=self._serve, name="omnikv-mooncake-sender", daemon=True)
        self._thread.start()

    def hold(self, key: str, held: Held) -> None:
        """Nothing; receivers may pull this under `key`, in the place of what was there."""
        with self._lock:
            old = self._entries.pop(key, None)
            self._entries[key] = _Entry(held, time.monotonic())
            if old is not None:
                self._let_go(old)

    def drop(self, key: str) -> None:
        """Nothing; nobody can pull `key` any more."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._let_go(entry)

    def num_held(self) -> int:
        """How many payloads wait to be pulled."""
        with self._lock:
            return len(self._entries)

    def close(self) -> None:
        """Nothing; writes that are under way end, what is held is freed. Idempotent."""
        if not self._thread.is_alive():
            return
        self._answers.put(None)
        self._wake()
        self._thread.join()
        self._writers.shutdown(wait=True, cancel_futures=True)
        for key in list(self._entries):
            self.drop(key)
        self._context.destroy(linger=0)
        os.close(self._wake_fd)

    def _serve(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._wake_fd, self._zmq.POLLIN)
        swept_at = time.monotonic()
        while True:
            ready = dict(poller.poll(int(_SWEEP_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                answer = self._answers.get()
                if answer is None:
                    return
                self._socket.send_multipart([answer[0], b"", answer[1]])
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                self._take(frames[0], frames[-1])
            if time.monotonic() - swept_at >= _SWEEP_S:
                swept_at = time.monotonic()
                self._expire(swept_at)

    def _take(self, peer: bytes, request: bytes) -> None:
        try:
            if request.startswith(QUERY_INFO):
                query = msgspec.msgpack.decode(request[len(QUERY_INFO) :], type=QueryRequest)
                self._socket.send_multipart([peer, b"", self._describe(query.request_id)])
                return
            wanted = msgspec.msgpack.decode(request, type=MooncakeAgentMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("a Mooncake receiver sent %d bytes that are no request: %s", len(request), error)
            self._socket.send_multipart([peer, b"", TRANS_ERROR])
            return
        entry = self._begin(wanted)
        if entry is None:
            self._socket.send_multipart([peer, b"", TRANS_ERROR])
        else:
            self._writers.submit(self._write, peer, wanted, entry)

    def _describe(self, key: str) -> bytes:
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            return INFO_NOT_FOUND
        held = entry.held
        return msgspec.msgpack.encode(
            QueryResponse(request_id=key, data_size=held.nbytes, is_fast_path=held.is_fast_path)
        )

    def _begin(self, wanted: MooncakeAgentMetadata) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(wanted.request_id)
            if entry is None:
                return None
            if wanted.lengths != [entry.held.nbytes] or len(wanted.dst_addrs) != 1 or not wanted.dst_addrs[0]:
                logger.warning("a Mooncake receiver wants %s in another form than it has", wanted.request_id)
                return None
            entry.num_writes += 1
            return entry

    def _write(self, peer: bytes, wanted: MooncakeAgentMetadata, entry: _Entry) -> None:
        session = f"{wanted.remote_hostname}:{wanted.remote_port}"
        answer = TRANS_ERROR
        try:
            code = self._engine.write(session, [entry.held.address], wanted.dst_addrs, wanted.lengths)
            if code == 0:
                answer = TRANS_DONE
            else:
                logger.warning(
                    "writing %s to %s: the engine says %s; it can be pulled again", wanted.request_id, session, code
                )
        except Exception:  # edge: top of a background thread; the receiver must be answered
            logger.exception("writing %s to %s failed", wanted.request_id, session)
        with self._lock:
            entry.num_writes -= 1
            if answer == TRANS_DONE and self._entries.get(wanted.request_id) is entry:
                del self._entries[wanted.request_id]
                entry.is_dropped = True
            if entry.is_dropped and not entry.num_writes:
                entry.held.free()
        self._answers.put((peer, answer))
        self._wake()

    def _let_go(self, entry: _Entry) -> None:
        entry.is_dropped = True
        if not entry.num_writes:
            entry.held.free()

    def _expire(self, now: float) -> None:
        if self._ttl_s <= 0:
            return
        with self._lock:
            due = [
                key for key, entry in self._entries.items() if now - entry.since > self._ttl_s and not entry.num_writes
            ]
        for key in due:
            logger.warning("nobody pulled %s in %s s: its memory is freed", key, self._ttl_s)
            self.drop(key)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)
