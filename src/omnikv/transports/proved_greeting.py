"""How one connection over TCP comes up, step by step and never blocking: connected, encrypted, proved."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from omnikv.core.authentication import Claim, Listening, Proved, Rejected, State, awaited_nbytes, call, step
from omnikv.transports.proved_stream import Encryption, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an end shows on all of its connections: its claim, the secret (empty for none), and its certificates.

    `is_users_own` says that the secret is this user's on this host, of no use with another host.
    """

    claim: Claim
    secret: bytes = field(repr=False)
    is_users_own: bool
    accepting: ssl.SSLContext | None
    calling: ssl.SSLContext | None
    nonce: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Unencrypted:
    """The two could not agree on encryption; the reason in words."""

    reason: str


class Greeting:
    """The greeting of one connection. Call `push` when it can be written, `pull` when it can be read."""

    def __init__(self, connection: socket.socket, identity: Identity, claim: Claim | None, host: str) -> None:
        """`claim` is made to the peer at `host` where this side calls, and None where it is called."""
        self.is_caller = claim is not None
        context = identity.calling if self.is_caller else identity.accepting
        self.stream = Stream(connection, None if context is None else Encryption(context, host))
        self._is_connected = not self.is_caller
        self._is_encrypted = False
        self._inbox = b""
        self._outbox = b""
        self._state: State
        if claim is None:
            self._state = Listening(identity.claim, identity.nonce(), identity.secret)
        else:
            self._state, self._outbox = call(claim, identity.nonce(), identity.secret)

    @property
    def wants_write(self) -> bool:
        """Whether it waits for the connection to take something, or to be made."""
        if not self._is_connected:
            return True
        return bool(self._outbox) if self._is_encrypted else self.stream.wants_write

    def push(self) -> bool:
        """Whether the way is free for `pull`; does what can be done without reading.

        Raises:
            ssl.SSLError: no encryption both sides take.
            OSError: the connection could not be made, or broke.
        """
        if not self._is_connected and not self._connect():
            return False
        if not self._is_encrypted:
            self._is_encrypted = self.stream.shake_hands()
        if not self._is_encrypted:
            return False
        self._flush()
        return True

    def pull(self) -> Proved | Rejected | None:
        """What came of it, or None while it is under way. Takes not a byte more than is its own.

        Raises:
            ssl.SSLError: no encryption both sides take.
            OSError: the connection broke or ended.
        """
        if not self.push():
            return None
        while needed := awaited_nbytes(self._state) - len(self._inbox):
            received = self.stream.read(needed)
            if received is None:
                return None
            if not received:
                raise ConnectionResetError("it ended the connection before it had proved itself")
            self._inbox += received
            if len(received) == needed:
                self._state, answer = step(self._state, self._inbox)
                self._inbox = b""
                self._outbox += answer
                self._flush()
        return self._state if isinstance(self._state, Proved | Rejected) and not self._outbox else None

    def _connect(self) -> bool:
        connection = self.stream.connection
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            connection.getpeername()
        except OSError:
            return False
        self._is_connected = True
        return True

    def _flush(self) -> None:
        if self._outbox:
            self._outbox = self._outbox[self.stream.write(self._outbox) :]
