"""A connector with the published methods over one of omnikv's own transports.

An engine addresses payloads by key and by the names of two stages; a transport by a structured identity. The stages
become the edge, the key stands as the request's id within it, and the ranks are stated, so payloads whose published
keys collide stay apart (X06). Both sides state their parallel sizes, so peers whose topologies differ refuse each other
when they meet rather than wait for keys that never come (D04).

One transport is opened for each edge and direction that is used, when it is first used.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from omnikv.core.keys import Edge, PayloadId
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError, TransportError
from omnikv.tensors.borrow import borrowed
from omnikv.tensors.pack import PayloadPlan
from omnikv.transports.base import Endpoint, Lease, Side, Transport
from omnikv.transports.registry import open_transport


class LeasedPayload:
    """A payload in a transport's memory: `tensor` is a 1-D uint8 view, to be read until released or put back."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.tensor = borrowed(lease.buffer)

    def release(self) -> None:
        """Consume the payload: it was read, the sender may reuse its room. Idempotent."""
        self._lease.acknowledge()

    def put_back(self) -> None:
        """Give the payload back unread; the same key finds it again. Idempotent."""
        self._lease.release()


class TransportConnector:
    """Serves one rank of one stage by the published `put` and `get`; close it to free what it holds.

    `topology` is this rank's place; a stage without tensor parallelism is rank 0 of 1. `namespace` and `replica` keep
    pipelines on one host apart, as in `Edge`. `options` go to the transport.

    Raises:
        ConfigError: the namespace or replica is none.
    """

    blocks_until_deadline = True
    addresses_ranks = True
    supports_raw_data = False

    def __init__(
        self,
        transport: str,
        topology: KVTPTopology,
        *,
        namespace: str = "default",
        replica: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._name = transport
        self._topology = topology
        self._namespace = namespace
        self._replica = replica
        self._options = dict(options or {})
        self._transports: dict[tuple[Edge, Side], Transport] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._counters: Counter[str] = Counter(puts=0, gets=0, bytes_transferred=0)
        # Fails now rather than at the first request.
        self._edge("from", "to")

    def wants_checksum(self, from_stage: str, to_stage: str) -> bool:
        """Whether payloads on this edge should carry a checksum: not where both peers map the same memory.

        Raises:
            TransportError: the transport cannot start or is closed.
        """
        return not self._transport(self._edge(from_stage, to_stage), "source").capabilities.shared_memory

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any, *, target_rank: int = 0
    ) -> tuple[bool, int, dict[str, Any]]:
        """`(True, nbytes, {})` once the packed payload `data` (bytes, or a 1-D uint8 tensor) can be read.

        Raises:
            ConfigError: `data` is no packed payload.
            PutRejected: no room, or the key is still unread.
            TransportError: the transport failed or is closed.
        """
        packed = _as_bytes(data)
        identity = self._outgoing(from_stage, to_stage, put_key, target_rank)
        with self._transport(identity.edge, "source").reserve(identity, packed.numel()) as slot:
            torch.frombuffer(slot.buffer, dtype=torch.uint8).copy_(packed)
            slot.publish()
        self._count("puts", packed.numel())
        return True, packed.numel(), {}

    def put_plan(self, from_stage: str, to_stage: str, put_key: str, plan: PayloadPlan, *, target_rank: int) -> int:
        """The payload's size, once it is packed straight into the transport's memory and can be read.

        Raises:
            PutRejected: no room, or the key is still unread.
            TransportError: the transport failed or is closed.
        """
        identity = self._outgoing(from_stage, to_stage, put_key, target_rank)
        with self._transport(identity.edge, "source").reserve(identity, plan.nbytes) as slot:
            plan.write_into(slot.buffer)
            slot.publish()
        self._count("puts", plan.nbytes)
        return plan.nbytes

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[LeasedPayload, int] | None:
        """The payload and its size if it is there now, else None. See `get_with_deadline`."""
        return self.get_with_deadline(from_stage, to_stage, get_key, metadata, deadline=time.monotonic())

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[LeasedPayload, int] | None:
        """The payload and its size as soon as it is there, or None at `deadline` (monotonic seconds).

        `metadata["source_rank"]` says which rank sends it; rank 0 without. The caller releases the payload.

        Raises:
            ProducerFailed: the sender said that it will not come, or died.
            ConnectError: the sender's topology is another one.
            TransportError: the transport failed or is closed.
        """
        identity = PayloadId(
            edge=self._edge(from_stage, to_stage),
            transfer_id=get_key,
            source_rank=int((metadata or {}).get("source_rank") or 0),
            target_rank=self._rank,
        )
        lease = self._transport(identity.edge, "target").get(identity, deadline=deadline)
        if lease is None:
            return None
        nbytes = lease.buffer.nbytes
        self._count("gets", nbytes)
        return LeasedPayload(lease), nbytes

    def fail(self, from_stage: str, to_stage: str, put_key: str, cause: str, *, target_rank: int = 0) -> None:
        """Nothing; the receiver of this key is told that it will not come, and why.

        Raises:
            TransportError: the transport failed or is closed.
        """
        identity = self._outgoing(from_stage, to_stage, put_key, target_rank)
        self._transport(identity.edge, "source").fail(identity, cause)

    def cleanup(self, request_id: str) -> None:
        """Nothing; withdraws what was put under this key on any edge. Receivers that wait for it are told."""
        with self._lock:
            sources = [(edge, transport) for (edge, side), transport in self._transports.items() if side == "source"]
        for edge, transport in sources:
            for target_rank in self._peer_ranks("source"):
                payload = PayloadId(edge=edge, transfer_id=request_id, source_rank=self._rank, target_rank=target_rank)
                transport.fail(payload, "withdrawn by its sender")

    def health(self) -> dict[str, Any]:
        """The published health: a status and counters."""
        with self._lock:
            return {"status": "closed" if self._closed else "healthy", "transport": self._name, **self._counters}

    def close(self) -> None:
        """Close the transports; payloads not yet read are lost to their receivers. Idempotent."""
        with self._lock:
            transports, self._transports, self._closed = list(self._transports.values()), {}, True
        for transport in transports:
            transport.close()

    @property
    def _rank(self) -> int:
        topology = self._topology
        alone = topology.source_tp_size == topology.target_tp_size == 1
        # Without tensor parallelism an engine's local rank counts other things: one rank sends and one receives.
        return 0 if alone else topology.local_rank

    def _peer_ranks(self, side: Side) -> tuple[int, ...]:
        size = self._topology.target_tp_size if side == "source" else self._topology.source_tp_size
        return tuple(range(size))

    def _edge(self, from_stage: str, to_stage: str) -> Edge:
        return Edge(from_stage=from_stage, to_stage=to_stage, namespace=self._namespace, replica=self._replica)

    def _outgoing(self, from_stage: str, to_stage: str, key: str, target_rank: int) -> PayloadId:
        edge = self._edge(from_stage, to_stage)
        return PayloadId(edge=edge, transfer_id=key, source_rank=self._rank, target_rank=target_rank)

    def _transport(self, edge: Edge, side: Side) -> Transport:
        with self._lock:
            if self._closed:
                raise TransportError(f"the {self._name} connector is closed", transport=self._name)
            if (edge, side) not in self._transports:
                facts = {"from_tp": str(self._topology.source_tp_size), "to_tp": str(self._topology.target_tp_size)}
                endpoint = Endpoint(
                    edge=edge, side=side, rank=self._rank, peer_ranks=self._peer_ranks(side), facts=facts
                )
                self._transports[edge, side] = open_transport(self._name, endpoint, self._options)
            return self._transports[edge, side]

    def _count(self, what: str, nbytes: int) -> None:
        with self._lock:
            self._counters.update({what: 1, "bytes_transferred": nbytes})


def _as_bytes(data: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor) and data.dtype == torch.uint8 and data.dim() == 1 and data.numel():
        return data
    if isinstance(data, bytes | bytearray | memoryview) and len(data):
        # A copy, since torch has no read-only tensors; payloads that we pack ourselves come by `put_plan`.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    raise ConfigError(f"a transport takes a packed payload as bytes or a 1-D uint8 tensor, got {type(data).__name__}")
