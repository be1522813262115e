"""What the shared halves of a transport need of a connection, and of the door through which connections come.

A transport between processes brings its own sockets as a `Link` and a `Door`; everything else about a pair (greeting,
asking, answering, leasing, noticing the end) is the same for all of them: `link_loop`, `offers` and `wants`. All of it
happens under the transport's lock.
"""

from __future__ import annotations

import enum
import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

import msgspec

from omnikv.core.messages import Hello
from omnikv.transports.base import Seat


class Link(ABC):
    """A connection to one peer, from its first message to its last.

    `seat` is the peer's: known from the start where this side connected, else from its Hello. `has_stalled` says that
    it was cut off because it read nothing.
    """

    def __init__(self, connection: socket.socket, seat: Seat | None) -> None:
        self.connection = connection
        self.seat = seat
        self.peer: Hello | None = None
        self.refusal: str | None = None
        self.is_ready = False
        self.is_over = False
        self.has_stalled = False

    @property
    def life(self) -> tuple[Seat | None, str | None]:
        """Which life of which peer is at the other end, as far as it has said so."""
        return self.seat, None if self.peer is None else self.peer.incarnation

    @property
    @abstractmethod
    def who(self) -> str:
        """The process at the other end in words, for messages: "pid 7"."""

    @property
    @abstractmethod
    def has_queue(self) -> bool:
        """Whether something waits for the socket to take it."""

    @abstractmethod
    def send(self, message: msgspec.Struct) -> None:
        """Nothing; `message` goes out now or when the socket takes it. Never blocks; a broken link swallows it."""

    @abstractmethod
    def flush(self) -> None:
        """Nothing; sends what the socket takes of what waits."""

    @abstractmethod
    def receive(self) -> Generator[tuple[Any, Any], None, None]:
        """The messages that wait, each with what came along with it and lives as long as the message is looked at.

        Gives a bounded number, so that other peers get their turn; sets `is_over` at the end of the connection.

        Raises:
            RemoteProtocolError: something that is no message.
        """

    @abstractmethod
    def close(self) -> None:
        """Nothing; ends the connection. Idempotent."""


class Knock(enum.Enum):
    """What came of knocking on a peer's address."""

    ANSWERED = "answered"
    NOBODY = "nobody"
    BUSY = "busy"


class Door(ABC):
    """Where peers come in, and how this end goes to them. `retry_at` is when it wants to try something again."""

    retry_at: float | None = None

    @abstractmethod
    def watch(self, selector: selectors.BaseSelector) -> None:
        """Nothing; `selector` reports a function to call, without arguments and with the lock, when somebody knocks."""

    @abstractmethod
    def knock(self, seat: Seat) -> Knock:
        """What came of connecting to the peer at `seat`; a new connection was handed over by then.

        Raises:
            ConnectError: the peer's address is held by somebody who is no peer.
        """

    @abstractmethod
    def retry_if_due(self) -> None:
        """Nothing; does again what was refused, once `retry_at` has come."""

    @abstractmethod
    def close(self) -> None:
        """Nothing; nobody is let in any more."""
