"""One connection over TCP, from the first byte: greeted and proved, then whole messages in and out.

A link is proved before anything is said or taken. One that a peer opened for payloads (a *lane*) never says Hello: once
it is proved it leaves the link, and the thread that keeps lanes owns it from then on.
"""

from __future__ import annotations

import errno
import ssl
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from omnikv.core.authentication import Claim, Proved, Rejected, digest_edge
from omnikv.core.keys import Edge
from omnikv.core.messages import MAX_MESSAGE_NBYTES, Hello, Refused
from omnikv.errors import ConfigError, RemoteProtocolError
from omnikv.transports.base import Seat, Side
from omnikv.transports.links import Link
from omnikv.transports.proved_address import Address
from omnikv.transports.proved_greeting import Greeting
from omnikv.transports.proved_stream import Stream
from omnikv.transports.stream_frames import FrameCutter, frame

MAX_QUEUED_NBYTES = 4 << 20
READ_NBYTES = 65536
# How often one peer is read before the others get their turn.
READS_A_TURN = 16

# What the system says of a peer whose host has gone.
_DEAD = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

encode = msgspec.msgpack.Encoder().encode


class ProvedLink(Link):
    """A connection to one peer. `side` is this end's, `address` the peer's, `decoder` reads what it says; `watch` is
    called with the link when it begins or ends to wait for the connection to take something, `count` counts what goes
    wrong, `lane` takes the stream of a proved lane with the peer's claim, and `ended` hears of the link's end, before
    that.
    """

    def __init__(
        self,
        greeting: Greeting,
        seat: Seat | None,
        *,
        side: Side,
        decoder: msgspec.msgpack.Decoder[Any],
        address: Address,
        watch: Callable[[Link], None],
        count: Callable[[str, str], None],
        lane: Callable[[Stream, Claim], None],
        ended: Callable[[ProvedLink], None],
    ) -> None:
        super().__init__(greeting.stream.connection, seat)
        self.address = address
        # The peer's, once it is proved.
        self.claim: Claim | None = None
        self._greeting = greeting
        self._stream = greeting.stream
        self._side = side
        self._decoder = decoder
        self._watch, self._count, self._lane, self._ended = watch, count, lane, ended
        self._cutter = FrameCutter(MAX_MESSAGE_NBYTES)
        self._queue: deque[memoryview] = deque()
        self._queued_nbytes = 0
        self._is_closed = False

    @property
    def who(self) -> str:
        """The process at the other end: where it is, and its number there once it has said so."""
        return str(self.address) if self.peer is None else f"pid {self.peer.pid} at {self.address}"

    @property
    def is_lane(self) -> bool:
        """Whether it proved to be a connection for payloads, which leaves this link."""
        return self.claim is not None and self.claim.purpose == "data"

    @property
    def has_queue(self) -> bool:
        """Whether something waits for the connection to take it."""
        return bool(self._queue) if self.claim is not None else self._greeting.wants_write

    def send(self, message: msgspec.Struct) -> None:
        """Nothing; `message` goes out now, or once the link is proved and the connection takes it."""
        if self.is_over:
            return
        if self.claim is not None and self._stream.has_ended:
            self._cut()
            return
        data = memoryview(frame(encode(message)))
        if self.claim is not None and not self._queue:
            data = data[self._write(data) :]
            if not data or self.is_over:
                return
        if self._queued_nbytes + len(data) > MAX_QUEUED_NBYTES:
            self.has_stalled = True
            self._cut()
            return
        self._queue.append(data)
        self._queued_nbytes += len(data)
        if len(self._queue) == 1:
            self._watch(self)

    def flush(self) -> None:
        """Nothing; goes on with the greeting, or sends what the connection takes of the queue."""
        if self.claim is None:
            try:
                self._greeting.push()
            except OSError as error:
                self._greeting_failed(error)
        else:
            self._send_queue()
        if not self.is_over:
            self._adopt_connection()
            self._watch(self)

    def receive(self) -> Generator[tuple[Any, None], None, None]:
        """The messages that wait; the first of a connection ends its greeting.

        Raises:
            RemoteProtocolError: something that is no message, or a Hello of somebody else than was proved.
        """
        if self.claim is None:
            rejected = self._greet()
            if rejected is not None:
                yield Refused(rejected), None
        for _ in range(READS_A_TURN):
            if self.claim is None or self.is_over:
                return
            data = self._read()
            if data is None:
                return
            for packet in self._cutter.feed(data):
                yield self._decode(packet), None

    def close(self) -> None:
        """Nothing; ends the connection, or hands it on as a lane. Idempotent."""
        self.is_over = True
        self._queue.clear()
        if self._is_closed:
            return
        self._ended(self)
        if self.claim is not None and self.is_lane:
            # Handed on once, by the transport's own thread, where no Ctrl-C comes.
            self._is_closed = True
            self._lane(self._stream, self.claim)
        else:
            self._stream.close()
            self._is_closed = True

    def _greet(self) -> str | None:
        """Nothing, or why a peer that this side called does not fit."""
        try:
            outcome = self._greeting.pull()
        except OSError as error:
            return self._greeting_failed(error)
        self._adopt_connection()
        if isinstance(outcome, Rejected):
            return self._reject(outcome.kind, outcome.reason)
        if isinstance(outcome, Proved):
            stranger = self._problem_with(outcome.peer)
            if stranger is not None:
                return self._reject("refused_opening", stranger)
            self.claim = outcome.peer
            if self.claim.purpose == "data":
                # Closed as a link, which hands it on.
                self.is_over = True
            else:
                self._send_queue()
        if not self.is_over:
            self._watch(self)
        return None

    def _problem_with(self, peer: Claim) -> str | None:
        if peer.side == self._side:
            return f"a {peer.side} answers, and this is one too: a target calls sources"
        if self.seat is not None and self.seat != (peer.rank, peer.reader):
            return f"at {self.address} listens {peer.side} rank {peer.rank}, not {self.seat}: correct the option peers"
        return None

    def _greeting_failed(self, error: OSError) -> str | None:
        if isinstance(error, ssl.SSLError):
            return self._reject("refused_tls", f"no encryption that both ends take: {error.reason or error}")
        # A peer that is not there yet, or not any more: nothing to count, whoever called tries again.
        self.is_over = True
        return None

    def _reject(self, kind: str, reason: str) -> str | None:
        self._count(kind, f"{self.address} is refused: {reason}")
        if kind == "refused_proof" and not self._greeting.is_caller:
            self._write(memoryview(frame(encode(Refused(f"at {self.address}: {reason}")))))
        self.is_over = True
        if not self._greeting.is_caller or self.seat is None:
            return None
        self.refusal = reason
        return reason

    def _adopt_connection(self) -> None:
        # Encryption puts another object in the place of the first, over the same descriptor.
        self.connection = self._stream.connection

    def _read(self) -> bytes | None:
        try:
            data = self._stream.read(READ_NBYTES)
        except OSError as error:
            data = b""
            self._count_dead(error)
        if not data and data is not None:
            self.is_over = True
            return None
        return data

    def _decode(self, packet: bytes) -> Any:
        try:
            message = self._decoder.decode(packet)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(
                f"a message of {len(packet)} bytes is none that this side takes: {error}"
            ) from error
        if isinstance(message, Hello):
            self._require_proved(message)
        return message

    def _require_proved(self, hello: Hello) -> None:
        assert self.claim is not None
        try:
            edge = Edge(
                namespace=hello.namespace,
                from_stage=hello.from_stage,
                to_stage=hello.to_stage,
                replica=hello.replica,
            )
        except ConfigError as error:
            raise RemoteProtocolError(f"a Hello of no edge: {error}") from error
        said = (hello.side, hello.rank, hello.reader, digest_edge(edge.encode()))
        if said != (self.claim.side, self.claim.rank, self.claim.reader, self.claim.edge):
            raise RemoteProtocolError(
                f"a Hello of {hello.side} rank {hello.rank}, reader {hello.reader} of {edge.encode()} from a process "
                f"that proved to be {self.claim.side} rank {self.claim.rank}, reader {self.claim.reader}, or of "
                "another edge"
            )

    def _send_queue(self) -> None:
        while self._queue:
            head = self._queue.popleft()
            sent = self._write(head)
            self._queued_nbytes -= sent
            if sent < len(head):
                if not self.is_over:
                    self._queue.appendleft(head[sent:])
                return

    def _write(self, data: memoryview) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self._count_dead(error)
            self._cut()
            return 0

    def _count_dead(self, error: OSError) -> None:
        if error.errno in _DEAD:
            self._count("dead_peers", f"{self.who} does not answer any more ({error.strerror}): given up")

    def _cut(self) -> None:
        """End the conversation without closing: the transport's thread then sees the end and tidies up."""
        self.is_over = True
        self._queue.clear()
        try:
            self.connection.shutdown(2)
        except OSError:
            # The peer was faster; the end is visible already.
            return
