"""Attack: more connections, asks and announcements than anybody needs: bounded, counted, and nobody else notices."""

import itertools
import os
import secrets
import socket

import pytest

from omnikv.bench.measure import MemoryUse
from omnikv.core.messages import Ack, Interest, Return, Unwant, Want
from omnikv.transports.base import MAX_ASKS
from omnikv.transports.proved_link import encode
from omnikv.transports.stream_frames import frame

STRANGERS = 32


def send_until_ended(peer, messages):
    for message in messages:
        peer.say(message)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_flood_of_silent_connections_is_bounded(attacked, monkeypatch):
    monkeypatch.setattr(attacked.the_source._loop, "_max_unready", STRANGERS)
    before = descriptors()
    silent = [attacked.connect() for _ in range(5 * STRANGERS)]
    attacked.until_counted("evicted", 4 * STRANGERS)
    assert descriptors() - before - len(silent) <= STRANGERS + 2
    attacked.works()


def test_connections_that_come_and_go_leave_nothing(attacked):
    before = descriptors()
    for _ in range(300):
        attacked.connect().close()
    attacked.works()
    door = attacked.the_source._sockets.door
    attacked.until(lambda: descriptors() - before <= 4)
    assert len(door._greetings) <= 4
    assert len(door._agenda) == 0


def test_more_asks_than_allowed_end_the_peer_and_nobody_else(attacked):
    peer = attacked.caller(attacked.address, rank=1).enter()
    asks = (Want(ask, secrets.token_hex(8), "primary", 0, True) for ask in range(100 * MAX_ASKS))
    with pytest.raises(ConnectionError):
        send_until_ended(peer, asks)
    attacked.until_counted("refused_message")
    attacked.works()


def test_more_announcements_than_allowed_end_the_peer(attacked):
    peer = attacked.caller(attacked.address, rank=1).enter()
    announced = (Interest(secrets.token_hex(8), "primary", 0, True) for _ in range(100 * MAX_ASKS))
    with pytest.raises(ConnectionError):
        send_until_ended(peer, announced)
    attacked.until_counted("refused_message")
    attacked.works()


def test_a_peer_that_never_reads_is_cut_off(attacked, monkeypatch):
    monkeypatch.setattr("omnikv.transports.proved_link.MAX_QUEUED_NBYTES", 1 << 16)
    deaf = attacked.caller(attacked.address, rank=1).enter()
    ready = attacked.the_source._loop._ready
    attacked.until(lambda: any(link.seat.rank == 1 for link in list(ready)))
    (link,) = (link for link in list(ready) if link.seat.rank == 1)
    link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    with pytest.raises(ConnectionError):
        send_until_ended(deaf, itertools.repeat(Want(1, "r", "primary", 0, False)))
    attacked.until_counted("stuck_peers")
    attacked.works()


@pytest.mark.slow
def test_a_million_unknown_ids_leave_memory_flat(attacked):
    """Asked for, taken back, acknowledged and returned: what nobody has is remembered by nobody."""
    peer = attacked.caller(attacked.address, rank=1).enter()

    def ask(number):
        name = f"unknown-{number:012}"
        return (
            Want(2 * number, name, "primary", 0, False),
            Want(2 * number + 1, name, "primary", 0, True),
            Unwant(2 * number + 1),
            Ack(number),
            Return(number),
        )

    def ask_many(first, count):
        """In batches, so that nobody waits for each answer."""
        for start in range(first, first + count, 200):
            packets = [frame(encode(message)) for number in range(start, start + 200) for message in ask(number)]
            peer.connection.sendall(b"".join(packets))
            assert all(b"absent" in peer.hear() for _ in range(200))

    ask_many(0, 20_000)
    before = MemoryUse.now().resident
    ask_many(20_000, 1_000_000)
    assert MemoryUse.now().resident - before < 8 << 20
    attacked.works()


def test_five_thousand_unknown_ids_leave_nothing_at_the_source(attacked):
    peer = attacked.caller(attacked.address, rank=1).enter()
    for number in range(5_000):
        peer.say(Want(number, f"unknown-{number}", "primary", 0, False))
        assert b"absent" in peer.hear()
    offers = attacked.the_source._source
    assert not offers._waiting
    assert len(offers._ledger._records) <= 1
    attacked.works()
