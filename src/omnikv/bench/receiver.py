"""The receiving process of the benchmark: does what the sending process tells it over a pipe, and reports times.

Both processes read the monotonic clock of the same machine, so a time taken here can be compared with one taken there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch

from omnikv.bench.measure import ExtraMemory, reset_peak
from omnikv.bench.workload import Workload, bench_route
from omnikv.errors import ReceiveTimeout
from omnikv.handoff.api import KVReceiver, KVSender
from omnikv.tensors.kv import LayerKV

TIMEOUT_S = 120.0
_PAGE_INT64S = 4096 // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLane:
    """Receive `num_requests` requests one after the other, then check one more and tell the memory used."""

    workload: Workload
    namespace: str
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveStream:
    """Receive `num_requests` requests, `in_flight` at a time, then check one more and tell the processor time used."""

    workload: Workload
    namespace: str
    num_requests: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitIdly:
    """Wait in `num_waiting` threads for requests that never come, for `seconds`, and tell the processor time used."""

    workload: Workload
    namespace: str
    num_waiting: int
    seconds: float


Order: TypeAlias = ReceiveLane | ReceiveStream | WaitIdly


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnd:
    """What the receiver has to say about a lane: whether the content was right, and its extra memory."""

    content_ok: bool
    memory: ExtraMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """What the receiver has to say about a stream: when the last request was there, and what its processor did."""

    content_ok: bool
    finished_ns: int
    cpu_s: float


def serve(pipe: Connection, torch_threads: int) -> None:
    """Nothing; carries out the orders that come through `pipe` until it is closed or None comes."""
    torch.set_num_threads(torch_threads)
    while (order := pipe.recv()) is not None:
        # What is loaded or built on first use must not count as the first lane's.
        warm_up(f"{order.namespace}-warm-up")
        if isinstance(order, ReceiveLane):
            _receive_lane(pipe, order)
        elif isinstance(order, ReceiveStream):
            _receive_stream(pipe, order)
        else:
            _wait_idly(pipe, order)


def request_name(number: int) -> str:
    """The id of a lane's request."""
    return f"bench-{number}"


def warm_up(namespace: str) -> None:
    """Nothing; hands one small request over within this process."""
    workload = Workload(tokens=1)
    route = bench_route(namespace, workload.num_heads)
    with KVSender(route, rank=0, transport="shm") as sender, KVReceiver(route, rank=0, transport="shm") as receiver:
        sender.send(request_name(0), workload.paged(workload.build_caches()))
        receiver.receive(request_name(0), timeout_s=TIMEOUT_S).close()


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
        content_ok = _is_right(receiver, order.num_requests, order.workload)
        pipe.send(LaneEnd(content_ok=content_ok, memory=memory))


def _receive_stream(pipe: Connection, order: ReceiveStream) -> None:
    route = bench_route(order.namespace, order.workload.num_heads)
    with KVReceiver(route, rank=0, transport="shm") as receiver, ThreadPoolExecutor(order.in_flight) as threads:

        def receive_each(first: int) -> None:
            for number in range(first, order.num_requests, order.in_flight):
                receiver.receive(request_name(number), timeout_s=TIMEOUT_S).close()

        pipe.send("waiting")
        began_s = time.process_time()
        for done in [threads.submit(receive_each, first) for first in range(order.in_flight)]:
            done.result()
        finished_ns, cpu_s = time.monotonic_ns(), time.process_time() - began_s
        content_ok = _is_right(receiver, order.num_requests, order.workload)
        pipe.send(StreamEnd(content_ok=content_ok, finished_ns=finished_ns, cpu_s=cpu_s))


def _wait_idly(pipe: Connection, order: WaitIdly) -> None:
    route = bench_route(order.namespace, order.workload.num_heads)
    with KVReceiver(route, rank=0, transport="shm") as receiver, ThreadPoolExecutor(order.num_waiting) as threads:

        def wait_in_vain(number: int) -> None:
            try:
                receiver.receive(request_name(number), timeout_s=2 * order.seconds).close()
            except ReceiveTimeout:
                return

        waiting = [threads.submit(wait_in_vain, number) for number in range(order.num_waiting)]
        # Until all of them sleep.
        time.sleep(order.seconds / 2)
        began_s = time.process_time()
        time.sleep(order.seconds)
        cpu_s = time.process_time() - began_s
        wait(waiting)
    pipe.send(cpu_s)


def _is_right(receiver: KVReceiver, number: int, workload: Workload) -> bool:
    with receiver.receive(request_name(number), timeout_s=TIMEOUT_S) as kv:
        return workload.matches(kv.layers)


def _touch(layers: Sequence[LayerKV]) -> None:
    """Read every page of the layers, so that the memory measured is that of a receiver that uses what it got."""
    for layer in layers:
        for tensor in layer:
            tensor.view(torch.int64).flatten()[::_PAGE_INT64S].sum()
