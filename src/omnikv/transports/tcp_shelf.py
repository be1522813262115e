"""The payloads of a tcp source, and how they are sent: piece by piece over lanes, as targets pull them.

A payload lies in the source's pool as a `Stretch`. Its token is given to no other one, ever, so a pull can only bring
bytes of the very payload it was told of: a stretch that was given back while it was being sent stays as it is until the
piece under way is out, and the pull is told that the rest is gone.

The pieces of a stretch go out in the order in which they were written, which lets them travel while the rest is being
written; a piece that is repeated after a lane broke comes in the same order. Pulls of one lane take turns piece by
piece, so that a small payload does not wait for a large one; the pieces of one that is alone are longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from omnikv.core.authentication import Claim
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.proved_stream import Stream
from omnikv.transports.shm_pool import Pool, Room
from omnikv.transports.stream_frames import FrameCutter
from omnikv.transports.tcp_lanes import Lane, LaneThread
from omnikv.transports.tcp_messages import (
    LONGEST_PIECE_NBYTES,
    MAX_PULL_NBYTES,
    PIECE,
    PIECE_NBYTES,
    Coming,
    FromPuller,
    Leased,
    Pull,
)

# How much of one lane goes out before the others get their turn.
TURN_NBYTES = 4 << 20
MAX_LANES_A_PEER = 16
MAX_PULLS_A_LANE = 4096

_decode = msgspec.msgpack.Decoder(FromPuller).decode


@dataclass(slots=True, eq=False)
class Stretch:
    """One payload's bytes. `written` are its ranges in the order in which they became final, in large pieces."""

    room: Room
    token: int
    written: list[tuple[int, int]] = field(default_factory=list)
    # Ranges too small to be sent by themselves, where they begin and where they end: neighbours are joined.
    small: dict[int, int] = field(default_factory=dict)
    small_from_end: dict[int, int] = field(default_factory=dict)
    # Whether it is whole, and whether its life is over; `pins` counts the pulls that read it.
    is_whole: bool = False
    is_over: bool = False
    pins: int = 0
    shown_to: set[Link] = field(default_factory=set)

    def wrote(self, begin: int, end: int) -> bool:
        """Whether there is more to send by now: these bytes are final, and with their neighbours enough for a piece."""
        begin = self.small_from_end.pop(begin, begin)
        self.small.pop(begin, None)
        after = self.small.pop(end, None)
        if after is not None:
            del self.small_from_end[after]
            end = after
        if end - begin < PIECE_NBYTES:
            self.small[begin] = end
            self.small_from_end[end] = begin
            return False
        self.written.append((begin, end))
        return True

    def finish(self) -> None:
        """Nothing; all that was not given to be sent before is now."""
        if not self.is_whole:
            at = 0
            for begin, end in [*sorted(self.written), (self.room.nbytes, self.room.nbytes)]:
                if begin > at:
                    self.written.append((at, begin))
                at = end
            self.is_whole = True


class TcpShelf:
    """The payloads of one source. Called with the transport's lock where nothing else is said.

    `room_came_back` is called with it when a room that was given back is not read by a lane any more.
    """

    def __init__(self, pool: Pool, lanes: LaneThread, lock: threading.Lock, room_came_back: Callable[[], None]) -> None:
        self._room_came_back = room_came_back
        self._pool = pool
        self._lanes = lanes
        self._lock = lock
        self._next_token = 1
        self._shown: dict[Link, dict[int, Stretch]] = {}
        self._open_lanes: dict[Link, set[ServingLane]] = {}

    def take(self, sizes: Sequence[int]) -> list[Stretch]:
        """Room for all payloads or for none; the pool may grow. Called without the lock.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
        """
        rooms = self._pool.take_all(sizes)
        with self._lock:
            first = self._next_token
            self._next_token += len(rooms)
        return [Stretch(room, first + index) for index, room in enumerate(rooms)]

    def view(self, stretch: Stretch) -> memoryview:
        """The writable bytes of one payload. Called without the lock."""
        return stretch.room.view

    def wrote(self, stretch: Stretch, begin: int, end: int) -> None:
        """Nothing; those bytes are final, and may travel before the rest is. Called without the lock."""
        with self._lock:
            if stretch.wrote(begin, end) and stretch.pins:
                self._lanes.submit(self._go_on)

    def give(self, stretch: Stretch) -> None:
        """Nothing; the room is free again once no pull reads it."""
        stretch.is_over = True
        for link in stretch.shown_to:
            del self._shown[link][stretch.token]
        stretch.shown_to.clear()
        if stretch.pins:
            self._lanes.submit(self._go_on)
        else:
            self._pool.give(stretch.room)

    def show(self, link: Link, ask: int, lease: int, stretch: Stretch) -> None:
        """Nothing; tells the target that the payload may be pulled, and kept."""
        stretch.finish()
        self._show(link, stretch)
        link.send(Leased(ask, lease, stretch.token, stretch.room.nbytes))
        if stretch.pins:
            self._lanes.submit(self._go_on)

    def promise(self, link: Link, ask: int, stretch: Stretch) -> None:
        """Nothing; tells a target that waits that the payload is being written, and may be pulled as it is."""
        self._show(link, stretch)
        link.send(Coming(ask, stretch.token, stretch.room.nbytes))

    def taken(self) -> None:
        """Nothing; targets see no memory of this source, so none that made way for other memory either."""
        self._pool.pop_retired()

    def handle(self, link: Link, message: Any) -> None:
        """Never returns; a target says nothing here that is not said over every transport.

        Raises:
            RemoteProtocolError: always.
        """
        raise RemoteProtocolError(f"{message} is nothing that a target says here")

    def link_ready(self, link: Link) -> None:
        """A target that has been shown nothing."""
        self._shown[link] = {}
        self._open_lanes[link] = set()

    def link_gone(self, link: Link) -> None:
        """Nothing; its lanes end, and what it was shown is not its own any more."""
        for stretch in self._shown.pop(link, {}).values():
            stretch.shown_to.discard(link)
        for lane in self._open_lanes.pop(link, ()):
            self._lanes.submit(partial(self._lanes.end, lane))

    def close(self) -> None:
        """Nothing; nothing can be pulled any more."""
        self._pool.close()

    def lane_up(self, stream: Stream, peer: Claim, count: Callable[[str, str], None]) -> None:
        """Nothing; takes a proved lane, where the target that it belongs to is connected. Call with the lock."""
        for link, lanes in self._open_lanes.items():
            assert isinstance(link, ProvedLink)
            claim = link.claim
            if claim is not None and (claim.life, claim.rank, claim.reader) == (peer.life, peer.rank, peer.reader):
                if len(lanes) >= MAX_LANES_A_PEER:
                    break
                lane = ServingLane(stream, link, self)
                lanes.add(lane)
                self._lanes.add(lane)
                return
        count("refused_lanes", f"a lane of target rank {peer.rank}, which is not connected or has {MAX_LANES_A_PEER}")
        stream.close()

    def pin(self, link: Link, token: int) -> Stretch | None:
        """The payload that `link` may pull under `token`, kept in its place until `unpin`. Call without the lock."""
        with self._lock:
            stretch = self._shown.get(link, {}).get(token)
            if stretch is not None:
                stretch.pins += 1
            return stretch

    def unpin(self, stretch: Stretch) -> None:
        """Nothing; one pull less reads the payload. Call with the lock."""
        stretch.pins -= 1
        if stretch.is_over and not stretch.pins:
            self._pool.give(stretch.room)
            self._room_came_back()

    def release(self, stretch: Stretch) -> None:
        """Nothing; as `unpin`, without the lock."""
        with self._lock:
            self.unpin(stretch)

    def lane_gone(self, link: Link, lane: ServingLane) -> None:
        """Nothing; forgets the lane. Call with the lock."""
        self._open_lanes.get(link, set()).discard(lane)

    def _show(self, link: Link, stretch: Stretch) -> None:
        self._shown[link][stretch.token] = stretch
        stretch.shown_to.add(link)

    def _go_on(self) -> None:
        with self._lock:
            lanes = [lane for lanes in self._open_lanes.values() for lane in lanes]
        for lane in lanes:
            lane.sweep()
            self._lanes.refresh(lane)


class _Send:
    """One pull that is being answered: where in the order of the payload's ranges it is."""

    def __init__(self, pull: int, stretch: Stretch, skip_nbytes: int) -> None:
        self.pull = pull
        self.stretch = stretch
        self.is_stopped = False
        self._index = 0
        self._within = skip_nbytes

    @property
    def has_piece(self) -> bool:
        """Whether something can be said now: bytes, or that there will be none."""
        return not self.is_stopped and (self.stretch.is_over or self._seek())

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to say."""
        return self.is_stopped or (self.stretch.is_whole and not self.stretch.is_over and not self._seek())

    def next_piece(self, longest_nbytes: int) -> tuple[int, memoryview]:
        """Where the next bytes belong, and they themselves: none where the payload is gone."""
        if self.stretch.is_over:
            self.is_stopped = True
            return 0, memoryview(b"")
        begin, end = self.stretch.written[self._index]
        start = begin + self._within
        stop = min(end, start + longest_nbytes)
        self._within += stop - start
        return start, self.stretch.room.view[start:stop]

    def _seek(self) -> bool:
        """Whether there are bytes to send, after stepping over ranges that are sent."""
        written = self.stretch.written
        while self._index < len(written):
            begin, end = written[self._index]
            if self._within < end - begin:
                return True
            self._within -= end - begin
            self._index += 1
        return False


class ServingLane(Lane):
    """A lane at a source: pulls come in, pieces go out."""

    def __init__(self, stream: Stream, link: ProvedLink, shelf: TcpShelf) -> None:
        super().__init__(stream, link.who)
        self._link = link
        self._shelf = shelf
        self._cutter = FrameCutter(MAX_PULL_NBYTES)
        self._sends: deque[_Send] = deque()
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
            self._sends.append(_Send(message.pull, stretch, message.skip_nbytes))

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
