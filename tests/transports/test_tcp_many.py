"""Many at once over tcp: clients that all call in the same moment, slow ones among them, and payloads of any size."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tcp_ends import BareCaller, TcpWorld

from omnikv.core.authentication import Proved, call
from omnikv.core.messages import Want
from omnikv.transports.memory_left import tightest_bound
from omnikv.transports.retry import BackOff
from omnikv.transports.tcp_messages import Leased

SOON_S = 100.0
CLIENTS, CONNECTIONS = 32, 32
SLOW_PART = 20


def test_d38_32_clients_with_32_connections_each_are_all_served_beside_slow_ones(stack):
    """Each connection is a target's reader of its own, which asks for its rank's payload; every 20th never ends."""
    world = TcpWorld(stack)
    source = world.source(targets=tuple(range(CLIENTS)), readers=CONNECTIONS, pool_nbytes=16 << 20)
    for rank in range(CLIENTS):
        with source.reserve(world.payload("r1", target=rank), 5) as slot:
            slot.buffer[:] = b"hello"
            slot.publish()
    start = threading.Barrier(CLIENTS)
    slow = []

    def connect(rank, reader, chance):
        """One connection, up and served; one that fails is made again after a wait."""
        back_off, deadline = BackOff(), time.monotonic() + SOON_S
        while True:
            caller = BareCaller(world.edge, source.address, rank=rank, reader=reader)
            if not (rank * CONNECTIONS + reader) % SLOW_PART:
                caller.connection.sendall(call(caller.claim, bytes(32), caller.secret)[1][:20])
                slow.append(caller)
                return None
            try:
                assert isinstance(caller.greet(), Proved)
                caller.say(caller.hello())
                assert b"hello" in caller.hear()
                caller.say(Want(1, "r1", "primary", 0, True))
                answer = msgspec.msgpack.decode(caller.hear(), type=Leased)
            except ConnectionError:
                caller.close()
                assert time.monotonic() < deadline
                back_off, wait_s = back_off.failed(chance.random())
                time.sleep(wait_s)
            else:
                return caller, answer

    def client(rank):
        start.wait()
        chance = random.Random(rank)
        return [connect(rank, reader, chance) for reader in range(CONNECTIONS)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        served = [one for client_s in pool.map(client, range(CLIENTS)) for one in client_s if one is not None]
    assert len(slow) == 52
    assert len(served) == CLIENTS * CONNECTIONS - len(slow)
    assert all(answer.nbytes == 5 for _, answer in served)
    for caller in [*slow, *(caller for caller, _ in served)]:
        caller.close()


@pytest.mark.slow
def test_a_payload_over_4_gib_arrives_whole(stack):
    nbytes = (4 << 30) + (96 << 20) + 12345
    if tightest_bound().left_nbytes < 3 * nbytes:
        pytest.skip("needs 12 GiB of memory")
    world = TcpWorld(stack)
    source, target = world.source(pool_nbytes=nbytes + (1 << 20)), world.target(landing_nbytes=nbytes + (1 << 20))
    block = os.urandom(1 << 20)
    payload = world.payload("huge")
    with source.reserve(payload, nbytes) as slot:
        for number, begin in enumerate(range(0, nbytes, len(block))):
            size = min(len(block), nbytes - begin)
            slot.buffer[begin : begin + size] = block[:size]
            slot.buffer[begin : begin + 4] = number.to_bytes(4, "big")
        slot.publish()
    with target.get(payload, deadline=time.monotonic() + 300) as lease:
        assert len(lease.buffer) == nbytes
        for number, begin in enumerate(range(0, nbytes, len(block))):
            size = min(len(block), nbytes - begin)
            piece = lease.buffer[begin : begin + size]
            assert piece[:4] == number.to_bytes(4, "big")
            # As bytes: views are compared element by element, which takes minutes here.
            assert bytes(piece[4:]) == block[4:size]
        lease.acknowledge()
    assert source.drain(deadline=time.monotonic() + 60) == 0
