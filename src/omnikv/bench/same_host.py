"""Two processes on one host over the shm transport: the sending side, which also keeps the time.

Put-then-get runs from the call of `send` to the moment when the receiver, which waits already, holds views of every
layer. A round measures the warm memcpy first, then the gather alone, then put-then-get, so that all three see the same
machine; a round's multiples are of its own memcpy and its own gather. One warm-up round, in which the pool is made, is
not counted. There is one lane with two packing threads, one with one, one with a checksum, and one whose requests
differ in length, each from all before it, so that nothing is known of their shapes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from omnikv.bench.measure import ExtraMemory, Spread, WarmCopy, reset_peak, timed_ms
from omnikv.bench.peer import give_order, hear
from omnikv.bench.receiver import TIMEOUT_S, LaneEnd, ReceiveLane, request_name, warm_up
from omnikv.bench.workload import Workload, bench_route
from omnikv.config import HandoffConfig
from omnikv.handoff.api import KVSender
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.fill import Job, fill

WARM_UP_ROUNDS = 1
# Long enough for a receiver that said "waiting" to be asleep in its wait.
SETTLE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a lane took, `_x` as multiples: of the same round's warm memcpy, or of its gather alone."""

    put_then_get_ms: Spread
    put_then_get_x: Spread
    put_then_get_x_gather: Spread
    gather_x: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """One payload size: what each lane took, and the memory of both sides with two packing threads."""

    size_mib: int
    payload_nbytes: int
    rounds: int
    memcpy_ms: Spread
    two_threads: Times
    one_thread: Times
    checksum: Times
    varied: Times
    sender_memory: ExtraMemory
    receiver_memory: ExtraMemory
    content_ok: bool


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

    def times(self) -> Times:
        return Times(
            put_then_get_ms=Spread.of([one.put_then_get_ms for one in self.rounds]),
            put_then_get_x=Spread.of([one.put_then_get_ms / one.memcpy_ms for one in self.rounds]),
            put_then_get_x_gather=Spread.of([one.put_then_get_ms / one.gather_ms for one in self.rounds]),
            gather_x=Spread.of([one.gather_ms / one.memcpy_ms for one in self.rounds]),
        )


def measure_size(pipe: Connection, workload: Workload, rounds: int) -> SizeResult:
    """What handing over `workload` costs, over `rounds` rounds a lane.

    Raises:
        TransportError: the receiving process is gone.
        OmniKVError: the handoff failed.
    """
    warm_up(f"bench-{os.getpid()}-warm-up")
    caches = workload.build_caches()
    copy = WarmCopy(workload.nbytes)
    paged = workload.paged(caches)
    usual = HandoffConfig(pack_threads=2, checksum=False)

    def run_lane(name: str, config: HandoffConfig, request: Callable[[int], PagedKV] = lambda number: paged) -> _Lane:
        return _run_lane(pipe, workload, name, request, copy, rounds, config)

    two = run_lane("two", usual)
    one = run_lane("one", HandoffConfig(pack_threads=1, checksum=False))
    checked = run_lane("checked", HandoffConfig(pack_threads=2, checksum=True))
    varied = run_lane("varied", usual, lambda number: workload.paged(caches, workload.shorter(number)))
    lanes = (two, one, checked, varied)
    return SizeResult(
        size_mib=workload.size_mib,
        payload_nbytes=workload.nbytes,
        rounds=rounds,
        memcpy_ms=Spread.of([one.memcpy_ms for lane in lanes for one in lane.rounds]),
        two_threads=two.times(),
        one_thread=one.times(),
        checksum=checked.times(),
        varied=varied.times(),
        sender_memory=two.sender_memory,
        receiver_memory=two.receiver.memory,
        content_ok=all(lane.receiver.content_ok for lane in lanes),
    )


def hand_over_once(pipe: Connection, workload: Workload) -> bool:
    """Whether one request came over bit for bit; for sizes of which there is no room for a second copy.

    Raises:
        TransportError: the receiving process is gone.
        OmniKVError: the handoff failed.
    """
    namespace = f"bench-{os.getpid()}-once"
    give_order(pipe, ReceiveLane(workload=workload, namespace=namespace, num_requests=0))
    paged = workload.paged(workload.build_caches())
    route = bench_route(namespace, workload.num_heads)
    with KVSender(route, rank=0, transport="shm", options=_room_for(workload)) as sender:
        hear(pipe)
        sender.send(request_name(0), paged)
        end = hear(pipe)
        assert isinstance(end, LaneEnd)
    return end.content_ok


def _run_lane(
    pipe: Connection,
    workload: Workload,
    name: str,
    request: Callable[[int], PagedKV],
    copy: WarmCopy,
    rounds: int,
    config: HandoffConfig,
) -> _Lane:
    """The lane whose round `number` sends `request(number)`, 0 being the whole workload."""
    namespace = f"bench-{os.getpid()}-{workload.size_mib}-{name}"
    total = WARM_UP_ROUNDS + rounds
    give_order(pipe, ReceiveLane(workload=workload, namespace=namespace, num_requests=total))
    base = reset_peak()
    route = bench_route(namespace, workload.num_heads)
    with KVSender(route, rank=0, transport="shm", options=_room_for(workload), config=config) as sender:
        done = [_measure_round(pipe, sender, request, copy, number) for number in range(total)]
        memory = ExtraMemory.since(base)
        hear(pipe)
        _wait_for_free_room(sender)
        sender.send(request_name(total), request(0))
        end = hear(pipe)
        assert isinstance(end, LaneEnd)
    return _Lane(rounds=done[WARM_UP_ROUNDS:], sender_memory=memory, receiver=end)


def _room_for(workload: Workload) -> dict[str, int]:
    # One payload at a time, its header, and rounding to pages.
    room_nbytes = workload.nbytes + workload.nbytes // 8 + (1 << 20)
    return {"pool_nbytes": room_nbytes}


def _measure_round(
    pipe: Connection, sender: KVSender, request: Callable[[int], PagedKV], copy: WarmCopy, number: int
) -> _Round:
    gather, paged = _gather_jobs(copy.target, request(number)), request(number)
    _wait_for_free_room(sender)
    memcpy_ms = copy.time_ms()
    gather_ms = timed_ms(lambda: fill(gather, sender.config.pack_threads))
    hear(pipe)
    time.sleep(SETTLE_S)
    started_ns = time.monotonic_ns()
    sender.send(request_name(number), paged)
    finished_ns = hear(pipe)
    assert isinstance(finished_ns, int)
    return _Round(memcpy_ms=memcpy_ms, gather_ms=gather_ms, put_then_get_ms=(finished_ns - started_ns) / 1e6)


def _wait_for_free_room(sender: KVSender) -> None:
    # The receiver is done with the last round's payload, but its word of that may still be under way.
    sender.drain(timeout_s=TIMEOUT_S)


def _gather_jobs(room: torch.Tensor, paged: PagedKV) -> list[Job]:
    """What it takes to gather the request into `room`, which is warm memory of this process."""
    jobs: list[Job] = []
    at = 0
    for layer in paged.layer_sources():
        for source in layer:
            nbytes = source.dtype.itemsize * torch.Size(source.shape).numel()
            jobs.append((source, room[at : at + nbytes].view(source.dtype).view(source.shape)))
            at += nbytes
    return jobs
