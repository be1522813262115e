"""Mooncake and NIXL between processes, over their TCP: bytes, a kill in mid-payload, the next life, 4 GiB and more."""

import contextlib
import importlib
import secrets
import time
from pathlib import Path

import pytest
from answering_process import ToldProcess
from tcp_ends import free_address

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import ProducerFailed
from omnikv.transports.base import Endpoint
from omnikv.transports.registry import open_transport

PROGRAM = Path(__file__).with_name("engine_source.py")
ENGINES = {"mooncake": "mooncake.engine", "nixl": "nixl_cu12._api"}
# More than 32 bits count.
HUGE_NBYTES = (4 << 30) + (1 << 20) + 1


class Source(ToldProcess):
    def __init__(self, name, namespace, listen, pool_nbytes):
        super().__init__(PROGRAM, [name, namespace, listen, pool_nbytes])
        assert self.line() == b"open\n"

    def put(self, transfer_id, byte, nbytes):
        self.tell([transfer_id, byte, nbytes])
        assert self.line() == b"put\n"


class Pair:
    """A source process at one address, again and again, and a target here."""

    def __init__(self, name, stack):
        self.name, self.stack, self.address = name, stack, free_address()
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=f"test-{secrets.token_hex(8)}")

    def source(self, pool_nbytes=64 << 20):
        source = Source(self.name, self.edge.namespace, self.address, pool_nbytes)
        self.stack.callback(source.end)
        return source

    def target(self, landing_nbytes=64 << 20):
        endpoint = Endpoint(edge=self.edge, side="target", rank=0, peer_ranks=(0,))
        options = {"peers": {0: self.address}, "landing_nbytes": landing_nbytes}
        return self.stack.enter_context(open_transport(self.name, endpoint, options))

    def payload(self, transfer_id):
        return PayloadId(edge=self.edge, transfer_id=transfer_id, source_rank=0, target_rank=0)


@pytest.fixture(params=ENGINES)
def pair(request, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    try:
        importlib.import_module(ENGINES[request.param])
    except ImportError as error:
        pytest.skip(f"{request.param}'s engine cannot be loaded here: {error}")
    with contextlib.ExitStack() as stack:
        yield Pair(request.param, stack)


def soon(seconds=60):
    return time.monotonic() + seconds


def test_payloads_of_all_sizes_arrive_byte_for_byte(pair):
    source, target = pair.source(), pair.target()
    for number, nbytes in enumerate([1, 63, 4096, 100_001, 5 << 20]):
        source.put(f"r{number}", number, nbytes)
        with target.get(pair.payload(f"r{number}"), deadline=soon()) as lease:
            assert bytes(lease.buffer) == bytes([number]) * (nbytes - 1) + bytes([number + 1])
            lease.acknowledge()
    # What it held was acknowledged, so its pool takes all of them again.
    source.put("all of it", 9, 60 << 20)
    with target.get(pair.payload("all of it"), deadline=soon()) as lease:
        assert lease.buffer[-1] == 10


def test_a_source_killed_in_mid_payload_is_known_and_twenty_requests_of_its_next_life_succeed(pair, in_thread):
    source, target = pair.source(pool_nbytes=256 << 20), pair.target(landing_nbytes=256 << 20)
    source.put("first", 1, 1)
    target.get(pair.payload("first"), deadline=soon()).acknowledge()
    waiting = in_thread(target.get, pair.payload("large"), deadline=soon())
    source.put("large", 7, 200 << 20)
    give_up = soon()
    while target.pool.used_nbytes < 200 << 20:
        assert time.monotonic() < give_up
    source.kill()
    assert isinstance(waiting.exception(), ProducerFailed)
    while target.pool.used_nbytes:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    again = pair.source()
    for number in range(20):
        again.put(f"r{number}", number, 100_000)
        with target.get(pair.payload(f"r{number}"), deadline=soon()) as lease:
            assert bytes(lease.buffer) == bytes([number]) * 99_999 + bytes([number + 1])
            lease.acknowledge()


def test_a_process_that_used_an_engine_ends_as_it_wants_to(pair):
    source = pair.source()
    source.put("r", 1, 1000)
    source.end()
    assert source.process.returncode == 0


@pytest.mark.slow
def test_a_payload_of_more_than_32_bits_count_arrives_whole(pair):
    room = HUGE_NBYTES + (1 << 20)
    source, target = pair.source(pool_nbytes=room), pair.target(landing_nbytes=room)
    source.put("huge", 3, HUGE_NBYTES)
    with target.get(pair.payload("huge"), deadline=soon(600)) as lease:
        assert len(lease.buffer) == HUGE_NBYTES
        assert lease.buffer[-1] == 4
        for begin in range(0, HUGE_NBYTES - (1 << 20), 1 << 20):
            assert lease.buffer[begin : begin + (1 << 20)] == b"\3" * (1 << 20)
