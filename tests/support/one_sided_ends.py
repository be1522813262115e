"""Ends of a one-sided transport whose engine copies within this process, when and as the test lets it."""

import contextlib
import ctypes
import secrets
import threading
import time
from collections import deque

from omnikv.core.keys import Edge, PayloadId
from omnikv.transports.base import Capabilities, Endpoint
from omnikv.transports.one_sided import OneSidedTransport
from omnikv.transports.one_sided_engine import EngineFault, one_by_one
from omnikv.transports.proved_sockets import Meeting

PATIENCE_S = 30.0


class CopyingEngine:
    """Reads by copying, once `may_end` is set; `may_start` holds starts up. `refusals` and `endings` are codes of
    starts and reads to come that fail.
    """

    def __init__(self, *, needs_serving=False, notices=None):
        self.needs_serving = needs_serving
        # Where engines notify each other: what one source's engine has not heard yet.
        self.has_notices = notices is not None
        self.notices = notices
        self.name = secrets.token_hex(4)
        self.may_start, self.may_end = threading.Event(), threading.Event()
        self.may_start.set()
        self.may_end.set()
        self.refusals, self.endings = deque(), deque()
        self.registered = {}
        self.sources = set()
        self.started = threading.Semaphore(0)
        self.served = threading.Semaphore(0)
        self.ended = 0

    def hail(self):
        return self.name.encode()

    def register(self, address, nbytes):
        self.registered[address] = nbytes
        return f"{self.name} {address}".encode()

    def unregister(self, address):
        del self.registered[address]

    def learn(self, word):
        name = word.decode().split()[0]
        self.sources.add(name)
        return name

    def forget(self, source):
        self.sources.discard(source)

    def start(self, source, local, places, notice=b""):
        self.started.release()
        assert self.may_start.wait(60)
        if self.refusals:
            raise EngineFault("start", self.refusals.popleft())
        return CopyingRead(self, list(one_by_one(local, places)), notice)

    def serve(self):
        self.served.release()
        came = []
        while self.notices:
            came.append(self.notices.popleft())
        return came

    def close(self):
        assert not self.registered


class CopyingRead:
    def __init__(self, engine, moves, notice):
        self.engine = engine
        self.moves = moves
        self.notice = notice

    def poll(self):
        if not self.engine.may_end.is_set():
            return False
        self.engine.ended += 1
        if self.engine.endings:
            raise EngineFault("poll", self.engine.endings.popleft())
        for move in self.moves:
            ctypes.memmove(*move)
        if self.notice and self.engine.has_notices:
            self.engine.notices.append(self.notice)
        return True


class CopyingTransport(OneSidedTransport):
    name = "copying"
    capabilities = Capabilities(cross_process=False, cross_host=False, shared_memory=False, notices_peer_death=True)

    def __init__(self, endpoint, engine, *, pool_nbytes=4 << 20, landing_nbytes=4 << 20, lend=False, **meeting):
        super().__init__(
            endpoint,
            Meeting(**meeting),
            lambda: engine,
            pool_nbytes=pool_nbytes,
            landing_nbytes=landing_nbytes,
            segment_nbytes=1 << 20,
            lend=lend,
        )


class CopyingWorld:
    """One edge in a namespace of its own, and everything that a test opened on it."""

    def __init__(self, stack):
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=f"test-{secrets.token_hex(8)}")
        self.addresses = {}
        self.stack = stack

    def payload(self, transfer_id, source=0, target=0):
        return PayloadId(edge=self.edge, transfer_id=transfer_id, source_rank=source, target_rank=target)

    def source(self, rank=0, targets=(0,), *, engine=None, payload_ttl_s=300.0, **options):
        endpoint = Endpoint(edge=self.edge, side="source", rank=rank, peer_ranks=targets, payload_ttl_s=payload_ttl_s)
        transport = CopyingTransport(endpoint, engine or CopyingEngine(), **options)
        self.stack.callback(transport.close)
        self.addresses[rank] = transport.address
        return transport

    def target(self, rank=0, sources=(0,), *, engine=None, **options):
        endpoint = Endpoint(edge=self.edge, side="target", rank=rank, peer_ranks=sources)
        peers = {source: self.addresses[source] for source in sources}
        transport = CopyingTransport(endpoint, engine or CopyingEngine(), peers=peers, **options)
        self.stack.callback(transport.close)
        # Before it is closed, so that nothing is left that an engine never ends.
        self.stack.callback(transport.engine.may_start.set)
        self.stack.callback(transport.engine.may_end.set)
        return transport


@contextlib.contextmanager
def copying_world():
    with contextlib.ExitStack() as stack:
        yield CopyingWorld(stack)


def put(source, payload, data=b"payload"):
    with source.reserve(payload, len(data)) as slot:
        slot.buffer[:] = data
        slot.publish()


def soon():
    return time.monotonic() + PATIENCE_S


def take(target, payload):
    with target.get(payload, deadline=soon()) as lease:
        data = bytes(lease.buffer)
        lease.acknowledge()
    return data


def until(condition):
    give_up = soon()
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)
