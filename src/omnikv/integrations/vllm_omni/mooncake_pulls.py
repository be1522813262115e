"""How a Mooncake receiver asks to be written to, and keeps what may still be written until it is known to be over.

A request that was not answered in time may be carried out at any moment after that. Its socket is kept, and the memory
that it named with it, until the answer comes at last or the sender's connection has been gone for a while.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

from omnikv.integrations.vllm_omni.mooncake_query import load_zmq
from omnikv.transports.landing import LandingPool, LandingRoom

# How long the engine of a sender whose connection ended may still be writing.
GRACE_S = 60.0


class _Line:
    """A connection to one sender, for one request at a time. Its owner holds it alone."""

    def __init__(self, zmq: Any, context: Any, address: str) -> None:
        self._zmq = zmq
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def ask(self, request: bytes, timeout_ms: int) -> bytes | None:
        self.socket.send_multipart([b"", request], self._zmq.NOBLOCK)
        return self.answer(timeout_ms)

    def answer(self, timeout_ms: int) -> bytes | None:
        if not self.socket.poll(timeout_ms):
            return None
        frames: list[bytes] = self.socket.recv_multipart()
        return frames[-1]

    @property
    def has_ended(self) -> bool:
        """Whether the sender's end of it went away."""
        return bool(self._events.poll(0))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._events.close(linger=0)
        self.socket.close(linger=0)


class MooncakePulls:
    """Pulls into rooms of `pool`, each with a writer of its own. Safe to use from several threads.

    Raises:
        TransportUnavailable: pyzmq is not installed.
    """

    def __init__(self, pool: LandingPool) -> None:
        self._pool = pool
        self._zmq = load_zmq()
        self._context = self._zmq.Context()
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Line]] = defaultdict(list)
        self._late: list[tuple[_Line, LandingRoom]] = []

    def pull(self, address: str, request: bytes, room: LandingRoom, deadline: float) -> bytes | None:
        """The sender's answer to `request`, which lets it write into `room`, or None when none came by `deadline`.

        Where none came the room is given up, and is nobody's until no write can come any more.
        """
        self.look_at_late()
        line = self._line_to(address)
        answer = line.ask(request, max(0, int((deadline - time.monotonic()) * 1000)))
        if answer is None:
            room.abandon()
            with self._lock:
                self._late.append((line, room))
            return None
        room.written()
        with self._lock:
            self._idle[address].append(line)
        return answer

    def look_at_late(self) -> None:
        """Nothing; rooms whose late answer has come, or whose sender went away long ago, are free again."""
        with self._lock:
            late, self._late = self._late, []
        for line, room in late:
            if line.answer(0) is not None:
                room.written()
                line.close()
            elif line.has_ended:
                self._pool.writer_gone(room.writer)
                line.close()
            else:
                with self._lock:
                    self._late.append((line, room))

    def close(self) -> None:
        """Nothing; ends every connection. Call it when no pull is under way."""
        with self._lock:
            lines = [line for idle in self._idle.values() for line in idle] + [line for line, _ in self._late]
            self._idle.clear()
            self._late.clear()
        for line in lines:
            line.close()
        self._context.destroy(linger=0)

    def _line_to(self, address: str) -> _Line:
        with self._lock:
            idle = self._idle[address]
            while idle:
                line = idle.pop()
                if not line.has_ended:
                    return line
                line.close()
        return _Line(self._zmq, self._context, address)
