"""Memory of a receiver that its peers write into on their own, and that nobody gets while a write may still come.

For transports whose engines write one-sided. `omnikv.core.landing` says when a room may be handed out again; who asks
for room waits for that, first come first served.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable

from omnikv.core import landing as core
from omnikv.core.extents import Extents
from omnikv.core.landing import Landing, Phase
from omnikv.errors import LocalProtocolError, PutRejected
from omnikv.transports.waiting_room import WaitingRoom

ALIGN_NBYTES = 64


class LandingRoom:
    """Room that one writer may write into. Its user says what happens; each word may be said twice."""

    def __init__(self, pool: LandingPool, writer: Hashable, offset: int, view: memoryview) -> None:
        self._pool = pool
        self.writer = writer
        self.offset = offset
        self.state = Landing()
        self._view = view

    @property
    def view(self) -> memoryview:
        """The room's bytes; nobody else's until it was abandoned.

        Raises:
            LocalProtocolError: it was.
        """
        if self.state.phase in (Phase.QUARANTINED, Phase.FREE):
            raise LocalProtocolError(f"room at {self.offset} is {self.state.phase.value}; take another one")
        return self._view

    def written(self) -> None:
        """The write has ended, well or not: no byte of it comes any more."""
        self._pool.tell(self, core.Written())

    def abandon(self) -> None:
        """Nobody here wants the room any more: it is read, or it was given up."""
        self._pool.tell(self, core.Abandon())


class LandingPool:
    """Rooms in `memory`. A writer whose connection has ended may still write for at most `grace_s`."""

    def __init__(self, name: str, memory: memoryview, *, grace_s: float) -> None:
        self._name = name
        self._memory = memory
        self._grace_s = grace_s
        self._extents = Extents(memory.nbytes, align_nbytes=ALIGN_NBYTES)
        self._rooms: dict[int, LandingRoom] = {}
        self._lock = threading.Lock()
        self._waiting_room = WaitingRoom(name, self._lock)

    @property
    def free_nbytes(self) -> int:
        """How much may be handed out now."""
        with self._lock:
            self._look()
            return self._extents.free_nbytes

    @property
    def quarantined_nbytes(self) -> int:
        """How much is given up, and waits for its writers to be known to write no more."""
        with self._lock:
            self._look()
            rooms = self._rooms.values()
            return sum(len(room._view) for room in rooms if room.state.phase is Phase.QUARANTINED)

    def take(self, nbytes: int, writer: Hashable, *, deadline: float) -> LandingRoom:
        """Room for `nbytes` that `writer` may write into, waited for until `deadline` (monotonic seconds).

        Raises:
            PutRejected: there is none by then (`retryable`), or never so much.
        """
        return self._waiting_room.admit(lambda: self._take(nbytes, writer), deadline, self._look)

    def writer_gone(self, writer: Hashable) -> None:
        """The connection of `writer` has ended: its rooms come back once nothing of it can come any more."""
        self._tell_all(writer, core.WriterGone(self._grace_s))

    def fenced(self, writer: Hashable) -> None:
        """`writer` is known to be unable to write: its unfinished rooms come back at once."""
        self._tell_all(writer, core.Fenced())

    def tell(self, room: LandingRoom, event: core.Event) -> None:
        """Nothing; for the rooms."""
        with self._lock:
            self._step(room, event)

    def _tell_all(self, writer: Hashable, event: core.Event) -> None:
        with self._lock:
            for room in [room for room in self._rooms.values() if room.writer == writer]:
                self._step(room, event)
            # Whoever waits may have to look earlier now.
            self._waiting_room.look_again()

    def _take(self, nbytes: int, writer: Hashable) -> LandingRoom:
        with self._lock:
            offset = self._extents.take(nbytes)
            if offset is None:
                raise PutRejected(
                    f"{self._name}: no room for {nbytes} bytes to land: {self._extents.free_nbytes} of "
                    f"{self._memory.nbytes} are free, or too scattered",
                    retryable=nbytes <= self._memory.nbytes,
                    transport=self._name,
                )
            room = LandingRoom(self, writer, offset, self._memory[offset : offset + nbytes])
            self._rooms[offset] = room
            return room

    def _look(self) -> float:
        """When the next room comes back by time alone; those that are due have, by then."""
        for room in list(self._rooms.values()):
            self._step(room, core.TimePassed())
        times = [room.state.free_at for room in self._rooms.values() if room.state.free_at is not None]
        return min(times, default=math.inf)

    def _step(self, room: LandingRoom, event: core.Event) -> None:
        was_free = room.state.phase is Phase.FREE
        room.state = core.step(room.state, event, time.monotonic())
        if room.state.phase is Phase.FREE and not was_free:
            del self._rooms[room.offset]
            self._extents.give(room.offset)
            self._waiting_room.freed()
