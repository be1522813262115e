"""The lanes over which pieces of a tcp source's payloads go out.

Pulls of one lane take turns piece by piece, so that a small payload does not wait for a large one; the pieces of one
that is alone are longer.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from omnikv.errors import RemoteProtocolError
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.proved_stream import Stream
from omnikv.transports.stream_frames import FrameCutter
from omnikv.transports.tcp_lanes import Lane
from omnikv.transports.tcp_messages import (
    LONGEST_PIECE_NBYTES,
    MAX_PULL_NBYTES,
    PIECE,
    PIECE_NBYTES,
    FromPuller,
    Pull,
)
from omnikv.transports.tcp_stretch import Sending

if TYPE_CHECKING:
    from omnikv.transports.tcp_shelf import TcpShelf

# How much of one lane goes out before the others get their turn.
TURN_NBYTES = 4 << 20
MAX_PULLS_A_LANE = 4096

_decode = msgspec.msgpack.Decoder(FromPuller).decode


class ServingLane(Lane):
    """A lane at a source: pulls come in, pieces go out."""

    def __init__(self, stream: Stream, link: ProvedLink, shelf: TcpShelf) -> None:
        super().__init__(stream, link.who)
        self._link = link
        self._shelf = shelf
        self._cutter = FrameCutter(MAX_PULL_NBYTES)
        self._sends: deque[Sending] = deque()
        self._out: list[memoryview] = []

    @property
    def wants_write(self) -> bool:
        """Whether a piece is under way or can begin."""
        return bool(self._out) or any(send.has_piece for send in self._sends)

    @property
    def is_owed(self) -> bool:
        """Whether the target should be taking something."""
        return bool(self._out)

    def read(self) -> bool:
        """Whether there may be more; takes pulls and stops."""
        data = self.stream.read(MAX_PULL_NBYTES * 16)
        if data is None:
            return False
        if not data:
            raise ConnectionResetError("the target ended the lane")
        for packet in self._cutter.feed(data):
            try:
                message = _decode(packet)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RemoteProtocolError(f"{len(packet)} bytes that are no pull: {error}") from error
            if isinstance(message, Pull):
                self._pull(message)
            else:
                self._stop(message.pull)
        self.sweep()
        return True

    def write(self) -> None:
        """Nothing; sends pieces, one of each pull in turn, until the connection takes no more or the turn is over."""
        budget = TURN_NBYTES
        while budget > 0 and (self._out or self._start_piece()):
            sent = self.stream.write_all(self._out)
            if not sent:
                return
            self.moved_at = time.monotonic()
            budget -= sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.pop(0))
            if sent:
                self._out[0] = self._out[0][sent:]
        # A turn may end with the last piece of a payload, whose room must not wait for the next turn.
        self.sweep()

    def sweep(self) -> None:
        """Nothing; lets go of what is read no more, unless a piece is under way, which may be its."""
        if self._out:
            return
        for send in [send for send in self._sends if send.has_ended]:
            self._sends.remove(send)
            self._shelf.release(send.stretch)

    def gone(self) -> None:
        """Nothing; its pulls read nothing any more."""
        for send in self._sends:
            self._shelf.unpin(send.stretch)
        self._sends.clear()
        self._shelf.lane_gone(self._link, self)

    def _pull(self, message: Pull) -> None:
        if len(self._sends) >= MAX_PULLS_A_LANE or len(self._out) >= MAX_PULLS_A_LANE:
            raise RemoteProtocolError(f"more than {MAX_PULLS_A_LANE} pulls at once")
        stretch = self._shelf.pin(self._link, message.token)
        if stretch is None:
            self._say_gone(message.pull)
        else:
            self._sends.append(Sending(message.pull, stretch, message.skip_nbytes))

    def _stop(self, pull: int) -> None:
        for send in self._sends:
            if send.pull == pull:
                send.is_stopped = True

    def _say_gone(self, pull: int) -> None:
        if not self._out:
            self.moved_at = time.monotonic()
        self._out.append(memoryview(PIECE.pack(pull, 0, 0)))

    def _start_piece(self) -> bool:
        """Whether a piece is under way now: the next one of the pull whose turn it is."""
        self.sweep()
        longest_nbytes = PIECE_NBYTES if len(self._sends) > 1 else LONGEST_PIECE_NBYTES
        for _ in range(len(self._sends)):
            send = self._sends[0]
            self._sends.rotate(-1)
            if send.has_piece:
                offset, piece = send.next_piece(longest_nbytes)
                self._out = [memoryview(PIECE.pack(send.pull, offset, len(piece))), *([piece] if piece else [])]
                self.moved_at = time.monotonic()
                return True
        return False
