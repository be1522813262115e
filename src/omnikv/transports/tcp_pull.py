"""One payload that a tcp target pulls, and the lanes over which pieces of payloads come in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from omnikv.core.ranges import ReceivedRanges
from omnikv.errors import RemoteProtocolError
from omnikv.transports.proved_door import LaneCall
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.proved_stream import Stream
from omnikv.transports.shm_pool import Room
from omnikv.transports.stream_frames import frame
from omnikv.transports.tcp_lanes import Lane
from omnikv.transports.tcp_messages import LONGEST_PIECE_NBYTES, PIECE, Pull, Stop

if TYPE_CHECKING:
    from omnikv.transports.tcp_window import TcpWindow

# How much of one lane is read before the others get their turn.
TURN_NBYTES = 4 << 20
# How much of a piece should be there before it is read: waking for each bit of it costs both ends more than the bit.
WAKE_NBYTES = 1 << 20
# Where bytes are read to that nobody wants any more.
SCRATCH_NBYTES = 256 << 10
_encode = msgspec.msgpack.Encoder().encode


class Transfer:
    """One payload on its way: its room here once it has one, and how much of it has come.

    `lease` is None until the source has published it. The lane thread owns everything else once it has begun.
    """

    def __init__(self, number: int, link: ProvedLink, ask: int, token: int, nbytes: int, lease: int | None) -> None:
        self.number = number
        self.link = link
        self.ask = ask
        self.token = token
        self.nbytes = nbytes
        self.lease = lease
        self.room: Room | None = None
        self.lane_number = 0
        # The lane that brings it, while one does.
        self.lane: PullingLane | None = None
        self.received = ReceivedRanges(nbytes)
        # Nobody wants it any more.
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether every byte has come."""
        return self.received.is_whole


class PullingLane(Lane):
    """A lane at a target: pulls go out, pieces come in. Pieces of a transfer that is over are read and thrown away."""

    def __init__(self, stream: Stream, call: LaneCall, window: TcpWindow) -> None:
        super().__init__(stream, call.link.who)
        self.call = call
        self._window = window
        self._pulled: dict[int, Transfer] = {}
        self._out = b""
        self._head = bytearray(PIECE.size)
        self._head_nbytes = 0
        # What the piece under way still lacks: its place and the transfer that it belongs to, or scratch, and how many
        # bytes more than that are to be thrown away.
        self._rest: memoryview = memoryview(b"")
        self._begin = self._end = 0
        self._transfer: Transfer | None = None
        self._scratch = memoryview(b"")
        self._unwanted_nbytes = 0

    @property
    def wants_write(self) -> bool:
        """Whether pulls wait to go out."""
        return bool(self._out)

    @property
    def is_owed(self) -> bool:
        """Whether the source should be sending something: the rest of a piece, or a payload that it has leased."""
        return bool(self._rest) or bool(self._out) or any(pull.lease is not None for pull in self._pulled.values())

    def pull(self, transfer: Transfer) -> None:
        """Nothing; asks for what the transfer still lacks, unless a lane brings it already."""
        if transfer.lane is not None:
            return
        self._pulled[transfer.number] = transfer
        transfer.lane = self
        self._say(Pull(transfer.number, transfer.token, transfer.received.received_nbytes))

    def leased(self) -> None:
        """Nothing; a transfer of this lane is published by now, so from now on its source owes it."""
        self.moved_at = time.monotonic()

    def stop(self, transfer: Transfer) -> None:
        """Nothing; not a byte more is written for this transfer, and the source is told that nobody wants the rest."""
        if self._pulled.pop(transfer.number, None) is not None:
            self._say(Stop(transfer.number))
        if self._transfer is transfer:
            self._transfer = None
            self._throw_away(len(self._rest))

    def read(self) -> bool:
        """Whether there may be more; receives pieces in their places."""
        budget = TURN_NBYTES
        is_dry = False
        while budget > 0 and not is_dry:
            wanted = len(self._rest)
            received = self._read_piece() if wanted else self._read_head()
            if received is None:
                break
            if not received:
                raise ConnectionResetError("the source ended the lane")
            budget -= received
            self.moved_at = time.monotonic()
            is_dry = received < wanted and not self.stream.is_encrypted
        self.stream.wake_at(min(len(self._rest), WAKE_NBYTES) or 1)
        return budget <= 0

    def write(self) -> None:
        """Nothing; sends pulls."""
        sent = self.stream.write(self._out)
        if sent:
            self.moved_at = time.monotonic()
            self._out = self._out[sent:]

    def gone(self) -> None:
        """Nothing; what it carried goes on over the next one."""
        if self._transfer is not None and self._end - len(self._rest) > self._begin:
            self._transfer.received.add(self._begin, self._end - len(self._rest))
        for transfer in self._pulled.values():
            transfer.lane = None
        self._pulled.clear()
        self._window.lane_gone(self)

    def _say(self, message: Pull | Stop) -> None:
        self.moved_at = time.monotonic()
        self._out += frame(_encode(message))
        self._window.lane_changed(self)

    def _read_head(self) -> int | None:
        received = self.stream.read_into(memoryview(self._head)[self._head_nbytes :])
        if not received:
            return received
        self._head_nbytes += received
        if self._head_nbytes == PIECE.size:
            self._head_nbytes = 0
            self._begin_piece(*PIECE.unpack(self._head))
        return received

    def _read_piece(self) -> int | None:
        received = self.stream.read_into(self._rest)
        if received:
            self._rest = self._rest[received:]
            if not self._rest:
                self._end_piece()
        return received

    def _begin_piece(self, number: int, offset: int, nbytes: int) -> None:
        transfer = self._transfer = self._pulled.get(number)
        if nbytes > LONGEST_PIECE_NBYTES:
            raise RemoteProtocolError(f"a piece of {nbytes} bytes, at most {LONGEST_PIECE_NBYTES} are taken")
        if transfer is None:
            # Given up after the source had begun to send it.
            self._throw_away(nbytes)
        elif not nbytes:
            self._pulled.pop(number)
            self._transfer = transfer.lane = None
            self._window.lost(transfer)
        else:
            transfer.received.check(offset, offset + nbytes)
            self._begin, self._end = offset, offset + nbytes
            assert transfer.room is not None
            self._rest = transfer.room.view[offset : offset + nbytes]

    def _end_piece(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            self._throw_away(self._unwanted_nbytes)
            return
        transfer.received.add(self._begin, self._end)
        if transfer.is_whole:
            self._pulled.pop(transfer.number, None)
            transfer.lane = None
            self._window.received(transfer)

    def _throw_away(self, nbytes: int) -> None:
        """Nothing; the next `nbytes` are read and kept nowhere."""
        if nbytes and not self._scratch:
            self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        self._rest = self._scratch[:nbytes]
        self._unwanted_nbytes = nbytes - len(self._rest)
