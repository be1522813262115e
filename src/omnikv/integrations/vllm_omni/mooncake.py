"""The published Mooncake connector: a sender that is pulled from, or a receiver that pulls, as its `role` says.

    settings of a configuration file, sizes, keys, forms of a payload    here
    asking a sender what it holds                                        .mooncake_query
    holding payloads, and writing them to whoever pulls                  .mooncake_sender
    pulling                                                              .mooncake_pulls
    registered memory, and what may still be written to                  .mooncake_memory, transports.landing
    the engine                                                           transports.mooncake_engine

It speaks with released engines in both directions. Between two ends of ours the transport `mooncake` does the same work
with proved peers, leases and notices.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import msgspec
import torch

from omnikv.core.messages import INFO_NOT_FOUND, QUERY_INFO, QueryRequest, QueryResponse
from omnikv.errors import ConfigError, TransportError
from omnikv.integrations.vllm_omni.mooncake_memory import DEFAULT_POOL_NBYTES, PooledBuffer, PoolMemory, reachable_host
from omnikv.integrations.vllm_omni.mooncake_pulls import MooncakePulls
from omnikv.integrations.vllm_omni.mooncake_query import QUERY_TIMEOUT_MS, SenderMetadata, SenderQueries
from omnikv.integrations.vllm_omni.mooncake_sender import TRANS_DONE, Held, MooncakeAgentMetadata, MooncakeSender
from omnikv.integrations.vllm_omni.object_wire import decode_object, encode_object
from omnikv.transports.landing import LandingRoom

__all__ = [
    "INFO_NOT_FOUND",
    "QUERY_INFO",
    "MooncakeAgentMetadata",
    "MooncakeTransferEngineConnector",
    "PooledBuffer",
    "QueryRequest",
    "QueryResponse",
]

_NAME = "mooncake"
DEFAULT_PORT = 50051
DEFAULT_TTL_S = 300.0
# How long a pull without a deadline waits: as released engines do, 30 s and 5 s more for each 100 MB.
PULL_S = 30.0
PULL_STEP_S = 5.0
PULL_STEP_NBYTES = 100 << 20


class MooncakeTransferEngineConnector(SenderQueries):
    """Puts at a sender, gets at a receiver. Safe to use from several threads; close it once.

    `config` is what a configuration file says: `role` ("sender", "receiver"), `host`, `zmq_port` (0: any free one),
    `protocol` ("rdma", "tcp"), `device_name`, `memory_pool_size` in bytes, `memory_pool_device`, `buffer_ttl_seconds`,
    `sender_host` and `sender_zmq_port`. The engine and its memory are taken when they are first needed, at a sender at
    once.

    Raises:
        ConfigError: a setting is wrong.
        TransportUnavailable: the engine or pyzmq is not installed, or does not start.
        TransportError: the address of a sender is taken.
    """

    supports_raw_data = True

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.config = dict(config or {})
        self._role = str(self.config.get("role", "sender")).lower()
        if self._role not in ("sender", "receiver"):
            raise ConfigError(f"{_NAME}: role must be 'sender' or 'receiver', got {self._role!r}")
        self.can_put = self._role == "sender"
        self.host = reachable_host(self.config.get("host"))
        self.zmq_port = int(self.config.get("zmq_port", DEFAULT_PORT))
        self._ttl_s = float(self.config.get("buffer_ttl_seconds", DEFAULT_TTL_S))
        self._start_lock = threading.Lock()
        self._memory: PoolMemory | None = None
        self._sender: MooncakeSender | None = None
        self._pulls: MooncakePulls | None = None
        self._counters: Counter[str] = Counter(puts=0, gets=0, bytes_transferred=0, errors=0, timeouts=0)
        if self.can_put:
            memory = self._memory_here()
            with ExitStack() as on_failure:
                on_failure.callback(memory.close)
                self._sender = MooncakeSender(memory.engine, self.host, self.zmq_port, ttl_s=self._ttl_s)
                on_failure.pop_all()
            self.zmq_port = self._sender.port

    def get_connection_info(self) -> dict[str, Any]:
        """Where receivers reach this connector."""
        rpc_port = None if self._memory is None else self._memory.engine.port
        return {"host": self.host, "zmq_port": self.zmq_port, "rpc_port": rpc_port, "can_put": self.can_put}

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """`(True, nbytes, metadata)` once `data` can be pulled under its key, `(False, 0, None)` where no room is left.

        Bytes, a tensor and a buffer of a connector travel as they are, anything else as a serialised object. What was
        under the key before is replaced. An empty payload cannot be pulled, so it is refused.

        Raises:
            ConfigError: this is a receiver, or something in `data` cannot be sent.
            TransportError: the connector is closed.
        """
        if self._sender is None:
            raise ConfigError(f"{_NAME}: {put_key!r} cannot be put at a receiver; its configuration says role=receiver")
        self._require_open()
        raw = data.tensor if hasattr(data, "tensor") and hasattr(data, "release") else data
        is_fast_path = isinstance(raw, (torch.Tensor, bytes))
        payload = _as_flat(raw if is_fast_path else encode_object(raw))
        if not payload.numel():
            return False, 0, None
        memory = self._memory_here()
        room = memory.take(payload.numel(), writer=self, deadline=0.0)
        if room is None:
            self._count("errors", 0)
            return False, 0, None
        room.written()
        memory.copy_in(room, payload)
        held = Held(memory.address_of(room), payload.numel(), is_fast_path, room.abandon)
        self._sender.hold(_published_key(put_key, from_stage, to_stage), held)
        self._count("puts", payload.numel())
        metadata = SenderMetadata(
            source_host=self.host, source_port=self.zmq_port, data_size=payload.numel(), is_fast_path=is_fast_path
        )
        return True, payload.numel(), dict(metadata)

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """As `get_with_deadline`, with as much time as its size may take."""
        return self._get(from_stage, to_stage, get_key, metadata, None)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """The payload and its size in bytes, or None where the sender has none or did not bring it in time.

        `metadata` names the sender, as `source_host` and `source_port`, and what it holds, where `put` returned it;
        without, the default sender is asked. A raw payload is a `PooledBuffer`, which its user releases.

        Raises:
            ConfigError: no sender is known.
            WireError: what came is no object of a released connector.
            TransportUnavailable: the engine or pyzmq is not installed, or does not start.
            TransportError: the connector is closed.
        """
        return self._get(from_stage, to_stage, get_key, metadata, deadline)

    def cleanup(self, request_id: str, from_stage: str | None = None, to_stage: str | None = None) -> None:
        """Nothing; what was put under this key can be pulled no more. With both stages, the key is that of `put`.

        Raises:
            ConfigError: one stage is given and not the other.
        """
        if (from_stage is None) != (to_stage is None):
            raise ConfigError(f"{_NAME}: cleanup takes both stages or none, got {from_stage!r} and {to_stage!r}")
        key = request_id if from_stage is None else _published_key(request_id, from_stage, cast(str, to_stage))
        if self._sender is not None:
            self._sender.drop(key)

    def health(self) -> dict[str, Any]:
        """The published health: a status, settings and counters."""
        if self._closed:
            return {"status": "unhealthy", "error": "the connector is closed"}
        held = 0 if self._sender is None else self._sender.num_held()
        return {
            "status": "healthy",
            "host": self.host,
            "protocol": self.config.get("protocol", "rdma"),
            "pool_device": self.config.get("memory_pool_device", "cpu"),
            "pool_size": int(self.config.get("memory_pool_size", DEFAULT_POOL_NBYTES)),
            "held": held,
            **self._counters,
        }

    def close(self) -> None:
        """Nothing; what was not pulled is gone, and so is the memory. Call it when no get is under way. Idempotent."""
        if self._closed:
            return
        super().close()
        if self._sender is not None:
            self._sender.close()
        if self._pulls is not None:
            self._pulls.close()
        if self._memory is not None:
            self._memory.close()

    def _get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None, deadline: float | None
    ) -> tuple[Any, int] | None:
        self._require_open()
        key = _published_key(get_key, from_stage, to_stage)
        found = self._find(key, metadata, deadline)
        if found is None or not found["data_size"]:
            return None
        nbytes = found["data_size"]
        if deadline is None:
            deadline = time.monotonic() + PULL_S + nbytes // PULL_STEP_NBYTES * PULL_STEP_S
        room = self._pull(key, found, deadline)
        if room is None:
            return None
        self._count("gets", nbytes)
        buffer = PooledBuffer(room)
        if found["is_fast_path"]:
            return buffer, nbytes
        with buffer:
            return decode_object(buffer.to_bytes(), key), nbytes

    def _find(self, key: str, metadata: Mapping[str, Any] | None, deadline: float | None) -> SenderMetadata | None:
        told = metadata or {}
        host, port = told.get("source_host", self.sender_host), told.get("source_port", self.sender_zmq_port)
        if not host or not port or str(host).lower() == "auto":
            raise ConfigError(
                f"{_NAME}: {key!r} is asked of no known sender (host {host!r}, port {port!r}): set sender_host and "
                "sender_zmq_port, or call update_sender_info"
            )
        if "data_size" in told:
            return SenderMetadata(
                source_host=str(host),
                source_port=int(port),
                data_size=int(told["data_size"]),
                is_fast_path=bool(told.get("is_fast_path", False)),
            )
        if deadline is None:
            return self._query_metadata_at(key, str(host), int(port))
        left_ms = int((deadline - time.monotonic()) * 1000)
        return (
            self._query_metadata_at(key, str(host), int(port), min(QUERY_TIMEOUT_MS, left_ms)) if left_ms > 0 else None
        )

    def _pull(self, key: str, found: SenderMetadata, deadline: float) -> LandingRoom | None:
        """Room with the payload in it, or None."""
        memory = self._memory_here()
        pulls = self._pulls_here()
        pulls.look_at_late()
        # A writer of its own, so that the end of one connection says nothing of other rooms.
        room = memory.take(found["data_size"], writer=object(), deadline=deadline)
        if room is None:
            self._count("errors", 0)
            return None
        request = MooncakeAgentMetadata(
            remote_hostname=self.host,
            remote_port=memory.engine.port,
            request_id=key,
            dst_addrs=[memory.address_of(room)],
            lengths=[found["data_size"]],
        )
        address = f"tcp://{found['source_host']}:{found['source_port']}"
        answer = pulls.pull(address, msgspec.msgpack.encode(request), room, deadline)
        if answer == TRANS_DONE:
            return room
        self._count("timeouts" if answer is None else "errors", 0)
        room.abandon()
        return None

    def _memory_here(self) -> PoolMemory:
        with self._start_lock:
            if self._memory is None:
                self._memory = PoolMemory(self.host, self.config)
            return self._memory

    def _pulls_here(self) -> MooncakePulls:
        memory = self._memory_here()
        with self._start_lock:
            if self._pulls is None:
                self._pulls = MooncakePulls(memory.rooms)
            return self._pulls

    def _count(self, what: str, nbytes: int) -> None:
        with self._lock:
            self._counters[what] += 1
            self._counters["bytes_transferred"] += nbytes

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"{_NAME}: this connector is closed; make a new one", transport=_NAME)


def _published_key(key: str, from_stage: str, to_stage: str) -> str:
    return f"{key}@{from_stage}_{to_stage}"


def _as_flat(data: torch.Tensor | bytes) -> torch.Tensor:
    if isinstance(data, bytes):
        # Read only by what copies it.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return data.detach().contiguous().reshape(-1).view(torch.uint8)
