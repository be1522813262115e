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

import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from omnikv.bench.across_engines_peer import (
    TIMEOUT_S,
    KnownMemory,
    Way,
    fill,
    in_half,
    known,
    order_of,
    receive,
    serve_and_wait,
    wait_for_nothing,
)
from omnikv.bench.measure import Spread
from omnikv.core.keys import PayloadId
from omnikv.errors import TransportError, TransportUnavailable
from omnikv.transports.one_sided import OneSidedTransport
from omnikv.transports.one_sided_engine import Engine

ENGINES = ("mooncake", "nixl")
WARM_UP_ROUNDS = 1
# NIXL's network here; others would not be the same for both ways.
UCX_TLS = "tcp,self"
SETTLE_S = 0.005


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
        pipe = stack.enter_context(_process(receive, way, nbytes, total))
        stack.enter_context(in_half(0))
        source = stack.enter_context(closing(way.open("source", nbytes)))
        memory = stack.enter_context(known(source.engine, nbytes))
        pipe.send((source.engine.hail(), memory.word, memory.address))
        bare, ours, content = [], [], True
        for number in range(total):
            for is_bare in order_of(number):
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


def _show_bare(pipe: Connection, source: OneSidedTransport, memory: KnownMemory, number: int) -> float:
    """How many milliseconds the receiver's engine takes to read `memory`."""
    fill(memory.view, number)
    _hear(pipe)
    time.sleep(SETTLE_S)
    with _served(source.engine):
        pipe.send("read")
        return float(_hear(pipe))


def _send(pipe: Connection, source: OneSidedTransport, payload: PayloadId, nbytes: int, number: int) -> float:
    """How many milliseconds a payload takes from its publication to the receiver's lease."""
    with source.reserve(payload, nbytes) as slot:
        fill(slot.buffer, number)
        _hear(pipe)
        time.sleep(SETTLE_S)
        started_ns = time.monotonic_ns()
        slot.publish()
    return (int(_hear(pipe)) - started_ns) / 1e6


def _kill_one(way: Way) -> float:
    with _process(wait_for_nothing, way) as waiting:
        context = multiprocessing.get_context("spawn")
        ready, said = context.Pipe()
        source = context.Process(target=serve_and_wait, args=(said, way), daemon=True, name="bench-source")
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
