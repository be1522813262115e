"""Two processes over TCP on loopback, beside a bare socket loop: the sending side, which also keeps the time.

A round sends the same number of bytes over the bare connection and over each lane, so that all see the same machine, in
an order of its own; a lane's rate is told as a multiple of its round's bare rate. Small payloads take more rounds. The
bare loop is one `sendall` of memory that has left the caches, into one warm buffer. A contiguous payload lies written
in the transport's pool, out of the caches too, and its time runs from its publication to the receiver's lease. A paged
one runs from the call of `send`, gather included, to the moment when the receiver holds its layers. Receivers wait
already. One warm-up round is not counted.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from omnikv.bench.across_peer import (
    IN_FLIGHT,
    TIMEOUT_S,
    Lane,
    NoticeDeath,
    ReceiveRounds,
    ReceiveSmall,
    order_of,
    request_name,
    serve,
)
from omnikv.bench.measure import Spread
from omnikv.bench.peer import give_order, hear, receiving_process
from omnikv.bench.workload import Workload, bench_route
from omnikv.handoff.api import KVSender
from omnikv.tensors.blocks import PagedKV
from omnikv.transports.base import PutRequest
from omnikv.transports.tcp import TcpTransport

WARM_UP_ROUNDS = 1
# Up to so many times the rounds asked for, where a payload is smaller than the largest that is measured by default.
MAX_TIMES_THE_ROUNDS = 5
LARGEST_MIB = 1024
SMALL_NBYTES = 1 << 20
# More than the caches of any core hold.
EVICT_NBYTES = 64 << 20
# Below those that a system gives out by itself.
PORTS = range(20_000, 32_000)
# Long enough for a receiver that said "waiting" to be asleep in its wait.
SETTLE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneResult:
    """One lane at one size: `rate_x` is its rate as a multiple of the bare loop's in the same round, of which
    `round_ms` are the times.
    """

    name: str
    ms: Spread
    rate_x: Spread
    content_ok: bool
    round_ms: tuple[float, ...]

    def beside(self, other: LaneResult) -> Spread:
        """This lane's rate as a multiple of the other's in the same round."""
        return Spread.of([theirs / own for own, theirs in zip(self.round_ms, other.round_ms, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossResult:
    """One payload size."""

    size_mib: int
    rounds: int
    bare_ms: Spread
    lanes: tuple[LaneResult, ...]

    def lane(self, name: str) -> LaneResult:
        """The lane of that name."""
        return next(lane for lane in self.lanes if lane.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallResult:
    """Requests of 1 MiB in flight, in requests a second, and how late the death of a sender was known."""

    requests: int
    requests_per_s: float
    death_noticed_ms: Spread


class Evictor:
    """Memory to walk through, after which nothing else is left in the caches."""

    def __init__(self) -> None:
        self._memory = torch.zeros(EVICT_NBYTES, dtype=torch.uint8)

    def evict(self) -> None:
        """Nothing; the caches hold this object's memory."""
        self._memory.add_(1)


def rounds_at(size_mib: int, rounds: int) -> int:
    """How many rounds payloads of this size take where large ones take `rounds`: what is quick varies most."""
    return rounds * max(1, min(MAX_TIMES_THE_ROUNDS, LARGEST_MIB // size_mib))


def measure_across(size_mib: int, rounds: int, lanes: Sequence[Lane]) -> AcrossResult:
    """What one payload size takes over the bare connection and over each of `lanes`, in as many rounds as are counted.

    Raises:
        TransportError: the receiving process is gone.
        OmniKVError: a handoff failed.
    """
    workload = Workload(size_mib=size_mib)
    paged = workload.paged(workload.build_caches())
    cold = memoryview(bytearray(b"\1") * workload.nbytes)
    total = WARM_UP_ROUNDS + rounds
    times: dict[str, list[float]] = {lane.name: [] for lane in lanes}
    bare_times = []
    content: dict[str, bool] = {lane.name: True for lane in lanes}
    evictor = Evictor()
    with ExitStack() as stack:
        pipe = stack.enter_context(receiving_process(serve))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        senders = {}
        for lane in lanes:
            senders[lane.name] = _open(lane, workload)
            stack.callback(senders[lane.name].close)
        give_order(
            pipe, ReceiveRounds(workload=workload, rounds=total, bare_port=listener.getsockname()[1], lanes=lanes)
        )
        bare = stack.enter_context(listener.accept()[0])
        for number in range(total):
            for way in order_of(number, lanes):
                if way is None:
                    bare_times.append(_send_bare(pipe, bare, cold, evictor))
                    continue
                ms, content_ok = _send_over(pipe, way, senders[way.name], paged, workload.nbytes, number, evictor)
                times[way.name].append(ms)
                content[way.name] &= content_ok
    return _result_of(size_mib, rounds, bare_times, times, content)


def _result_of(
    size_mib: int, rounds: int, bare: Sequence[float], times: dict[str, list[float]], content: dict[str, bool]
) -> AcrossResult:
    counted = slice(WARM_UP_ROUNDS, None)
    return AcrossResult(
        size_mib=size_mib,
        rounds=rounds,
        bare_ms=Spread.of(bare[counted]),
        lanes=tuple(
            LaneResult(
                name=name,
                ms=Spread.of(ms[counted]),
                rate_x=Spread.of([own / lane for own, lane in zip(bare[counted], ms[counted], strict=True)]),
                content_ok=content[name],
                round_ms=tuple(ms[counted]),
            )
            for name, ms in times.items()
        ),
    )


def _open(lane: Lane, workload: Workload) -> KVSender | TcpTransport:
    room = {"pool_nbytes": workload.nbytes + (workload.nbytes >> 3) + (1 << 20)}
    options = {**lane.options(), **room, "listen": lane.address}
    if lane.is_paged:
        route = bench_route(lane.namespace, workload.num_heads)
        return KVSender(route, rank=0, transport="tcp", options=options, checksum=lane.checksum)
    return TcpTransport(lane.endpoint("source"), **options)


def _send_bare(pipe: Connection, bare: socket.socket, cold: memoryview, evictor: Evictor) -> float:
    evictor.evict()
    _hear_waiting(pipe)
    started_ns = time.monotonic_ns()
    bare.sendall(cold)
    return _ms_since(started_ns, hear(pipe))


def _send_over(
    pipe: Connection,
    lane: Lane,
    sender: KVSender | TcpTransport,
    paged: PagedKV,
    nbytes: int,
    number: int,
    evictor: Evictor,
) -> tuple[float, bool]:
    if isinstance(sender, KVSender):
        sender.drain(timeout_s=TIMEOUT_S)
        evictor.evict()
        _hear_waiting(pipe)
        started_ns = time.monotonic_ns()
        sender.send(request_name(number), paged)
    else:
        deadline = time.monotonic() + TIMEOUT_S
        sender.drain(deadline=deadline)
        # The room of the last payload may come back a little later than its acknowledgement.
        (reserved,) = sender.reserve_all([PutRequest(lane.payload(number), nbytes)], deadline=deadline)
        with reserved as slot:
            torch.frombuffer(slot.buffer, dtype=torch.uint8).fill_(number % 251)
            evictor.evict()
            _hear_waiting(pipe)
            started_ns = time.monotonic_ns()
            slot.publish()
    ms = _ms_since(started_ns, hear(pipe))
    return ms, hear(pipe) is True


def measure_small_across(lane: Lane, death_lane: Lane, total: int, deaths: int) -> SmallResult:
    """How many requests of 1 MiB a second go over `lane`, and how late the death of a sender is known.

    Raises:
        TransportError: the receiving process is gone.
    """
    with receiving_process(serve) as pipe:
        return SmallResult(
            requests=total,
            requests_per_s=_stream(pipe, lane, total),
            death_noticed_ms=Spread.of([_kill_one(pipe, death_lane) for _ in range(deaths)]),
        )


def _stream(pipe: Connection, lane: Lane, total: int) -> float:
    content = memoryview(bytearray(b"\1") * SMALL_NBYTES)
    options = {**lane.options(), "listen": lane.address, "pool_nbytes": 4 * IN_FLIGHT * SMALL_NBYTES}
    source = TcpTransport(lane.endpoint("source"), **options)
    with closing(source):
        give_order(pipe, ReceiveSmall(lane=lane, total=total))
        _hear_waiting(pipe)
        started_ns = time.monotonic_ns()
        for number in range(total):
            with source.reserve(lane.payload(number), SMALL_NBYTES) as slot:
                slot.buffer[:] = content
                slot.publish()
            if number % IN_FLIGHT == 0:
                _await_room(source)
        return total / (_ms_since(started_ns, hear(pipe)) / 1e3)


def _await_room(source: TcpTransport) -> None:
    """Nothing; at most half of the pool is taken."""
    while source.pool.used_nbytes > source.pool.limit_nbytes // 2:
        time.sleep(0.0005)


def _kill_one(pipe: Connection, lane: Lane) -> float:
    context = multiprocessing.get_context("spawn")
    ready, said = context.Pipe()
    source = context.Process(target=_serve_and_wait, args=(lane, said), daemon=True, name="bench-source")
    source.start()
    try:
        hear(ready)
        give_order(pipe, NoticeDeath(lane=lane))
        _hear_waiting(pipe)
        killed_ns = time.monotonic_ns()
        assert source.pid is not None
        os.kill(source.pid, signal.SIGKILL)
        return _ms_since(killed_ns, hear(pipe))
    finally:
        source.kill()
        source.join()


def _serve_and_wait(lane: Lane, said: Connection) -> None:
    """Nothing; offers one payload until this process is killed."""
    with TcpTransport(lane.endpoint("source"), listen=lane.address, **lane.options()) as source:
        with source.reserve(lane.payload(0), 1) as slot:
            slot.publish()
        said.send("ready")
        signal.pause()


def new_lane(name: str, **settings: object) -> Lane:
    """A lane of this process's own, at an address that is free now."""
    address = f"127.0.0.1:{_free_port()}"
    return Lane(name=name, namespace=f"bench-{secrets.token_hex(8)}", address=address, **settings)  # type: ignore[arg-type]


def _free_port() -> int:
    """A port that is free, and that the system gives to nobody who asks for any while the run is prepared."""
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _hear_waiting(pipe: Connection) -> None:
    hear(pipe)
    time.sleep(SETTLE_S)


def _ms_since(started_ns: int, ended_ns: object) -> float:
    assert isinstance(ended_ns, int)
    return (ended_ns - started_ns) / 1e6
