"""One connection of a shm transport: whole messages in and out, never blocking.

Sending happens in whichever thread has something to say; what the socket does not take at once waits in a bounded
queue that the transport's own thread empties. A peer that reads so slowly that the queue fills is cut off, so that it
holds up nobody else. All of it happens under the transport's lock.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from omnikv.core.messages import MAX_MESSAGE_NBYTES, Hello
from omnikv.errors import RemoteProtocolError
from omnikv.transports.shm_address import Peer, peer_of

MAX_QUEUED_MESSAGES = 4096
# How many packets of one peer are read before the others get their turn.
PACKETS_A_TURN = 64
_MAX_FDS = 4
_FDS_NBYTES = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)

encode = msgspec.msgpack.Encoder().encode


class Link:
    """A connection to one peer, from its first packet to its last.

    `rank` is the peer's: known from the start where this side connected, else from its Hello. `wants_to_write` is
    called with the link when the queue starts or ends.
    """

    def __init__(
        self,
        connection: socket.socket,
        rank: int | None,
        decoder: msgspec.msgpack.Decoder[Any],
        wants_to_write: Callable[[Link], None],
    ) -> None:
        self.connection = connection
        self.rank = rank
        self.credentials: Peer = peer_of(connection)
        self.peer: Hello | None = None
        self.refusal: str | None = None
        self.is_ready = False
        self.is_over = False
        self.was_stuck = False
        self._decoder = decoder
        self._wants_to_write = wants_to_write
        self._queue: deque[tuple[bytes, int]] = deque()

    @property
    def has_queue(self) -> bool:
        """Whether messages wait for the socket."""
        return bool(self._queue)

    def send(self, message: msgspec.Struct, fd: int = -1) -> None:
        """Nothing; `message` goes out now or when the socket takes it, `fd` with it. A broken link swallows it."""
        if self.is_over:
            return
        data = encode(message)
        if not self._queue and self._send_now(data, fd):
            return
        if len(self._queue) >= MAX_QUEUED_MESSAGES:
            self.was_stuck = True
            self._cut()
            return
        try:
            # The caller may close its descriptor before the queue moves, so the queue has its own.
            own_fd = os.dup(fd) if fd >= 0 else -1
        except OSError:
            self._cut()
            return
        self._queue.append((data, own_fd))
        if len(self._queue) == 1:
            self._wants_to_write(self)

    def flush(self) -> None:
        """Nothing; sends what the socket takes of the queue."""
        while self._queue:
            data, fd = self._queue[0]
            if not self._send_now(data, fd):
                return
            if not self.is_over:
                self._queue.popleft()
                _close_all([fd] if fd >= 0 else [])
        self._wants_to_write(self)

    def receive(self, buffer: bytearray) -> Iterator[tuple[Any, list[int]]]:
        """The messages that wait, with their descriptors, which the caller closes; sets `is_over` at the end.

        Raises:
            RemoteProtocolError: a packet is too long or no message.
        """
        for _ in range(PACKETS_A_TURN):
            try:
                nbytes, extra, flags, _ = self.connection.recvmsg_into([buffer], _FDS_NBYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed with packets of ours unread; what it said before is still there to be read.
                continue
            except OSError:
                nbytes, extra, flags = 0, [], 0
            fds = _descriptors(extra)
            if not nbytes:
                _close_all(fds)
                self.is_over = True
                return
            try:
                message = self._decode(buffer, nbytes, flags)
            except RemoteProtocolError:
                _close_all(fds)
                raise
            yield message, fds

    def close(self) -> None:
        """Nothing; ends the connection. Idempotent."""
        self.is_over = True
        _close_all([fd for _, fd in self._queue if fd >= 0])
        self._queue.clear()
        self.connection.close()

    def _decode(self, buffer: bytearray, nbytes: int, flags: int) -> Any:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise RemoteProtocolError(
                f"a packet is longer than {MAX_MESSAGE_NBYTES} bytes or brings more descriptors than this process takes"
            )
        try:
            with memoryview(buffer) as view:
                return self._decoder.decode(view[:nbytes])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(
                f"a packet of {nbytes} bytes is no message that this side takes: {error}"
            ) from error

    def _send_now(self, data: bytes, fd: int) -> bool:
        """Whether the message is dealt with: it went out, or the link broke and nothing will."""
        try:
            if fd < 0:
                self.connection.send(data, socket.MSG_NOSIGNAL)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                self.connection.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            self._cut()
        return True

    def _cut(self) -> None:
        """End the conversation without closing: the transport's thread then sees the end and tidies up."""
        self.is_over = True
        _close_all([fd for _, fd in self._queue if fd >= 0])
        self._queue.clear()
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The peer was faster; the end is visible already.
            return


def _descriptors(extra: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
