"""One TCP connection, plain or encrypted, that never blocks: bytes in and out, and what it waits for."""

from __future__ import annotations

import math
import socket
import ssl
from typing import NamedTuple

# What a read or write of an encrypted connection raises where a plain one would block.
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Encryption(NamedTuple):
    """How one connection is to be encrypted; `host` is what the peer was called by, and empty at the side called."""

    context: ssl.SSLContext
    host: str


class Stream:
    """A connection and its encryption. It belongs to one thread at a time."""

    def __init__(self, connection: socket.socket, encryption: Encryption | None) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._encryption = encryption
        self._shaking: ssl.SSLSocket | None = None
        self._wants_write = False
        self._wakes_at_nbytes = 1

    @property
    def wants_write(self) -> bool:
        """Whether the encryption's handshake waits for the connection to take bytes."""
        return self._wants_write

    @property
    def has_unread(self) -> bool:
        """Whether bytes were taken off the connection that nobody has read yet; no selector knows of them."""
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0

    @property
    def is_encrypted(self) -> bool:
        """Whether it is, by now."""
        return isinstance(self.connection, ssl.SSLSocket)

    def shake_hands(self) -> bool:
        """Whether the encryption stands (or none was asked for); call again when the connection moves. It is connected.

        Raises:
            ssl.SSLError: the peer's certificate is not taken, or ours is not, or it does not encrypt.
            OSError: the connection broke.
        """
        if self._encryption is None:
            return True
        if self._shaking is None:
            context, host = self._encryption
            self._shaking = context.wrap_socket(
                self.connection,
                server_side=not host,
                server_hostname=host or None,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=True,
            )
            self.connection = self._shaking
        self._wants_write = False
        try:
            self._shaking.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._wants_write = True
            return False
        self._encryption = None
        return True

    def read(self, most_nbytes: int) -> bytes | None:
        """What came, empty at the end of the connection, or None where nothing is there.

        Raises:
            OSError: the connection broke.
        """
        try:
            return self.connection.recv(most_nbytes)
        except _WOULD_BLOCK:
            return None

    def read_into(self, view: memoryview) -> int | None:
        """How many bytes came into `view`, 0 at the end of the connection, or None where nothing is there.

        Raises:
            OSError: the connection broke.
        """
        try:
            return self.connection.recv_into(view)
        except _WOULD_BLOCK:
            return None

    def wake_at(self, nbytes: int) -> None:
        """Nothing; a selector calls the connection readable when it has `nbytes` to read, or has ended, not before.

        So many must be about to come. An encrypted one is readable as soon as anything comes.
        """
        if nbytes != self._wakes_at_nbytes and not self.is_encrypted:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at_nbytes = nbytes

    def write(self, data: bytes | memoryview) -> int:
        """How many bytes of `data` the connection took.

        Raises:
            OSError: the connection broke.
        """
        try:
            return self.connection.send(data)
        except _WOULD_BLOCK:
            return 0

    def write_all(self, parts: list[memoryview]) -> int:
        """How many bytes of `parts`, one after the other, the connection took; in one call where it can.

        Raises:
            OSError: the connection broke.
        """
        if isinstance(self.connection, ssl.SSLSocket) or len(parts) == 1:
            return self.write(parts[0])
        try:
            return self.connection.sendmsg(parts)
        except _WOULD_BLOCK:
            return 0

    @property
    def has_ended(self) -> bool:
        """Whether the peer has ended the connection, as far as the system knows and nothing unread hides it.

        Without asking, what is sent right after a peer's end would seem to have reached it.
        """
        try:
            # The plain socket's own method, whatever encrypts on top of it.
            return not socket.socket.recv(self.connection, 1, socket.MSG_PEEK)
        except _WOULD_BLOCK:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Nothing; ends the connection at once, on this side and for the peer. Idempotent."""
        self.connection.close()


def notice_death(connection: socket.socket, dead_after_s: float) -> None:
    """Nothing; the system ends the connection about `dead_after_s` after the peer's host stopped answering."""
    probe_s = max(1, math.floor(dead_after_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # For what was sent and not confirmed, where keep-alive does not count.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(dead_after_s * 1000))
