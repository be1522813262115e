"""The rank maps, keys and shard functions of KV transfer, under their published names."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from omnikv.core import topology
from omnikv.core.keys import build_rank_aware_recv_keys, build_rank_aware_send_keys, get_kv_connector_key
from omnikv.core.topology import KVTPTopology, get_kv_source_ranks, get_kv_target_ranks, validate_kv_tp_topology
from omnikv.integrations.vllm_omni import vllm_parallel_state
from omnikv.tensors.layouts import normalize_layer_kv
from omnikv.tensors.shards import (
    merge_received_rank_shards,
    slice_kv_tensor_heads,
    slice_layer_blocks,
    slice_received_rank_shard,
)

__all__ = [
    "KVTPTopology",
    "build_rank_aware_recv_keys",
    "build_rank_aware_send_keys",
    "get_kv_connector_key",
    "get_kv_source_ranks",
    "get_kv_target_ranks",
    "get_local_tp_rank",
    "get_omni_replica_id",
    "get_tp_world_size",
    "kv_zmq_port",
    "merge_received_rank_shards",
    "normalize_layer_kv",
    "slice_kv_tensor_heads",
    "slice_layer_blocks",
    "slice_received_rank_shard",
    "validate_kv_tp_topology",
]

logger = logging.getLogger("omnikv.vllm_omni")

# vLLM asserts that its groups are initialised; torch.distributed and our stand-in raise the other two.
_NOT_INITIALISED = (AssertionError, RuntimeError, ValueError)


def _parallel_state() -> Any:
    """The parallel state that this process runs on: vLLM's if it is loaded, else our stand-in.

    Loading vLLM only to learn that it set up no groups would take seconds.
    """
    return sys.modules.get("vllm.distributed.parallel_state") or vllm_parallel_state


def get_local_tp_rank() -> int:
    """This process's rank in its tensor-parallel group; without one `LOCAL_RANK` of the environment, else 0."""
    try:
        rank: int = _parallel_state().get_tensor_model_parallel_rank()
    except _NOT_INITIALISED:
        return _count_from_environment("LOCAL_RANK")
    return rank


def get_tp_world_size() -> int:
    """How many ranks this process's tensor-parallel group has; 1 without one."""
    try:
        size: int = _parallel_state().get_tensor_model_parallel_world_size()
    except _NOT_INITIALISED:
        return 1
    return size


def get_omni_replica_id() -> int:
    """Which copy of its stage this process belongs to: `VLLM_OMNI_REPLICA_ID` of the environment, else 0."""
    return _count_from_environment("VLLM_OMNI_REPLICA_ID")


def kv_zmq_port(base_port: int, from_stage: int, local_rank: int = 0, replica_id: int | None = None) -> int:
    """The published port of one sender worker; the replica is this process's own unless stated.

    Raises:
        TopologyError: the stage does not fit in a rank's stride, a term is negative, or the port is no port.
    """
    replica = get_omni_replica_id() if replica_id is None else replica_id
    return topology.kv_zmq_port(base_port, from_stage, local_rank, replica)


def _count_from_environment(name: str) -> int:
    text = os.environ.get(name, "0")
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        logger.warning("%s=%r is no integer of at least 0; reading it as 0, as engines do", name, text)
    return max(count, 0)
