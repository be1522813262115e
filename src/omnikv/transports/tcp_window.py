"""How a tcp target comes to its payloads: it pulls each over a lane, straight into the room where it will be read.

A payload that a source offers gets room from the target's own pool, warm and used again. The lane thread asks for it,
receives its pieces in their places, and hands it over when it is whole *and* leased: bytes may come before the source
has published the payload, and mean nothing until then. When a lane breaks, what is missing is pulled over the next one.
Nobody but the lane thread writes into a room, so room that is given back is never written to by an old transfer.

There are `num_lanes` lanes a source; small payloads have the first one to themselves where there is another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from omnikv.core.messages import Return
from omnikv.errors import PutRejected, RemoteProtocolError, TransportError
from omnikv.transports.links import Link
from omnikv.transports.proved_door import LaneCall, ProvedDoor
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.proved_stream import Stream
from omnikv.transports.shm_pool import Pool, Room
from omnikv.transports.tcp_lanes import LaneThread
from omnikv.transports.tcp_messages import Coming, Leased
from omnikv.transports.tcp_pull import PullingLane, Transfer
from omnikv.transports.wants import Wants
from omnikv.transports.window import Arrival

# Payloads up to this size take the lane that large ones never take.
SMALL_NBYTES = 1 << 20
# The part of the room that payloads may take before they are published.
EARLY_PART = 2


class LaneDoor(Protocol):
    """Who opens lanes."""

    @property
    def door(self) -> ProvedDoor: ...


class TcpWindow:
    """What a target pulls from its sources. Methods are called with the transport's lock, but those of the lane thread.

    `sockets` has the door that opens lanes, and `find_wants` gives the role that waits for the payloads.
    """

    def __init__(
        self,
        pool: Pool,
        lanes: LaneThread,
        lock: threading.Lock,
        num_lanes: int,
        sockets: LaneDoor,
        find_wants: Callable[[], Wants],
    ) -> None:
        self._sockets = sockets
        self._find_wants = find_wants
        self._pool = pool
        self._thread = lanes
        self._lock = lock
        self._num_lanes = num_lanes
        self._next_pull = 1
        self._transfers: dict[Link, dict[int, Transfer]] = {}
        self._lanes: dict[Link, dict[int, PullingLane]] = {}
        # Transfers that wait for room, in their order; the lane thread's own.
        self._waiting: list[Transfer] = []

    def handle(self, link: Link, message: Any, extra: Any) -> Arrival | None:
        """A payload of no bytes, which is there at once; any other is pulled and arrives later.

        Raises:
            RemoteProtocolError: the source says something else, or offers one ask two payloads at once.
        """
        assert isinstance(link, ProvedLink)
        transfers = self._transfers[link]
        if isinstance(message, Coming):
            if message.nbytes and message.ask not in transfers and self._wants.is_expected(link, message.ask):
                self._begin(link, message.ask, message.token, message.nbytes, None)
        elif isinstance(message, Leased):
            known = transfers.get(message.ask)
            if not message.nbytes:
                return Arrival(message.ask, message.lease, memoryview(bytearray()))
            if known is not None and (known.token, known.nbytes) == (message.token, message.nbytes):
                known.lease = message.lease
                self._thread.submit(partial(self._leased, known))
            else:
                if known is not None:
                    # What was promised was dropped, and sent anew.
                    self._give_up(known)
                self._begin(link, message.ask, message.token, message.nbytes, message.lease)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} is nothing that a source says here")
        return None

    def expected(self, link: Link) -> memoryview | None:
        """None: memory is taken for what comes."""
        return None

    def link_ready(self, link: Link) -> None:
        """Nothing; opens lanes to the source."""
        assert isinstance(link, ProvedLink)
        self._transfers[link] = {}
        self._lanes[link] = {}
        for number in range(self._num_lanes):
            self._sockets.door.call_lane(LaneCall(link, number))

    def link_gone(self, link: Link) -> None:
        """Nothing; nothing more is pulled from the source."""
        for transfer in self._transfers.get(link, {}).values():
            transfer.is_over = True
            self._thread.submit(partial(self._free, transfer))
        for lane in self._lanes.get(link, {}).values():
            self._thread.submit(partial(self._thread.end, lane))
        # Forgotten last: where Ctrl-C comes in between, all of it is done again, which harms nothing.
        self._transfers.pop(link, None)
        self._lanes.pop(link, None)

    def close(self) -> None:
        """Nothing; what is leased stays readable."""
        self._pool.close()

    def lane_up(self, stream: Stream, call: LaneCall) -> None:
        """Nothing; a lane to a source stands. Call with the lock."""
        lanes = self._lanes.get(call.link)
        if lanes is None or call.number in lanes:
            stream.close()
            return
        lane = lanes[call.number] = PullingLane(stream, call, self)
        self._thread.add(lane)
        self._thread.submit(partial(self._resume, lane))

    def lane_gone(self, lane: PullingLane) -> None:
        """Nothing; what it carried is pulled over the next one. Call with the lock."""
        lanes = self._lanes.get(lane.call.link)
        if lanes is not None and lanes.get(lane.call.number) is lane:
            del lanes[lane.call.number]
            self._sockets.door.call_lane_again(lane.call)

    def given_up(self, link: Link, ask: int) -> None:
        """Nothing; nobody waits for the answer to `ask` any more."""
        transfer = self._transfers.get(link, {}).get(ask)
        if transfer is not None:
            self._give_up(transfer)

    # What follows is the lane thread's, without the lock.

    def lane_changed(self, lane: PullingLane) -> None:
        """Nothing; looks again at what the lane waits for."""
        self._thread.refresh(lane)

    def received(self, transfer: Transfer) -> None:
        """Nothing; every byte is here."""
        self._finish_if_whole(transfer)

    def lost(self, transfer: Transfer) -> None:
        """Nothing; the source says that the payload is gone. Whoever waits for it is told on the control link."""
        with self._lock:
            self._forget(transfer)
        self._free(transfer)

    @property
    def _wants(self) -> Wants:
        return self._find_wants()

    def _begin(self, link: ProvedLink, ask: int, token: int, nbytes: int, lease: int | None) -> None:
        transfer = Transfer(self._next_pull, link, ask, token, nbytes, lease)
        self._next_pull += 1
        self._transfers[link][ask] = transfer
        self._thread.submit(partial(self._start, transfer))

    def _give_up(self, transfer: Transfer) -> None:
        # Forgotten last: where Ctrl-C comes in between, giving it up again does all of it.
        transfer.is_over = True
        if transfer.lease is not None:
            transfer.link.send(Return(transfer.lease))
        self._thread.submit(partial(self._free, transfer))
        self._forget(transfer)

    def _forget(self, transfer: Transfer) -> None:
        transfer.is_over = True
        transfers = self._transfers.get(transfer.link, {})
        if transfers.get(transfer.ask) is transfer:
            del transfers[transfer.ask]

    def _start(self, transfer: Transfer) -> None:
        """Nothing; the transfer has room and is pulled, or waits for room."""
        if transfer.is_over or transfer.room is not None:
            return
        if transfer.lease is None and self._pool.used_nbytes + transfer.nbytes > self._pool.limit_nbytes // EARLY_PART:
            # Not published yet: it must not take the room of one that is.
            with self._lock:
                if transfer.lease is None:
                    self._forget(transfer)
                    return
        try:
            transfer.room = self._pool.take(transfer.nbytes)
        except PutRejected as error:
            if error.retryable:
                self._waiting.append(transfer)
            else:
                self._refuse(transfer, error)
            return
        except TransportError:
            # Closed meanwhile, which whoever waits is told of elsewhere.
            return
        self._pull(transfer)

    def _refuse(self, transfer: Transfer, error: PutRejected) -> None:
        refusal = TransportError(
            f"tcp: a payload of {transfer.nbytes} bytes can never be received here: the option landing_nbytes is "
            f"{self._pool.limit_nbytes}; raise it at this target",
            transport="tcp",
        )
        refusal.__cause__ = error
        with self._lock:
            self._wants.fail_ask(transfer.link, transfer.ask, refusal)
            self._give_up(transfer)

    def _pull(self, transfer: Transfer) -> None:
        large_lanes = self._num_lanes - 1
        is_small = transfer.nbytes <= SMALL_NBYTES or not large_lanes
        number = 0 if is_small else 1 + transfer.number % large_lanes
        with self._lock:
            lane = self._lanes.get(transfer.link, {}).get(number)
        transfer.lane_number = number
        if lane is not None:
            lane.pull(transfer)

    def _resume(self, lane: PullingLane) -> None:
        """Nothing; pulls over a new lane what waits for it."""
        with self._lock:
            transfers = list(self._transfers.get(lane.call.link, {}).values())
        for transfer in transfers:
            if transfer.room is not None and not transfer.is_whole and transfer.lane_number == lane.call.number:
                lane.pull(transfer)

    def _leased(self, transfer: Transfer) -> None:
        """Nothing; what has come ahead counts now."""
        if transfer.lane is not None:
            transfer.lane.leased()
        self._finish_if_whole(transfer)

    def _finish_if_whole(self, transfer: Transfer) -> None:
        room = transfer.room
        if transfer.is_over or not transfer.is_whole or room is None:
            return
        with self._lock:
            if transfer.lease is None:
                return
            self._forget(transfer)
            transfer.room = None
            view = room.view
            self._wants.arrive(transfer.link, Arrival(transfer.ask, transfer.lease, view, partial(self._give, room)))

    def _free(self, transfer: Transfer) -> None:
        """Nothing; its room is free again, now that no lane writes into it."""
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        if transfer.lane is not None:
            transfer.lane.stop(transfer)
            transfer.lane = None
        if transfer.room is not None:
            room, transfer.room = transfer.room, None
            self._give(room)

    def _give(self, room: Room) -> None:
        self._pool.give(room)
        self._thread.submit(self._retry)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            self._start(transfer)
