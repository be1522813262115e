"""Memory that an engine knows: a pool whose segments are registered as they come, and unregistered as they go.

A segment that made way for others stays registered and mapped for a while (`linger_s`): a peer that was given up may
still be reading it, which must find memory, whatever is in it, and no hole.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from omnikv.errors import TransportError
from omnikv.transports.one_sided_engine import Engine, EngineFault
from omnikv.transports.shm_pool import Pool, PoolSegment, Room


@dataclass(frozen=True, slots=True)
class Known:
    """A segment that the engine knows; `anchor` keeps it mapped, `word` is what peers must learn of it."""

    address: int
    word: bytes
    anchor: object


# What an engine may be sending from although its transport was closed: a hole there would end the process.
_kept: list[Known] = []


class RegisteredPool:
    """Rooms of `pool` that `engine` may read from or write into. Used without a lock, from any thread."""

    def __init__(self, pool: Pool, engine: Engine, *, transport: str, linger_s: float) -> None:
        self.pool = pool
        self._engine = engine
        self._transport = transport
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._known: dict[int, Known] = {}
        self._retired: list[tuple[float, Known]] = []

    def take_all(self, sizes: Sequence[int]) -> list[Room]:
        """Room for payloads of these sizes in bytes, for all of them or for none.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
            TransportError: the pool is closed, or the engine does not take its memory.
        """
        rooms = self.pool.take_all(sizes)
        try:
            with self._lock:
                self._retire(time.monotonic())
                for segment in {room.segment.number: room.segment for room in rooms}.values():
                    if segment.number not in self._known:
                        self._known[segment.number] = self._register(segment)
        except EngineFault as fault:
            for room in rooms:
                self.pool.give(room)
            raise TransportError(
                f"{self._transport}: the engine does not take this end's memory ({fault}): for locked memory, raise "
                "`ulimit -l`",
                transport=self._transport,
            ) from fault
        return rooms

    def take(self, nbytes: int) -> Room:
        """Room for `nbytes`; see `take_all`."""
        (room,) = self.take_all([nbytes])
        return room

    def give(self, room: Room) -> None:
        """Nothing; nobody reads or writes this room any more."""
        self.pool.give(room)

    def known(self, room: Room) -> Known:
        """What the engine knows of the room's segment."""
        with self._lock:
            return self._known[room.segment.number]

    def close(self, *, is_read: bool) -> None:
        """Nothing; the engine knows none of it any more. What a peer may be reading stays mapped for good.

        Call once nothing is written into it.
        """
        self.pool.close()
        with self._lock:
            everything = [*self._known.values(), *(known for _, known in self._retired)]
            for known in everything:
                self._engine.unregister(known.address)
            if is_read:
                _kept.extend(everything)
            self._known.clear()
            self._retired.clear()

    def _register(self, segment: PoolSegment) -> Known:
        anchor = ctypes.c_char.from_buffer(segment.view)
        address = ctypes.addressof(anchor)
        return Known(address, self._engine.register(address, segment.nbytes), anchor)

    def _retire(self, now: float) -> None:
        for number in self.pool.pop_retired():
            known = self._known.pop(number, None)
            if known is not None:
                self._retired.append((now + self._linger_s, known))
        for due_at, known in list(self._retired):
            if due_at <= now:
                self._retired.remove((due_at, known))
                self._engine.unregister(known.address)
