"""The published port arithmetic of connectors, under its published names."""

from __future__ import annotations

from typing import Literal

from omnikv.core.topology import (
    KV_RANK_PORT_STRIDE,
    KV_REPLICA_PORT_STRIDE,
    KV_TRANSFER_PORT_OFFSET,
    kv_zmq_port,
)
from omnikv.errors import ConfigError, TopologyError

__all__ = [
    "KV_RANK_PORT_STRIDE",
    "KV_REPLICA_PORT_STRIDE",
    "KV_TRANSFER_PORT_OFFSET",
    "ORCHESTRATOR_PORT_OFFSET",
    "REQUEST_FORWARDING_PORT_OFFSET",
    "compute_connector_zmq_port",
]

REQUEST_FORWARDING_PORT_OFFSET = 0
ORCHESTRATOR_PORT_OFFSET = 200

_OFFSETS = {
    "request_forwarding": REQUEST_FORWARDING_PORT_OFFSET,
    "kv_transfer": KV_TRANSFER_PORT_OFFSET,
    "orchestrator": ORCHESTRATOR_PORT_OFFSET,
}


def compute_connector_zmq_port(
    base_port: int,
    *,
    purpose: Literal["request_forwarding", "kv_transfer", "orchestrator"],
    from_stage: int,
    local_rank: int = 0,
    replica_id: int = 0,
) -> int:
    """The port of one worker's connector: distinct for every purpose, stage, rank and replica on a host.

    Raises:
        ConfigError: there is no such purpose.
        TopologyError: the stage does not fit in a rank's stride, a term is negative, or the port is no port.
    """
    if purpose not in _OFFSETS:
        raise ConfigError(f"unknown connector purpose {purpose!r}; known: {', '.join(_OFFSETS)}")
    # The core's formula is the one for KV transfer; the other purposes lie a fixed distance from it.
    distance = _OFFSETS[purpose] - KV_TRANSFER_PORT_OFFSET
    try:
        return kv_zmq_port(base_port + distance, from_stage, local_rank, replica_id)
    except TopologyError as error:
        raise TopologyError(f"no {purpose} port over base port {base_port}: {error}") from error
