"""Two processes on one host over the shm transport: the sending side, which also keeps the time.

Put-then-get runs from the call of `send` to the moment when the receiver, which waits already, holds views of every
layer. A round measures the warm memcpy first, then the gather alone, then put-then-get, so that all three see the same
machine; a round's multiples are of its own memcpy. One warm-up round, in which the pool is made, is not counted.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from omnikv.bench.measure import ExtraMemory, Spread, WarmCopy, reset_peak, timed_ms
from omnikv.bench.receiver import (
    TIMEOUT_S,
    LaneEnd,
    NoticeWakeUps,
    ReceiveLane,
    request_name,
    serve,
    wake_up_endpoint,
    wake_up_payload,
)
from omnikv.bench.workload import Workload, bench_route
from omnikv.errors import TransportError
from omnikv.handoff.api import KVSender
from omnikv.tensors.blocks import PagedKV
from omnikv.transports.registry import open_transport

WARM_UP_ROUNDS = 1
WAKE_UP_WARM_UPS = 10
WAKE_UP_NBYTES = 4096
# Long enough for a receiver that said "waiting" to be asleep in its wait.
SETTLE_S = 0.002
_ENDED_EARLY = "the benchmark's receiving process ended early; its own error output says why"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """One payload size: times in milliseconds, `_x` as multiples of the round's warm memcpy, memory of both sides."""

    size_mib: int
    payload_nbytes: int
    rounds: int
    memcpy_ms: Spread
    put_then_get_ms: Spread
    put_then_get_x: Spread
    gather_x: Spread
    checksum_put_then_get_x: Spread
    sender_memory: ExtraMemory
    receiver_memory: ExtraMemory
    content_ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUpResult:
    """From `publish` to the return of a waiting `get`, in microseconds."""

    tries: int
    p50_us: float
    p90_us: float
    max_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    memcpy_ms: float
    gather_ms: float
    put_then_get_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """One sender's whole life: its counted rounds, and what both sides used above their base."""

    rounds: list[_Round]
    sender_memory: ExtraMemory
    receiver: LaneEnd


@contextmanager
def receiving_process(torch_threads: int) -> Iterator[Connection]:
    """The pipe to a receiving process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, torch_threads), daemon=True, name="bench-receiver")
    process.start()
    there.close()
    try:
        yield here
        _order(here, None)
        process.join(TIMEOUT_S)
    finally:
        here.close()
        process.kill()
        process.join()
        process.close()


def measure_size(pipe: Connection, workload: Workload, rounds: int) -> SizeResult:
    """What handing over `workload` costs, over `rounds` rounds with and as many without a checksum.

    Raises:
        TransportError: the receiving process is gone.
        OmniKVError: the handoff failed.
    """
    caches = workload.build_caches()
    copy = WarmCopy(workload.nbytes)
    paged = workload.paged(caches)
    plain = _run_lane(pipe, workload, paged, copy, rounds, checksum=False)
    checked = _run_lane(pipe, workload, paged, copy, rounds, checksum=True)
    return SizeResult(
        size_mib=workload.size_mib,
        payload_nbytes=workload.nbytes,
        rounds=rounds,
        memcpy_ms=Spread.of([one.memcpy_ms for one in plain.rounds]),
        put_then_get_ms=Spread.of([one.put_then_get_ms for one in plain.rounds]),
        put_then_get_x=Spread.of([one.put_then_get_ms / one.memcpy_ms for one in plain.rounds]),
        gather_x=Spread.of([one.gather_ms / one.memcpy_ms for one in plain.rounds]),
        checksum_put_then_get_x=Spread.of([one.put_then_get_ms / one.memcpy_ms for one in checked.rounds]),
        sender_memory=plain.sender_memory,
        receiver_memory=plain.receiver.memory,
        content_ok=plain.receiver.content_ok and checked.receiver.content_ok,
    )


def _run_lane(
    pipe: Connection, workload: Workload, paged: PagedKV, copy: WarmCopy, rounds: int, *, checksum: bool
) -> _Lane:
    namespace = f"bench-{os.getpid()}-{workload.size_mib}-{checksum}"
    total = WARM_UP_ROUNDS + rounds
    _order(pipe, ReceiveLane(workload=workload, namespace=namespace, num_requests=total))
    base = reset_peak()
    route = bench_route(namespace, workload.num_heads)
    with KVSender(route, rank=0, transport="shm", options=_room_for(workload), checksum=checksum) as sender:
        done = [_measure_round(pipe, sender, paged, copy, number) for number in range(total)]
        memory = ExtraMemory.since(base)
        _hear(pipe)
        _wait_for_free_room(sender)
        sender.send(request_name(total), paged)
        end = _hear(pipe)
        assert isinstance(end, LaneEnd)
    return _Lane(rounds=done[WARM_UP_ROUNDS:], sender_memory=memory, receiver=end)


def _room_for(workload: Workload) -> dict[str, int]:
    # One payload at a time, its header, and rounding to pages.
    room_nbytes = workload.nbytes + workload.nbytes // 8 + (1 << 20)
    return {"pool_nbytes": room_nbytes}


def _measure_round(pipe: Connection, sender: KVSender, paged: PagedKV, copy: WarmCopy, number: int) -> _Round:
    _wait_for_free_room(sender)
    memcpy_ms = copy.time_ms()
    gather_ms = timed_ms(lambda: _gather_into(copy.target, paged))
    _hear(pipe)
    time.sleep(SETTLE_S)
    started_ns = time.monotonic_ns()
    sender.send(request_name(number), paged)
    finished_ns = _hear(pipe)
    assert isinstance(finished_ns, int)
    return _Round(memcpy_ms=memcpy_ms, gather_ms=gather_ms, put_then_get_ms=(finished_ns - started_ns) / 1e6)


def _wait_for_free_room(sender: KVSender) -> None:
    # The receiver is done with the last round's payload, but its word of that may still be under way.
    sender.drain(timeout_s=TIMEOUT_S)


def _gather_into(room: torch.Tensor, paged: PagedKV) -> None:
    at = 0
    for layer in paged.layer_sources():
        for source in layer:
            nbytes = source.dtype.itemsize * torch.Size(source.shape).numel()
            source.write_into(room[at : at + nbytes].view(source.dtype).view(source.shape))
            at += nbytes


def measure_wake_up(pipe: Connection, tries: int) -> WakeUpResult:
    """How late a receiver that waits notices a payload, over `tries` small payloads.

    Raises:
        TransportError: the receiving process is gone.
        OmniKVError: the transport failed.
    """
    namespace = f"bench-{os.getpid()}-wake-up"
    total = WAKE_UP_WARM_UPS + tries
    _order(pipe, NoticeWakeUps(namespace=namespace, tries=total))
    late_us = []
    with open_transport("shm", wake_up_endpoint(namespace, "source")) as transport:
        for number in range(total):
            _hear(pipe)
            time.sleep(SETTLE_S)
            with transport.reserve(wake_up_payload(namespace, number), WAKE_UP_NBYTES) as slot:
                slot.buffer[:] = bytes(WAKE_UP_NBYTES)
                published_ns = time.monotonic_ns()
                slot.publish()
            noticed_ns = _hear(pipe)
            assert isinstance(noticed_ns, int)
            late_us.append((noticed_ns - published_ns) / 1e3)
    counted = late_us[WAKE_UP_WARM_UPS:]
    deciles = statistics.quantiles(counted, n=10, method="inclusive")
    return WakeUpResult(tries=tries, p50_us=deciles[4], p90_us=deciles[8], max_us=max(counted))


def _order(pipe: Connection, what: ReceiveLane | NoticeWakeUps | None) -> None:
    try:
        pipe.send(what)
    except OSError as error:
        raise TransportError(_ENDED_EARLY) from error


def _hear(pipe: Connection) -> object:
    """What the receiving process says next."""
    try:
        if pipe.poll(TIMEOUT_S):
            said: object = pipe.recv()
            return said
    except (EOFError, OSError) as error:
        raise TransportError(_ENDED_EARLY) from error
    raise TransportError(f"the benchmark's receiving process said nothing for {TIMEOUT_S} s")
