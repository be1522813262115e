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
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from omnikv.core.messages import MAX_MESSAGE_NBYTES, ToSource, ToTargetShared
from omnikv.errors import RemoteProtocolError
from omnikv.transports.base import MAX_ASKS, Seat, Side
from omnikv.transports.links import Link
from omnikv.transports.shm_address import peer_of

# All that a peer may ask for and announce, said, taken back and said again: what it held would be given to others if it
# were cut off, so that happens to none that was only stopped for a while.
MAX_QUEUED_MESSAGES = 5 * MAX_ASKS
# How many packets of one peer are read before the others get their turn.
PACKETS_A_TURN = 64
_MAX_FDS = 4
_FDS_NBYTES = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)

encode = msgspec.msgpack.Encoder().encode


_DECODERS: dict[Side, msgspec.msgpack.Decoder[Any]] = {
    "source": msgspec.msgpack.Decoder(ToSource),
    "target": msgspec.msgpack.Decoder(ToTargetShared),
}


class ShmLink(Link):
    """A Unix connection to one peer, of whole packets. `side` is this end's; `watch` is called with the link when the
    queue starts or ends.
    """

    def __init__(self, connection: socket.socket, seat: Seat | None, side: Side, watch: Callable[[Link], None]) -> None:
        super().__init__(connection, seat)
        self._credentials = peer_of(connection)
        self._decoder = _DECODERS[side]
        self._watch = watch
        self._queue: deque[tuple[bytes, int]] = deque()
        self._buffer = bytearray(MAX_MESSAGE_NBYTES)

    @property
    def who(self) -> str:
        """The process at the other end, as the kernel names it."""
        return f"pid {self._credentials.pid}"

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
            self.has_stalled = True
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
            self._watch(self)

    def flush(self) -> None:
        """Nothing; sends what the socket takes of the queue."""
        while self._queue:
            data, fd = self._queue[0]
            if not self._send_now(data, fd):
                return
            if not self.is_over:
                self._queue.popleft()
                _close_all([fd] if fd >= 0 else [])
        self._watch(self)

    def receive(self) -> Generator[tuple[Any, list[int]], None, None]:
        """The messages that wait, each with its descriptors, which are closed afterwards.

        Raises:
            RemoteProtocolError: a packet is too long or no message.
        """
        for _ in range(PACKETS_A_TURN):
            try:
                nbytes, extra, flags, _ = self.connection.recvmsg_into(
                    [self._buffer], _FDS_NBYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed with packets of ours unread; what it said before is still there to be read.
                continue
            except OSError:
                nbytes, extra, flags = 0, [], 0
            fds = _descriptors(extra)
            try:
                if not nbytes:
                    self.is_over = True
                    return
                yield self._decode(nbytes, flags), fds
            finally:
                _close_all(fds)

    def close(self) -> None:
        """Nothing; ends the connection. Idempotent."""
        self.is_over = True
        _close_all([fd for _, fd in self._queue if fd >= 0])
        self._queue.clear()
        self.connection.close()

    def _decode(self, nbytes: int, flags: int) -> Any:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise RemoteProtocolError(
                f"a packet is longer than {MAX_MESSAGE_NBYTES} bytes or brings more descriptors than this process takes"
            )
        try:
            with memoryview(self._buffer) as view:
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
