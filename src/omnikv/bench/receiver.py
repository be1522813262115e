"""The receiving process of the benchmark: does what the sending process tells it over a pipe, and reports times.

Both processes read the monotonic clock of the same machine, so a time taken here can be compared with one taken there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from omnikv.bench.measure import ExtraMemory, reset_peak
from omnikv.bench.workload import Workload, bench_route
from omnikv.core.keys import Edge, PayloadId
from omnikv.handoff.api import KVReceiver
from omnikv.tensors.kv import LayerKV
from omnikv.transports.base import Endpoint
from omnikv.transports.registry import open_transport

TIMEOUT_S = 120.0
_PAGE_INT64S = 4096 // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLane:
    """Receive `num_requests` requests one after the other, then check one more and tell the memory used."""

    workload: Workload
    namespace: str
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeWakeUps:
    """Wait for `tries` small payloads, each published while this process waits."""

    namespace: str
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnd:
    """What the receiver has to say about a lane: whether the content was right, and its extra memory."""

    content_ok: bool
    memory: ExtraMemory


def serve(pipe: Connection, torch_threads: int) -> None:
    """Nothing; carries out the orders that come through `pipe` until it is closed or None comes."""
    torch.set_num_threads(torch_threads)
    while (order := pipe.recv()) is not None:
        if isinstance(order, ReceiveLane):
            _receive_lane(pipe, order)
        else:
            _notice_wake_ups(pipe, order)


def request_name(number: int) -> str:
    """The id of a lane's request."""
    return f"bench-{number}"


def wake_up_endpoint(namespace: str, side: str) -> Endpoint:
    """Where the wake-up payloads go from or to."""
    edge = Edge(from_stage="sender", to_stage="receiver", namespace=namespace)
    return Endpoint(edge=edge, side="source" if side == "source" else "target", rank=0, peer_ranks=(0,))


def wake_up_payload(namespace: str, number: int) -> PayloadId:
    """The identity of one wake-up payload."""
    edge = Edge(from_stage="sender", to_stage="receiver", namespace=namespace)
    return PayloadId(edge=edge, transfer_id=request_name(number), source_rank=0, target_rank=0)


def _receive_lane(pipe: Connection, order: ReceiveLane) -> None:
    base = reset_peak()
    with KVReceiver(bench_route(order.namespace, order.workload.num_heads), rank=0, transport="shm") as receiver:
        for number in range(order.num_requests):
            pipe.send("waiting")
            with receiver.receive(request_name(number), timeout_s=TIMEOUT_S) as kv:
                finished_ns = time.monotonic_ns()
                _touch(kv.layers)
            pipe.send(finished_ns)
        memory = ExtraMemory.since(base)
        pipe.send("waiting")
        with receiver.receive(request_name(order.num_requests), timeout_s=TIMEOUT_S) as kv:
            content_ok = order.workload.matches(kv.layers)
        pipe.send(LaneEnd(content_ok=content_ok, memory=memory))


def _touch(layers: Sequence[LayerKV]) -> None:
    """Read every page of the layers, so that the memory measured is that of a receiver that uses what it got."""
    for layer in layers:
        for tensor in layer:
            tensor.view(torch.int64).flatten()[::_PAGE_INT64S].sum()


def _notice_wake_ups(pipe: Connection, order: NoticeWakeUps) -> None:
    with open_transport("shm", wake_up_endpoint(order.namespace, "target")) as transport:
        for number in range(order.tries):
            pipe.send("waiting")
            lease = transport.get(wake_up_payload(order.namespace, number), deadline=time.monotonic() + TIMEOUT_S)
            noticed_ns = time.monotonic_ns()
            if lease is not None:
                lease.acknowledge()
            pipe.send(noticed_ns)
