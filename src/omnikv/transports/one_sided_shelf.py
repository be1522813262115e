"""How a one-sided source shows its payloads: it says where they lie, and the target's engine reads them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.one_sided_engine import Engine
from omnikv.transports.one_sided_memory import RegisteredPool
from omnikv.transports.one_sided_messages import Drawn, Placed, Reach, Sound
from omnikv.transports.shm_pool import Room

# Between two calls of an engine that moves only while it is called: a few percent of a core, while something is read.
PAUSE_S = 0.00005


class OneSidedShelf:
    """The payloads of one source. Called with the transport's lock where nothing else is said."""

    def __init__(self, memory: RegisteredPool, engine: Engine, thread_name: str) -> None:
        self._memory = memory
        self._engine = engine
        self._told: dict[Link, set[int]] = {}
        # The leases under which a target may be reading now.
        self._read: dict[Link, set[int]] = {}
        self._server = Server(engine, thread_name) if engine.needs_serving else None
        # Whether a target was reading when this end closed.
        self.is_read = False

    def take(self, sizes: Sequence[int]) -> list[Room]:
        """Room that the engine knows, for all payloads or for none. Called without the lock.

        Raises:
            PutRejected: no room; `retryable` when room may come back.
            TransportError: the engine does not take the memory.
        """
        return self._memory.take_all(sizes)

    def view(self, room: Room) -> memoryview:
        """The writable bytes of one payload. Called without the lock."""
        return room.view

    def give(self, room: Room) -> None:
        """Nothing; the room is free again."""
        self._memory.give(room)

    def show(self, link: Link, ask: int, lease: int, room: Room) -> None:
        """Nothing; tells the target where the payload lies, and how to read there where it has not heard yet."""
        known = self._memory.known(room)
        if room.segment.number not in self._told[link]:
            self._told[link].add(room.segment.number)
            if known.word:
                link.send(Reach(known.word))
        self._read[link].add(lease)
        self._tell_server()
        link.send(Placed(ask, lease, known.address + room.offset, room.nbytes))

    def promise(self, link: Link, ask: int, room: Room) -> None:
        """Nothing; what is read on its own is read once it is published."""

    def wrote(self, room: Room, begin: int, end: int) -> None:
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
        self._read[link].discard(message.lease)
        self._tell_server()
        link.send(Sound(message.lease))

    def link_ready(self, link: Link) -> None:
        """A target that knows nothing yet: it is told how this engine is reached."""
        self._told[link] = set()
        self._read[link] = set()
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
