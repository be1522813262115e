"""The other processes of the benchmark of engines, a receiver and one that is killed, and what both of its ends do."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import ProducerFailed
from omnikv.transports.base import Endpoint, Side
from omnikv.transports.one_sided import OneSidedTransport
from omnikv.transports.one_sided_engine import Engine, Place
from omnikv.transports.registry import open_transport
from omnikv.transports.shm_map import make_segment

TIMEOUT_S = 120.0
PAUSE_S = 0.00005


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


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """Memory that an engine knows, and what a peer must learn to read it."""

    view: memoryview
    address: int
    word: bytes


def order_of(number: int) -> list[bool]:
    """In which order a round takes the ways, the same at both ends; true is the bare one."""
    return random.Random(number).sample([True, False], 2)


def receive(pipe: Connection, way: Way, nbytes: int, total: int) -> None:
    """Nothing; reads the payloads of `total` rounds, bare and over `way`, and says when or in what time."""
    with in_half(1), closing(way.open("target", nbytes)) as target, known(target.engine, nbytes) as memory:
        engine = target.engine
        hail, word, remote = pipe.recv()
        source = engine.learn(hail)
        if word:
            engine.learn(word)
        for number in range(total):
            for is_bare in order_of(number):
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


def wait_for_nothing(pipe: Connection, way: Way) -> None:
    """Nothing; waits for a payload of a source that is killed meanwhile, and says when that was known."""
    with closing(way.open("target", 1)) as target:
        first = target.get(way.payload(0), deadline=time.monotonic() + TIMEOUT_S)
        assert first is not None
        first.acknowledge()
        pipe.send("waiting")
        with suppress(ProducerFailed):
            target.get(way.payload(1), deadline=time.monotonic() + TIMEOUT_S)
        pipe.send(time.monotonic_ns())


def serve_and_wait(pipe: Connection, way: Way) -> None:
    """Nothing; a source with one payload, until it is killed."""
    with closing(way.open("source", 1)) as source:
        with source.reserve(way.payload(0), 1) as slot:
            slot.publish()
        pipe.send("ready")
        signal.pause()


@contextmanager
def known(engine: Engine, nbytes: int) -> Iterator[KnownMemory]:
    """Warm memory that the engine knows."""
    _, view = make_segment(nbytes)
    anchor = ctypes.c_char.from_buffer(view)
    address = ctypes.addressof(anchor)
    word = engine.register(address, nbytes)
    try:
        yield KnownMemory(view, address, word)
    finally:
        engine.unregister(address)


@contextmanager
def in_half(which: int) -> Iterator[None]:
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


def fill(buffer: memoryview, number: int) -> None:
    """Nothing; writes what a round's payload holds."""
    torch.frombuffer(buffer, dtype=torch.uint8).fill_(number % 251)


def _is_whole(buffer: memoryview, number: int) -> bool:
    """Whether every page is what `fill` wrote, as far as that can be told without reading all of it."""
    return bytes(buffer[::4096]) == bytes([number % 251]) * (-(-len(buffer) // 4096))
