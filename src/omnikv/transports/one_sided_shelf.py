"""How a one-sided source shows its payloads: it says where they lie, and the target's engine reads them there.

Theory of operation. A read ends here once: when the target says Drawn over its link, or when the target's engine says
so to this one, where engines have notices. Engines ask nobody who they are, so a notice counts for what it proves:
Placed gave the target alone a random one for this lease, over a link that had proved itself. One that fits no read
under way is counted, and nothing else: as late where it was given for another, which the second half of each proves
of the first without a list of them. Either way the target hears Sound if the lease still stands.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omnikv.core.lending import Loan
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.one_sided_engine import Engine, Place
from omnikv.transports.one_sided_loans import LentMemory, Registered
from omnikv.transports.one_sided_memory import RegisteredPool
from omnikv.transports.one_sided_messages import NOTICE_NBYTES, Drawn, Placed, Reach, Sound
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


class _Read(NamedTuple):
    """A payload that a target may be reading now, and what its engine says of that; empty where it says nothing."""

    room: Shelved
    notice: bytes


class OneSidedShelf:
    """The payloads of one source. Called with the transport's lock where nothing else is said.

    `count` counts and logs what goes wrong.
    """

    # A target that reads on without its lease reads what nobody confirms, so its room is free.
    num_lingering = 0
    sends_ahead = False

    def __init__(
        self,
        memory: RegisteredPool,
        lent: LentMemory,
        engine: Engine,
        thread_name: str,
        lock: threading.Lock,
        count: Callable[[str, str], None],
    ) -> None:
        self._memory = memory
        self._lent = lent
        self._engine = engine
        self._lock = lock
        self._count = count
        # What of this end's memory each target has heard of: segments of the pool by number, and what is lent.
        self._told: dict[Link, set[int | Registered]] = {}
        # What is being read, by lease; and by what a target's engine will say of it.
        self._read: dict[Link, dict[int, _Read]] = {}
        self._noticed: dict[bytes, tuple[Link, int]] = {}
        self._notice_key = secrets.token_bytes(32)
        self._server = Server(engine, thread_name, self._hear) if engine.needs_serving or engine.has_notices else None
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
        notice = self._new_notice() if self._engine.has_notices else b""
        if notice:
            self._noticed[notice] = link, lease
        self._read[link][lease] = _Read(room, notice)
        room.num_reads += 1
        self._tell_server()
        link.send(Placed(ask, lease, room.places(known.address + room.room.offset), notice))

    def promise(self, link: Link, ask: int, room: Shelved, head: bytes) -> None:
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
        if isinstance(message, Drawn) and message.lease in self._read[link]:
            self._end_read(link, message.lease)
        elif not isinstance(message, Drawn) or not self._engine.has_notices:
            # Else it crossed the answer to its notice.
            raise RemoteProtocolError(f"{message} is nothing that a target says here")

    def link_ready(self, link: Link) -> None:
        """A target that knows nothing yet: it is told how this engine is reached."""
        self._told[link] = set()
        self._read[link] = {}
        link.send(Reach(self._engine.hail()))

    def link_gone(self, link: Link) -> None:
        """Nothing; what it reads from now on counts for nothing."""
        self._told.pop(link, None)
        for read in self._read.pop(link, {}).values():
            self._noticed.pop(read.notice, None)
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

    def _hear(self, notices: Sequence[bytes]) -> None:
        """Nothing; ends the reads that these notices prove to be over. Called without the lock."""
        with self._lock:
            for notice in notices:
                found = self._noticed.get(notice)
                if found is not None:
                    self._end_read(*found)
                elif self._was_given(notice):
                    self._count("late_notices", "the engine was told of a read that is over: ignored")
                else:
                    self._count("foreign_notices", "the engine was told of a read that never was: ignored")

    def _new_notice(self) -> bytes:
        half = secrets.token_bytes(NOTICE_NBYTES // 2)
        return half + self._proof_of(half)

    def _was_given(self, notice: bytes) -> bool:
        half = notice[: NOTICE_NBYTES // 2]
        return hmac.compare_digest(notice[len(half) :], self._proof_of(half))

    def _proof_of(self, half: bytes) -> bytes:
        return hashlib.blake2b(half, digest_size=NOTICE_NBYTES // 2, key=self._notice_key).digest()

    def _end_read(self, link: Link, lease: int) -> None:
        room, notice = self._read[link].pop(lease)
        self._noticed.pop(notice, None)
        room.num_reads -= 1
        self._tell_server()
        link.send(Sound(lease))

    def _tell_server(self) -> None:
        if self._server is not None:
            self._server.expect(any(self._read.values()))


class Server:
    """The thread that lets reads of this end's memory go on, as long as one is expected, and sleeps otherwise.

    `hear` is given the notices that come meanwhile, on the thread.
    """

    def __init__(self, engine: Engine, thread_name: str, hear: Callable[[Sequence[bytes]], None]) -> None:
        self._engine = engine
        self._hear = hear
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
            notices = self._engine.serve()
            if notices:
                self._hear(notices)
            time.sleep(PAUSE_S)
