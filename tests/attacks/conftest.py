"""A source and a target that trust each other, and whoever else calls the source."""

import contextlib
import logging
import os
import secrets
import socket
import time

import pytest
from tcp_ends import TcpWorld

SOON_S = 60.0


class Attacked(TcpWorld):
    """A pair under attack. Whatever was done to it, `works` shows that it still serves."""

    def open(self):
        # Target rank 1 is the attacker's, where it is one that knows the secret.
        self.the_source, self.the_target = self.source(targets=(0, 1)), self.target()
        self.works()
        return self

    @property
    def address(self):
        return self.the_source.address

    def works(self):
        payload = self.payload(secrets.token_hex(4))
        with self.the_source.reserve(payload, 7) as slot:
            slot.buffer[:] = b"payload"
            slot.publish()
        with self.the_target.get(payload, deadline=time.monotonic() + SOON_S) as lease:
            assert bytes(lease.buffer) == b"payload"
            lease.acknowledge()

    def connect(self):
        """A connection of somebody who has said nothing."""
        host, port = self.address.rsplit(":", 1)
        return self.stack.enter_context(socket.create_connection((host, int(port)), timeout=SOON_S))

    def until_counted(self, kind, times=1):
        self.until(lambda: self.the_source.counters.get(kind, 0) >= times)

    def until(self, holds):
        deadline = time.monotonic() + SOON_S
        while not holds():
            assert time.monotonic() < deadline, self.the_source.counters
            os.sched_yield()


def is_ended(connection):
    """Whether the other side ends the connection, whatever it says before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


@pytest.fixture
def attacked():
    with contextlib.ExitStack() as stack:
        yield Attacked(stack).open()


@pytest.fixture
def hurried(monkeypatch):
    """A pair whose source gives a greeting half a second."""
    monkeypatch.setattr("omnikv.transports.proved_sockets.GREETING_S", 0.5)
    with contextlib.ExitStack() as stack:
        yield Attacked(stack).open()


@pytest.fixture
def ended():
    return is_ended


@pytest.fixture
def warnings_of(caplog):
    """The lines that were logged about one end, without repetitions at lower levels."""

    def find(words):
        return [
            record.message
            for record in caplog.records
            if record.name == "omnikv.tcp" and record.levelno >= logging.WARNING and words in record.message
        ]

    return find
