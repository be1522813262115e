"""One connection of a channel: whole frames in and out, never blocking.

A frame is its length in four bytes, most significant first, and that many bytes. What the socket does not take at once
waits in a queue with bounds in bytes and in time: a peer that reads nothing for too long is given up, so that it holds
up nobody else. A connection that failed in any way is shut down and still read to its end, because a peer's last words
may lie in it; only then is it `ended`, with the first reason that was known.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from omnikv.errors import RemoteProtocolError

MAX_FRAME_NBYTES = 16 << 20
MAX_QUEUED_NBYTES = 2 * MAX_FRAME_NBYTES
# How long a queue may stand still.
DEAF_AFTER_S = 30.0
LENGTH_NBYTES = 4
_READ_NBYTES = 65536
# As ints, which are found faster than members of an enumeration. The socket itself stays one that blocks.
_SENDING = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVING = int(socket.MSG_DONTWAIT)


class Link:
    """A connection to one peer; it belongs to whoever holds its channel's lock."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int = -1,
        *,
        max_frame_nbytes: int = MAX_FRAME_NBYTES,
        max_queued_nbytes: int = MAX_QUEUED_NBYTES,
        deaf_after_s: float = DEAF_AFTER_S,
        on_queue: Callable[[Link], None] | None = None,
    ) -> None:
        """`on_queue` is told when something is left in an empty queue, which somebody must `flush` then.

        What was read of a frame that is not whole yet stands in `inbox`.
        """
        connection.setblocking(True)
        self.connection = connection
        self.rank = rank
        self.ended: str | None = None
        self.inbox = bytearray()
        self.queue: deque[memoryview] = deque()
        self._max_frame_nbytes = max_frame_nbytes
        self._max_queued_nbytes = max_queued_nbytes
        self._deaf_after_s = deaf_after_s
        self._on_queue = on_queue
        self._failure: str | None = None
        self._queued_nbytes = 0
        self._moved_at = 0.0

    def send(self, payload: bytes | bytearray) -> None:
        """Nothing; the frame goes out now or when the socket takes it. A link that failed swallows it."""
        if self._failure is not None:
            return
        frame = len(payload).to_bytes(LENGTH_NBYTES, "big") + payload
        if self.queue:
            self._hold(memoryview(frame))
            return
        try:
            sent = self.connection.send(frame, _SENDING)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.fail(f"sending to it failed: {error.strerror or error}")
            return
        if sent < len(frame):
            self._moved_at = time.monotonic()
            self._hold(memoryview(frame)[sent:])
            if self.queue and self._on_queue is not None:
                self._on_queue(self)

    def flush(self) -> None:
        """Nothing; sends what the socket takes of the queue."""
        try:
            while self.queue:
                head = self.queue.popleft()
                sent = self.connection.send(head, _SENDING)
                self._queued_nbytes -= sent
                self._moved_at = time.monotonic()
                if sent < len(head):
                    self.queue.appendleft(head[sent:])
        except BlockingIOError:
            self.queue.appendleft(head)
        except OSError as error:
            self.fail(f"sending to it failed: {error.strerror or error}")

    def receive(self, take: Callable[[int, bytes], None]) -> bool:
        """Whether there was something to read; gives `take` the rank and each frame that one read completes.

        `ended` is set at the end, or when `take` raises `RemoteProtocolError`.
        """
        try:
            data = self.connection.recv(_READ_NBYTES, _RECEIVING)
        except BlockingIOError:
            return False
        except OSError as error:
            self.break_off(error)
            return False
        self.take_in(data, take)
        return bool(data)

    def take_in(self, data: bytes, take: Callable[[int, bytes], None]) -> None:
        """Nothing; what `receive` does with `data` that was read from the connection; without bytes it is the end."""
        if not data:
            self.ended = self.ended or self._failure or "it closed its connection"
            return
        try:
            # One whole frame and nothing else is how nearly all of them come.
            if (
                not self.inbox
                and int.from_bytes(data[:LENGTH_NBYTES], "big") == len(data) - LENGTH_NBYTES
                and len(data) <= self._max_frame_nbytes
            ):
                take(self.rank, data[LENGTH_NBYTES:])
            else:
                self.inbox += data
                for frame in self._cut_frames():
                    take(self.rank, frame)
        except RemoteProtocolError as error:
            self.ended = str(error)

    def break_off(self, error: OSError) -> None:
        """Nothing; `ended` is set, since reading failed with `error`."""
        if isinstance(error, ConnectionResetError):
            # It closed with something of ours unread; what it said before has been read by now.
            self.ended = self._failure or "it closed its connection"
        else:
            self.ended = self._failure or f"the connection broke: {error.strerror or error}"

    def fail(self, reason: str) -> None:
        """Nothing; gives the peer up: no more is sent, and what it sent before is all that is read."""
        if self._failure is None:
            self._failure = reason
            self.queue.clear()
            self._queued_nbytes = 0
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                # It is not connected any more, which is what was wanted.
                return

    def close(self) -> None:
        """Nothing; ends the connection. Idempotent."""
        self._failure = self._failure or "this side closed the connection"
        self.queue.clear()
        self.connection.close()

    def _cut_frames(self) -> list[bytes]:
        frames, at, inbox = [], 0, self.inbox
        while len(inbox) - at >= LENGTH_NBYTES:
            length = int.from_bytes(inbox[at : at + LENGTH_NBYTES], "big")
            end = at + LENGTH_NBYTES + length
            if length > self._max_frame_nbytes:
                self.ended = f"it announced a frame of {length} bytes, at most {self._max_frame_nbytes} are taken"
                self.fail(self.ended)
                at = len(inbox)
            elif len(inbox) < end:
                break
            else:
                frames.append(bytes(inbox[at + LENGTH_NBYTES : end]))
                at = end
        del inbox[:at]
        return frames

    def _hold(self, frame: memoryview) -> None:
        still_s = time.monotonic() - self._moved_at
        if still_s > self._deaf_after_s:
            self.fail(f"it has read nothing for {still_s:.0f} s")
        elif self._queued_nbytes + len(frame) > self._max_queued_nbytes:
            self.fail(f"it reads too slowly: {self._queued_nbytes} bytes wait for it")
        else:
            self.queue.append(frame)
            self._queued_nbytes += len(frame)
