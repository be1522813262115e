"""The payloads of a tcp source: where they lie, and who may pull them.

A payload lies in the source's pool as a `Stretch` (`tcp_stretch`), and is sent by lanes (`tcp_serve`). Its token is
given to no other one, ever, so a pull can only bring bytes of the very payload it was told of: a stretch that was given
back while it was being sent stays as it is until the piece under way is out, and the pull is told that no more comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omnikv.core.authentication import Claim
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.proved_stream import Stream
from omnikv.transports.shm_pool import Pool
from omnikv.transports.tcp_lanes import LaneThread
from omnikv.transports.tcp_messages import Coming, Leased
from omnikv.transports.tcp_serve import ServingLane
from omnikv.transports.tcp_stretch import Stretch

MAX_LANES_A_PEER = 16


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
        self._num_lingering = 0
        self._is_closed = False
        # Whether the lane thread has yet to look at what changed.
        self._will_go_on = False
        self._shown: dict[Link, dict[int, Stretch]] = {}
        self._open_lanes: dict[Link, set[ServingLane]] = {}

    sends_ahead = True

    @property
    def num_lingering(self) -> int:
        """How many rooms were given back and are still read by a lane; none once closed."""
        return 0 if self._is_closed else self._num_lingering

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
                self._look_again()

    def give(self, stretch: Stretch) -> None:
        """Nothing; the room is free again once no pull reads it."""
        stretch.is_over = True
        for link in stretch.shown_to:
            del self._shown[link][stretch.token]
        stretch.shown_to.clear()
        if stretch.pins:
            self._num_lingering += 1
            self._look_again()
        else:
            self._pool.give(stretch.room)

    def show(self, link: Link, ask: int, lease: int, stretch: Stretch) -> None:
        """Nothing; tells the target that the payload may be pulled, and kept."""
        stretch.finish()
        self._show(link, stretch)
        link.send(Leased(ask, lease, stretch.token, stretch.room.nbytes))
        if stretch.pins:
            self._look_again()

    def promise(self, link: Link, ask: int, stretch: Stretch, head: bytes) -> None:
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
        self._is_closed = True
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
            self._num_lingering -= 1
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

    def _look_again(self) -> None:
        if not self._will_go_on:
            self._will_go_on = True
            self._lanes.submit(self._go_on)

    def _go_on(self) -> None:
        with self._lock:
            # Before the lanes are looked at, so that what is written from now on is seen next time.
            self._will_go_on = False
            lanes = [lane for lanes in self._open_lanes.values() for lane in lanes]
        for lane in lanes:
            self._lanes.push(lane)
