"""Which rank of one stage exchanges KV with which rank of the other, under the published divisibility rule.

These are the rank maps that engines publish: equal sizes pair rank by rank, otherwise the larger size must be a
multiple of the smaller one and neighbouring ranks share a peer. `omnikv.core.reshard` plans from explicit head ids
instead and knows no such rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from omnikv.errors import TopologyError


@dataclass(frozen=True)
class KVTPTopology:
    """The parallel sizes of the two stages and this process's rank within its own one.

    Raises:
        TopologyError: a size is not positive or the rank is negative.
    """

    source_tp_size: int
    target_tp_size: int
    local_rank: int

    def __post_init__(self) -> None:
        if self.source_tp_size <= 0 or self.target_tp_size <= 0:
            raise TopologyError(
                "parallel sizes must be positive: "
                f"source_tp_size={self.source_tp_size}, target_tp_size={self.target_tp_size}"
            )
        if self.local_rank < 0:
            raise TopologyError(f"local_rank must be at least 0, got {self.local_rank}")

    @property
    def is_heterogeneous(self) -> bool:
        return self.source_tp_size != self.target_tp_size

    @property
    def ratio(self) -> int:
        """How many ranks of the larger side share one rank of the smaller side; at least 1."""
        return max(self.source_tp_size, self.target_tp_size) // min(self.source_tp_size, self.target_tp_size)


def validate_kv_tp_topology(topo: KVTPTopology) -> None:
    """Nothing, when the sizes can be paired.

    Raises:
        TopologyError: the larger size is no multiple of the smaller one.
    """
    larger = max(topo.source_tp_size, topo.target_tp_size)
    smaller = min(topo.source_tp_size, topo.target_tp_size)
    if larger % smaller:
        raise TopologyError(
            f"KV parallel sizes must be divisible one by the other: source_tp_size={topo.source_tp_size}, "
            f"target_tp_size={topo.target_tp_size}; state explicit head ids (omnikv.Route) for other pairs"
        )


def _require_rank_inside(topo: KVTPTopology, size: int, side: str) -> None:
    if topo.local_rank >= size:
        raise TopologyError(
            f"rank {topo.local_rank} is outside its stage: the {side} has {size} ranks, 0 to {size - 1}"
        )


def get_kv_target_ranks(topo: KVTPTopology) -> list[int]:
    """The receiver ranks that this sender rank serves, ascending.

    Raises:
        TopologyError: the sizes do not divide, or `local_rank` is not a rank of the sending stage (X09).
    """
    validate_kv_tp_topology(topo)
    _require_rank_inside(topo, topo.source_tp_size, "sender")
    if topo.source_tp_size >= topo.target_tp_size:
        return [topo.local_rank // topo.ratio]
    first = topo.local_rank * topo.ratio
    return list(range(first, first + topo.ratio))


def get_kv_source_ranks(topo: KVTPTopology) -> list[int]:
    """The sender ranks whose shards this receiver rank needs, ascending.

    Raises:
        TopologyError: the sizes do not divide, or `local_rank` is not a rank of the receiving stage (X09).
    """
    validate_kv_tp_topology(topo)
    _require_rank_inside(topo, topo.target_tp_size, "receiver")
    if topo.source_tp_size <= topo.target_tp_size:
        return [topo.local_rank // topo.ratio]
    first = topo.local_rank * topo.ratio
    return list(range(first, first + topo.ratio))


# The published port formula: base + 100 + replica * 1024 + rank * 16 + stage (vllm-omni's initialization module).
KV_TRANSFER_PORT_OFFSET = 100
KV_RANK_PORT_STRIDE = 16
KV_REPLICA_PORT_STRIDE = 1024


def kv_rank_port(base_port: int, rank: int) -> int:
    """The port of a sender rank, given rank 0's port: each rank listens one stride further."""
    return base_port + rank * KV_RANK_PORT_STRIDE


def kv_zmq_port(base_port: int, from_stage: int, local_rank: int = 0, replica_id: int = 0) -> int:
    """The published port of one sender worker: distinct for every stage, rank and replica on a host.

    Raises:
        TopologyError: the stage does not fit in a rank's stride, a term is negative, or the port is no port.
    """
    if not 0 <= from_stage < KV_RANK_PORT_STRIDE:
        raise TopologyError(f"from_stage must be in [0, {KV_RANK_PORT_STRIDE}), got {from_stage}")
    if local_rank < 0 or replica_id < 0:
        raise TopologyError(f"local_rank and replica_id must be at least 0, got {local_rank} and {replica_id}")
    port = (
        kv_rank_port(base_port + KV_TRANSFER_PORT_OFFSET + replica_id * KV_REPLICA_PORT_STRIDE, local_rank) + from_stage
    )
    if not 1 <= port <= 65535:
        raise TopologyError(
            f"the port of stage {from_stage}, rank {local_rank}, replica {replica_id} over base port {base_port} is "
            f"{port}, outside 1 to 65535; choose a lower zmq_port"
        )
    return port
