"""What small requests cost between two processes: the fixed part of a handoff, wake-ups, many in flight, waiting."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from omnikv.bench.measure import quantile
from omnikv.bench.peer import give_order, hear
from omnikv.bench.receiver import TIMEOUT_S, LaneEnd, ReceiveLane, ReceiveStream, StreamEnd, WaitIdly, request_name
from omnikv.bench.same_host import SETTLE_S
from omnikv.bench.workload import MIB, Workload, bench_route
from omnikv.config import HandoffConfig
from omnikv.handoff.api import KVSender

WARM_UPS = 20
# A stream: how many requests the receiver waits for at a time, and how many MiB the sender's pool holds.
RECEIVES_IN_FLIGHT = 16
IN_FLIGHT_MIB = 64
WAITING = 64
WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How long single requests took, in microseconds, over `tries` of them."""

    tries: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float

    @classmethod
    def of(cls, values_us: list[float]) -> Lateness:
        """The quantiles of these values."""
        p50, p90, p99 = (quantile(values_us, share) for share in (0.5, 0.9, 0.99))
        return cls(tries=len(values_us), p50_us=p50, p90_us=p90, p99_us=p99, max_us=max(values_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult:
    """Requests of 1 MiB in flight between two processes: how many a second, and the processor time of both for one."""

    requests: int
    requests_per_s: float
    sender_cpu_us: float
    receiver_cpu_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallResult:
    """Everything about small requests.

    `handoff` is put-then-get of 64 tensors of one token; `wake_up` is from the return of a put of 1 MiB to the moment
    when the receiver, which waited, holds its tensors. `waiting_cpu_share` is what `WAITING` waiting receivers take of
    one core.
    """

    handoff: Lateness
    wake_up: Lateness
    stream: StreamResult
    waiting_cpu_share: float
    content_ok: bool


def measure_small(pipe: Connection, tries: int, num_in_stream: int) -> SmallResult:
    """What small requests cost, over `tries` single ones and a stream of `num_in_stream`.

    Raises:
        TransportError: the receiving process is gone.
        OmniKVError: the handoff failed.
    """
    handoff, _, token_ok = _one_by_one(pipe, Workload(tokens=1), tries)
    _, wake_up, mib_ok = _one_by_one(pipe, Workload(size_mib=1), tries)
    stream, stream_ok = _stream(pipe, Workload(size_mib=1), num_in_stream)
    return SmallResult(
        handoff=handoff,
        wake_up=wake_up,
        stream=stream,
        waiting_cpu_share=_waiting_cpu_share(pipe, Workload(tokens=1)),
        content_ok=token_ok and mib_ok and stream_ok,
    )


def _one_by_one(pipe: Connection, workload: Workload, tries: int) -> tuple[Lateness, Lateness, bool]:
    """How long put-then-get took, how late the receiver was after the put had returned, and whether all was right."""
    namespace = f"bench-{os.getpid()}-single-{workload.num_tokens}"
    total = WARM_UPS + tries
    give_order(pipe, ReceiveLane(workload=workload, namespace=namespace, num_requests=total))
    paged = workload.paged(workload.build_caches())
    took_us, late_us = [], []
    with KVSender(bench_route(namespace, workload.num_heads), rank=0, transport="shm") as sender:
        for number in range(total):
            hear(pipe)
            time.sleep(SETTLE_S)
            started_ns = time.monotonic_ns()
            sender.send(request_name(number), paged)
            returned_ns = time.monotonic_ns()
            finished_ns = hear(pipe)
            assert isinstance(finished_ns, int)
            took_us.append((finished_ns - started_ns) / 1e3)
            # A receiver may hold its tensors before the put has returned.
            late_us.append(max(0.0, (finished_ns - returned_ns) / 1e3))
        hear(pipe)
        sender.send(request_name(total), paged)
        end = hear(pipe)
        assert isinstance(end, LaneEnd)
    return Lateness.of(took_us[WARM_UPS:]), Lateness.of(late_us[WARM_UPS:]), end.content_ok


def _stream(pipe: Connection, workload: Workload, num_requests: int) -> tuple[StreamResult, bool]:
    namespace = f"bench-{os.getpid()}-stream"
    order = ReceiveStream(
        workload=workload, namespace=namespace, num_requests=num_requests, in_flight=RECEIVES_IN_FLIGHT
    )
    give_order(pipe, order)
    paged = workload.paged(workload.build_caches())
    room_nbytes = IN_FLIGHT_MIB * (MIB + MIB // 16)
    options = dict.fromkeys(("pool_nbytes", "segment_nbytes", "prefault_nbytes"), room_nbytes)
    config = HandoffConfig(options=options, admission_timeout_s=TIMEOUT_S)
    with KVSender(bench_route(namespace, workload.num_heads), rank=0, config=config) as sender:
        hear(pipe)
        began_s, started_ns = time.process_time(), time.monotonic_ns()
        for number in range(num_requests + 1):
            sender.send(request_name(number), paged)
        cpu_s = time.process_time() - began_s
        end = hear(pipe)
        assert isinstance(end, StreamEnd)
    result = StreamResult(
        requests=num_requests,
        requests_per_s=num_requests / ((end.finished_ns - started_ns) / 1e9),
        sender_cpu_us=cpu_s / num_requests * 1e6,
        receiver_cpu_us=end.cpu_s / num_requests * 1e6,
    )
    return result, end.content_ok


def _waiting_cpu_share(pipe: Connection, workload: Workload) -> float:
    namespace = f"bench-{os.getpid()}-waiting"
    give_order(pipe, WaitIdly(workload=workload, namespace=namespace, num_waiting=WAITING, seconds=WAIT_S))
    with KVSender(bench_route(namespace, workload.num_heads), rank=0, transport="shm"):
        cpu_s = hear(pipe)
        assert isinstance(cpu_s, float)
    return cpu_s / WAIT_S
