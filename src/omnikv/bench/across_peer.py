"""The receiving process of the benchmark across hosts: does what the sending process tells it, and reports times.

Both processes run on one machine, over loopback, and read its monotonic clock. The *bare* lane is what everything is
compared with: one connection, one warm buffer, and nothing but `recv_into`.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from omnikv.bench.workload import Workload, bench_route
from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import ProducerFailed
from omnikv.handoff.api import KVReceiver
from omnikv.transports.base import Endpoint, Lease, Side
from omnikv.transports.tcp import TcpTransport

TIMEOUT_S = 120.0
# How many small requests are asked for at once.
IN_FLIGHT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One way over TCP: its name, a namespace of its own, where its source listens, and what both ends are given.

    `secret` is None for the user's own; `tls` are the files of a `Tls`; `checksum` counts where KV is handed over.
    """

    name: str
    namespace: str
    address: str
    secret: str | None = None
    tls: Mapping[str, Any] | None = None
    is_paged: bool = False
    checksum: bool = False

    def options(self) -> dict[str, Any]:
        """The options that both ends take."""
        secret = self.secret
        return {"secret": None if secret is None else lambda: secret, "tls": self.tls}

    def endpoint(self, side: Side) -> Endpoint:
        """One end of the lane."""
        return Endpoint(edge=self._edge, side=side, rank=0, peer_ranks=(0,))

    def payload(self, number: int) -> PayloadId:
        """The identity of the lane's payload of one round."""
        return PayloadId(edge=self._edge, transfer_id=request_name(number), source_rank=0, target_rank=0)

    @property
    def _edge(self) -> Edge:
        return Edge(from_stage="sender", to_stage="receiver", namespace=self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveRounds:
    """Receive `rounds` payloads of `workload` over the bare connection and over each lane, as `order_of` says."""

    workload: Workload
    rounds: int
    bare_port: int
    lanes: Sequence[Lane]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveSmall:
    """Receive `total` payloads over a lane, several at once, and say when the last one was there."""

    lane: Lane
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeDeath:
    """Wait for a payload of a source that is killed meanwhile, and say when that was known."""

    lane: Lane


Order = ReceiveRounds | ReceiveSmall | NoticeDeath


def order_of(number: int, lanes: Sequence[Lane]) -> list[Lane | None]:
    """The ways that one round takes, in its own order, the same at both ends; None is the bare connection.

    In a fixed order each way would always find the machine as the same other one left it.
    """
    return random.Random(number).sample([None, *lanes], len(lanes) + 1)


def request_name(number: int) -> str:
    """The id of one round's request."""
    return f"bench-{number}"


def serve(pipe: Connection) -> None:
    """Nothing; carries out the orders that come through `pipe` until None comes."""
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        if isinstance(order, ReceiveRounds):
            _receive_rounds(pipe, order)
        elif isinstance(order, ReceiveSmall):
            _receive_small(pipe, order)
        else:
            _notice_death(pipe, order)


def _receive_rounds(pipe: Connection, order: ReceiveRounds) -> None:
    with ExitStack() as stack:
        bare = stack.enter_context(socket.create_connection(("127.0.0.1", order.bare_port)))
        warm = memoryview(bytearray(order.workload.nbytes))
        # What travels before it is published may take half of it. Warm from the second round on, as the bare buffer is.
        room = {"landing_nbytes": 2 * order.workload.nbytes + (order.workload.nbytes >> 3) + (2 << 20)}
        receivers = {}
        for lane in order.lanes:
            receivers[lane.name] = _open(lane, order.workload, room)
            stack.callback(receivers[lane.name].close)
        for number in range(order.rounds):
            for way in order_of(number, order.lanes):
                pipe.send("waiting")
                if way is None:
                    _receive_bare(bare, warm)
                    pipe.send(time.monotonic_ns())
                    continue
                receiver = receivers[way.name]
                if isinstance(receiver, KVReceiver):
                    _receive_kv(pipe, receiver, order.workload, number, is_last=number + 1 == order.rounds)
                else:
                    _receive_bytes(pipe, receiver, way, number)


def _open(lane: Lane, workload: Workload, room: Mapping[str, int]) -> KVReceiver | TcpTransport:
    options = {**lane.options(), **room, "peers": {0: lane.address}}
    if lane.is_paged:
        return KVReceiver(bench_route(lane.namespace, workload.num_heads), rank=0, transport="tcp", options=options)
    return TcpTransport(lane.endpoint("target"), **options)


def _receive_bare(bare: socket.socket, warm: memoryview) -> None:
    at = 0
    while at < len(warm):
        at += bare.recv_into(warm[at:])


def _receive_bytes(pipe: Connection, target: TcpTransport, lane: Lane, number: int) -> None:
    lease = target.get(lane.payload(number), deadline=time.monotonic() + TIMEOUT_S)
    pipe.send(time.monotonic_ns())
    assert lease is not None
    size = len(lease.buffer)
    # Every page of it, as far as that can be told without the time that a whole comparison takes.
    content_ok = bytes(lease.buffer[::4096]) == bytes([number % 251]) * (-(-size // 4096))
    lease.acknowledge()
    pipe.send(content_ok)


def _receive_kv(pipe: Connection, receiver: KVReceiver, workload: Workload, number: int, *, is_last: bool) -> None:
    with receiver.receive(request_name(number), timeout_s=TIMEOUT_S) as kv:
        pipe.send(time.monotonic_ns())
        pipe.send(workload.matches(kv.layers) if is_last else True)


def _receive_small(pipe: Connection, order: ReceiveSmall) -> None:
    lane = order.lane
    with TcpTransport(lane.endpoint("target"), peers={0: lane.address}, **lane.options()) as target:
        pipe.send("waiting")
        for first in range(0, order.total, IN_FLIGHT):
            wanted = [lane.payload(number) for number in range(first, min(first + IN_FLIGHT, order.total))]
            for _, lease in target.get_as_ready(wanted, deadline=time.monotonic() + TIMEOUT_S):
                assert isinstance(lease, Lease)
                lease.acknowledge()
        pipe.send(time.monotonic_ns())


def _notice_death(pipe: Connection, order: NoticeDeath) -> None:
    lane = order.lane
    with TcpTransport(lane.endpoint("target"), peers={0: lane.address}, **lane.options()) as target:
        first = target.get(lane.payload(0), deadline=time.monotonic() + TIMEOUT_S)
        assert first is not None
        first.acknowledge()
        pipe.send("waiting")
        try:
            target.get(lane.payload(1), deadline=time.monotonic() + TIMEOUT_S)
        except ProducerFailed:
            pipe.send(time.monotonic_ns())
