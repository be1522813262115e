"""Ends of an edge that no other test uses: in this process, in a process of their own, or as a bare socket."""

import contextlib
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from answering_process import AnsweringProcess

from omnikv.core.keys import Edge, PayloadId
from omnikv.core.messages import PROTOCOL_VERSION, Hello
from omnikv.transports.base import Endpoint
from omnikv.transports.shm import ShmTransport
from omnikv.transports.shm_address import open_socket, rank_address
from omnikv.transports.shm_link import encode

PROGRAM = Path(__file__).with_name("rank_process.py")


class RankProcess(AnsweringProcess):
    """A process that serves one rank."""

    def __init__(self, namespace, side, rank, peers, terms):
        super().__init__(PROGRAM, [namespace, side, rank, list(peers), terms])


class World:
    """One edge in a namespace of its own, and everything that a test opened on it."""

    def __init__(self, stack):
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=f"test-{secrets.token_hex(8)}")
        self._stack = stack

    def payload(self, transfer_id, source=0, target=0):
        return PayloadId(edge=self.edge, transfer_id=transfer_id, source_rank=source, target_rank=target)

    def open(self, side, rank=0, peers=(0,), facts=None, reader=0, num_readers=1, **options):
        endpoint = Endpoint(
            edge=self.edge,
            side=side,
            rank=rank,
            peer_ranks=peers,
            facts=facts or {},
            reader=reader,
            num_readers=num_readers,
        )
        transport = ShmTransport(endpoint, **options)
        self._stack.callback(transport.close)
        return transport

    def spawn(self, side, rank=0, peers=(0,), **terms):
        process = RankProcess(self.edge.namespace, side, rank, peers, terms)
        self._stack.callback(process.end)
        return process

    def hello(self, side, /, **changes):
        fields = {
            "version": PROTOCOL_VERSION,
            "namespace": self.edge.namespace,
            "from_stage": "prefill",
            "to_stage": "decode",
            "replica": 0,
            "side": side,
            "rank": 0,
            "pid": 1,
            "incarnation": secrets.token_hex(4),
            "facts": {},
        }
        return encode(Hello(**{**fields, **changes}))

    def knock(self, side, rank=0):
        """A bare connection to an open end, blocking; its Hello is read already."""
        connection = self._stack.enter_context(open_socket())
        connection.setblocking(True)
        connection.connect(rank_address(self.edge, side, rank))
        assert b"hello" in connection.recv(1 << 17)
        return connection

    def pose(self, side, rank=0, backlog=16):
        """A bare listener at the address of a rank."""
        listener = self._stack.enter_context(open_socket())
        listener.setblocking(True)
        listener.bind(rank_address(self.edge, side, rank))
        listener.listen(backlog)
        return listener


@pytest.fixture
def stack():
    """What a test opened, closed after it."""
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.fixture
def world():
    with contextlib.ExitStack() as stack:
        yield World(stack)


def read_to_the_end(connection: socket.socket) -> list[bytes]:
    """The packets that a bare connection still gets before its other side ends it."""
    packets = []
    while True:
        try:
            packet = connection.recv(1 << 17)
        except ConnectionResetError:
            continue
        if not packet:
            return packets
        packets.append(packet)


@pytest.fixture
def the_rest_of():
    return read_to_the_end


@pytest.fixture
def in_thread():
    """Calls a function in a thread of its own; the result is a future."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit
