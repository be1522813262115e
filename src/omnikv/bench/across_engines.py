"""Mooncake and NIXL between two processes over their TCP, beside the same engine driven bare in the same run.

A round reads the same number of bytes twice, in an order of its own: bare, by one call of the engine over a connection
that stands, asked after until it is there, without a pause where asking is what moves it; and through our transport
over that engine, from the payload's publication to the receiver's lease, what is said included. Both ways read memory
that was mapped, touched and made known to the engine long before, which the source wrote just now, after the receiver
had looked at what it read last; and both begin once the receiver waits and all is quiet. Each process keeps to its half
of the cores, as two hosts would. Our rate is told as a multiple of the bare one of its round. One warm-up round is not
counted.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from omnikv.bench.measure import Spread
from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import ProducerFailed, TransportError, TransportUnavailable
from omnikv.transports.base import Endpoint, Side
from omnikv.transports.one_sided import OneSidedTransport
from omnikv.transports.one_sided_engine import Engine, Place
from omnikv.transports.registry import open_transport
from omnikv.transports.shm_map import make_segment

ENGINES = ("mooncake", "nixl")
WARM_UP_ROUNDS = 1
TIMEOUT_S = 120.0
# NIXL's network here; others would not be the same for both ways.
UCX_TLS = "tcp,self"
SETTLE_S = 0.005
PAUSE_S = 0.00005


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One engine at one size: `rate_x` is our rate as a multiple of the bare engine's in the same round."""

    engine: str
    size_mib: int
    rounds: int
    bare_ms: Spread
    ours_ms: Spread
    rate_x: Spread
    content_ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeath:
    """How late the death of a sender over an engine was known."""

    engine: str
    noticed_ms: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One edge over one engine, in a namespace of its own."""

    engine: str
    namespace: str
    address: str

    def open(self, side: Side, nbytes: int) -> OneSidedTransport:
        """One end with room for two payloads of `nbytes`.

        Raises:
            TransportUnavailable: the engine is not installed, or does not start.
        """
        room = {"pool_nbytes" if side == "source" else "landing_nbytes": 2 * nbytes + (4 << 20)}
        where = {"listen": self.address} if side == "source" else {"peers": {0: self.address}}
        endpoint = Endpoint(edge=self._edge, side=side, rank=0, peer_ranks=(0,))
        transport = open_transport(self.engine, endpoint, {**where, **room})
        assert isinstance(transport, OneSidedTransport)
        return transport

    def payload(self, number: int) -> PayloadId:
        """The identity of one round's payload."""
        return PayloadId(edge=self._edge, transfer_id=f"bench-{number}", source_rank=0, target_rank=0)

    @property
    def _edge(self) -> Edge:
        return Edge(from_stage="sender", to_stage="receiver", namespace=self.namespace)


def new_way(engine: str) -> Way:
    """A way of this process's own, at an address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    return Way(engine=engine, namespace=f"bench-{secrets.token_hex(8)}", address=address)


def engines_here() -> list[str]:
    """The engines that start on this machine."""
    os.environ.setdefault("UCX_TLS", UCX_TLS)
    found = []
    for name in ENGINES:
        with suppress(TransportUnavailable), new_way(name).open("source", 1):
            found.append(name)
    return found


def measure_engine(engine: str, size_mib: int, rounds: int) -> EngineResult:
    """What one payload size takes over `engine`, bare and through our transport.

    Raises:
        TransportError: the receiving process is gone, or a read failed.
    """
    way, nbytes, total = new_way(engine), size_mib << 20, WARM_UP_ROUNDS + rounds
    with ExitStack() as stack:
        pipe = stack.enter_context(_process(_receive, way, nbytes, total))
        stack.enter_context(_in_half(0))
        source = stack.enter_context(closing(way.open("source", nbytes)))
        memory = stack.enter_context(_known(source.engine, nbytes))
        pipe.send((source.engine.hail(), memory.word, memory.address))
        bare, ours, content = [], [], True
        for number in range(total):
            for is_bare in _order_of(number):
                if is_bare:
                    bare.append(_show_bare(pipe, source, memory, number))
                else:
                    ours.append(_send(pipe, source, way.payload(number), nbytes, number))
                content &= bool(_hear(pipe))
                source.drain(deadline=time.monotonic() + TIMEOUT_S)
    bare, ours = bare[WARM_UP_ROUNDS:], ours[WARM_UP_ROUNDS:]
    return EngineResult(
        engine=engine,
        size_mib=size_mib,
        rounds=rounds,
        bare_ms=Spread.of(bare),
        ours_ms=Spread.of(ours),
        rate_x=Spread.of([alone / through for alone, through in zip(bare, ours, strict=True)]),
        content_ok=content,
    )


def measure_engine_death(engine: str, deaths: int) -> EngineDeath:
    """How late a receiver that waits knows that its sender was killed.

    Raises:
        TransportError: a process is gone too early.
    """
    return EngineDeath(engine=engine, noticed_ms=Spread.of([_kill_one(new_way(engine)) for _ in range(deaths)]))


def _order_of(number: int) -> list[bool]:
    """In which order a round takes the ways, the same at both ends; true is the bare one."""
    return random.Random(number).sample([True, False], 2)


def _show_bare(pipe: Connection, source: OneSidedTransport, memory: _Memory, number: int) -> float:
    """How many milliseconds the receiver's engine takes to read `memory`."""
    _fill(memory.view, number)
    _hear(pipe)
    time.sleep(SETTLE_S)
    with _served(source.engine):
        pipe.send("read")
        return float(_hear(pipe))


def _send(pipe: Connection, source: OneSidedTransport, payload: PayloadId, nbytes: int, number: int) -> float:
    """How many milliseconds a payload takes from its publication to the receiver's lease."""
    with source.reserve(payload, nbytes) as slot:
        _fill(slot.buffer, number)
        _hear(pipe)
        time.sleep(SETTLE_S)
        started_ns = time.monotonic_ns()
        slot.publish()
    return (int(_hear(pipe)) - started_ns) / 1e6


def _receive(pipe: Connection, way: Way, nbytes: int, total: int) -> None:
    with _in_half(1), closing(way.open("target", nbytes)) as target, _known(target.engine, nbytes) as memory:
        engine = target.engine
        hail, word, remote = pipe.recv()
        source = engine.learn(hail)
        if word:
            engine.learn(word)
        for number in range(total):
            for is_bare in _order_of(number):
                pipe.send("waiting")
                if is_bare:
                    pipe.recv()
                    pipe.send(_read_bare(engine, source, memory.address, (remote, nbytes)))
                    pipe.send(_is_whole(memory.view, number))
                    continue
                lease = target.get(way.payload(number), deadline=time.monotonic() + TIMEOUT_S)
                pipe.send(time.monotonic_ns())
                assert lease is not None
                pipe.send(_is_whole(lease.buffer, number))
                lease.acknowledge()


def _read_bare(engine: Engine, source: str, local: int, place: Place) -> float:
    """How many milliseconds one read takes."""
    began = time.perf_counter()
    reading = engine.start(source, local, [place])
    while not reading.poll():
        if not engine.needs_serving:
            time.sleep(PAUSE_S)
    return (time.perf_counter() - began) * 1e3


def _kill_one(way: Way) -> float:
    with _process(_wait_for_nothing, way) as waiting:
        context = multiprocessing.get_context("spawn")
        ready, said = context.Pipe()
        source = context.Process(target=_serve_and_wait, args=(said, way), daemon=True, name="bench-source")
        source.start()
        try:
            _hear(ready)
            _hear(waiting)
            time.sleep(SETTLE_S)
            killed_ns = time.monotonic_ns()
            assert source.pid is not None
            os.kill(source.pid, signal.SIGKILL)
            return (int(_hear(waiting)) - killed_ns) / 1e6
        finally:
            source.kill()
            source.join()


def _wait_for_nothing(pipe: Connection, way: Way) -> None:
    with closing(way.open("target", 1)) as target:
        first = target.get(way.payload(0), deadline=time.monotonic() + TIMEOUT_S)
        assert first is not None
        first.acknowledge()
        pipe.send("waiting")
        with suppress(ProducerFailed):
            target.get(way.payload(1), deadline=time.monotonic() + TIMEOUT_S)
        pipe.send(time.monotonic_ns())


def _serve_and_wait(pipe: Connection, way: Way) -> None:
    with closing(way.open("source", 1)) as source:
        with source.reserve(way.payload(0), 1) as slot:
            slot.publish()
        pipe.send("ready")
        signal.pause()


@dataclass(frozen=True, slots=True)
class _Memory:
    view: memoryview
    address: int
    word: bytes


@contextmanager
def _known(engine: Engine, nbytes: int) -> Iterator[_Memory]:
    """Warm memory that the engine knows."""
    _, view = make_segment(nbytes)
    anchor = ctypes.c_char.from_buffer(view)
    address = ctypes.addressof(anchor)
    word = engine.register(address, nbytes)
    try:
        yield _Memory(view, address, word)
    finally:
        engine.unregister(address)


@contextmanager
def _in_half(which: int) -> Iterator[None]:
    """Meanwhile this process and all threads that it starts keep to one half of its cores, if it has two."""
    cores = sorted(os.sched_getaffinity(0))
    half = cores[which::2] or cores
    _keep_to(half)
    try:
        yield
    finally:
        _keep_to(cores)


def _keep_to(cores: Iterable[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@contextmanager
def _served(engine: Engine) -> Iterator[None]:
    """Meanwhile a thread lets reads of this process's memory go on, where the engine needs that."""
    if not engine.needs_serving:
        yield
        return
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            engine.serve()
            time.sleep(0)

    thread = threading.Thread(target=serve, name="bench-serve", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _process(what: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """The pipe to a process that does `what`, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=what, args=(there, *arguments), daemon=True, name="bench-receiver")
    process.start()
    there.close()
    try:
        yield here
        process.join(TIMEOUT_S)
    finally:
        here.close()
        process.kill()
        process.join()
        process.close()


def _hear(pipe: Connection) -> Any:
    try:
        if pipe.poll(TIMEOUT_S):
            return pipe.recv()
    except (EOFError, OSError) as error:
        raise TransportError("a process of the benchmark ended early; its own output says why") from error
    raise TransportError(f"a process of the benchmark said nothing for {TIMEOUT_S} s")


def _fill(buffer: memoryview, number: int) -> None:
    torch.frombuffer(buffer, dtype=torch.uint8).fill_(number % 251)


def _is_whole(buffer: memoryview, number: int) -> bool:
    """Whether every page is what `_fill` wrote, as far as that can be told without reading all of it."""
    return bytes(buffer[::4096]) == bytes([number % 251]) * (-(-len(buffer) // 4096))
