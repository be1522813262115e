"""JSON lines between the orchestrator and one rank, over a socket pair of their own.

Standard output stays free for whatever libraries write there. The rank's end has a thread that reads: when the
orchestrator is gone, in whatever way, it ends the rank at once, so that no rank outlives its run.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from typing import Any

# Distinct from what Python and signals use, to be recognised in a log.
ORPHANED_EXIT_STATUS = 75


def encode_line(message: dict[str, Any]) -> bytes:
    """The message as one line."""
    return json.dumps(message).encode() + b"\n"


class LineReader:
    """Messages out of the bytes of a stream, however they were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes, in order."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class RankChannel:
    """A rank's end: tells the orchestrator what happened, and waits for what it says."""

    def __init__(self, fd: int) -> None:
        """Takes over the inherited descriptor `fd`, the rank's end of the socket pair."""
        self._socket = socket.socket(fileno=fd)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="omnikv-rank-channel", daemon=True)
        self._thread.start()

    def tell(self, event: str, **facts: Any) -> None:
        """Report `event` with its facts, which must be JSON."""
        self._socket.sendall(encode_line({"event": event, **facts}))

    def next_message(self) -> dict[str, Any]:
        """The orchestrator's next message, as soon as there is one."""
        return self._messages.get()

    def _read(self) -> None:
        reader = LineReader()
        while data := self._receive():
            for message in reader.feed(data):
                self._messages.put(message)
        os._exit(ORPHANED_EXIT_STATUS)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(65536)
        except ConnectionError:
            return b""
