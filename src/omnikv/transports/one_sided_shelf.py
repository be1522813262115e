"""How a one-sided source shows its payloads: it says where they lie, and the target's engine reads them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from omnikv.core.lending import Loan
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.one_sided_engine import Engine, Place
from omnikv.transports.one_sided_loans import LentMemory, Registered
from omnikv.transports.one_sided_memory import RegisteredPool
from omnikv.transports.one_sided_messages import Drawn, Placed, Reach, Sound
from omnikv.transports.shm_pool import Room

# Between two calls of an engine that moves only while it is called: a few percent of a core, while something is read.
PAUSE_S = 0.00005


class Shelved:
    """One payload: its room, and what of it was lent instead, if any. `num_reads` began and may not be over."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.loan: Loan | None = None
        self.held: list[Registered] = []
        self.num_reads = 0

    def places(self, address: int) -> tuple[Place, ...]:
        """Where the payload lies, with its room at `address`."""
        if self.loan is None:
            return ((address, self.room.nbytes),)
        places: list[Place] = []
        for span in self.loan.spans:
            start = span.start if span.is_lent else address + span.start
            if places and sum(places[-1]) == start:
                start, nbytes = places.pop()
                places.append((start, nbytes + span.nbytes))
            else:
                places.append((start, span.nbytes))
        return tuple(places)


class OneSidedShelf:
    """The payloads of one source. Called with the transport's lock where nothing else is said."""

    def __init__(self, memory: RegisteredPool, lent: LentMemory, engine: Engine, thread_name: str) -> None:
        self._memory = memory
        self._lent = lent
        self._engine = engine
        # What of this end's memory each target has heard of: segments of the pool by number, and what is lent.
        self._told: dict[Link, set[int | Registered]] = {}
        # The payloads that a target may be reading now, by lease.
        self._read: dict[Link, dict[int, Shelved]] = {}
        self._server = Server(engine, thread_name) if engine.needs_serving else None
        # Whether a target was reading when this end closed.
        self.is_read = False

    def take(self, sizes: Sequence[int]) -> list[Shelved]:
        """Room that the engine knows, for all payloads or for none. Called without the lock.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
            TransportError: the engine does not take the memory.
        """
        return [Shelved(room) for room in self._memory.take_all(sizes)]

    def view(self, room: Shelved) -> memoryview:
        """The writable bytes of one payload. Called without the lock."""
        return room.room.view

    def lend(self, room: Shelved, loan: Loan) -> None:
        """Nothing; the payload is what `loan` says. Called without the lock, before it is shown.

        Raises:
            PutRejected: some of its memory is lent otherwise; `retryable`.
            TransportError: the engine does not take the memory.
        """
        if loan.memory:
            room.held = self._lent.hold(loan.memory)
        room.loan = loan

    def give(self, room: Shelved) -> None:
        """Nothing; the room is free again, and what was lent its owner's."""
        self._memory.give(room.room)
        if room.held:
            self._lent.let_go(room.held, is_read=room.num_reads > 0)

    def show(self, link: Link, ask: int, lease: int, room: Shelved) -> None:
        """Nothing; tells the target where the payload lies, and how to read there where it has not heard yet."""
        known = self._memory.known(room.room)
        self._tell_of(link, room.room.segment.number, known.word)
        for lent in room.held:
            self._tell_of(link, lent, lent.word)
        self._read[link][lease] = room
        room.num_reads += 1
        self._tell_server()
        link.send(Placed(ask, lease, room.places(known.address + room.room.offset)))

    def promise(self, link: Link, ask: int, room: Shelved) -> None:
        """Nothing; what is read on its own is read once it is published."""

    def wrote(self, room: Shelved, begin: int, end: int) -> None:
        """Nothing; as `promise`."""

    def taken(self) -> None:
        """Nothing; memory that made way for other memory is seen to where room is taken."""

    def handle(self, link: Link, message: Any) -> None:
        """Nothing; a target has read what is leased to it. Leases end over this very link, so it held until now.

        Raises:
            RemoteProtocolError: it was leased nothing of the kind.
        """
        if not isinstance(message, Drawn) or message.lease not in self._read[link]:
            raise RemoteProtocolError(f"{message} is nothing that a target says here")
        self._read[link].pop(message.lease).num_reads -= 1
        self._tell_server()
        link.send(Sound(message.lease))

    def link_ready(self, link: Link) -> None:
        """A target that knows nothing yet: it is told how this engine is reached."""
        self._told[link] = set()
        self._read[link] = {}
        link.send(Reach(self._engine.hail()))

    def link_gone(self, link: Link) -> None:
        """Nothing; what it reads from now on counts for nothing."""
        self._told.pop(link, None)
        self._read.pop(link, None)
        self._tell_server()

    def close(self) -> None:
        """Nothing; nothing more is shown. The memory goes when the transport closes it."""
        self.is_read = any(self._read.values())
        if self._server is not None:
            self._server.stop()

    def join(self) -> None:
        """Nothing; once closed, waits for the thread that serves the engine. Call without the lock."""
        if self._server is not None:
            self._server.join()

    def _tell_of(self, link: Link, memory: int | Registered, word: bytes) -> None:
        if memory not in self._told[link]:
            self._told[link].add(memory)
            if word:
                link.send(Reach(word))

    def _tell_server(self) -> None:
        if self._server is not None:
            self._server.expect(any(self._read.values()))


class Server:
    """The thread that lets reads of this end's memory go on, as long as one is expected, and sleeps otherwise."""

    def __init__(self, engine: Engine, thread_name: str) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._is_expected = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    def expect(self, is_expected: bool) -> None:
        """Nothing; serves from now on, or does not."""
        with self._changed:
            self._is_expected = is_expected
            self._changed.notify()

    def stop(self) -> None:
        """Nothing; serves no more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def join(self) -> None:
        """Nothing; the thread has ended. Call after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_expected or self._has_ended)
                if self._has_ended:
                    return
            self._engine.serve()
            time.sleep(PAUSE_S)
