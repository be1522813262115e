"""Where requests wait for a sender's memory: the threads behind the row of `omnikv.core.admission`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from omnikv.core import admission
from omnikv.errors import PutRejected
from omnikv.transports.bell import Bell

Taken = TypeVar("Taken")

# Found by one who waits when there is something to look for before its wait would end.
EARLIER = -1


class WaitingRoom:
    """Lets requests at a memory of limited size, first come first served. `lock` guards the row.

    Each that waits has a bell of its own: of a thousand, room that comes back wakes one.
    """

    def __init__(self, transport: str, lock: threading.Lock) -> None:
        self._transport = transport
        self._lock = lock
        self._bells: dict[int, Bell] = {}
        self._row = admission.Row()
        self._next_ticket = 1
        # Whom the row lets try, and at which count of freed rooms.
        self._turns: dict[int, int] = {}

    def freed(self) -> None:
        """Nothing; room came back. Call with the lock."""
        self._step(admission.RoomFreed())

    def look_again(self) -> None:
        """Nothing; all that wait call `look` again, which may raise or name another time. Call with the lock."""
        for bell in self._bells.values():
            bell.ring()

    def admit(self, take: Callable[[], Taken], deadline: float, look: Callable[[], float]) -> Taken:
        """What `take` gives, as soon as there is room. `take` is called without the lock; call this without it.

        `look` is called with the lock, after `look_again` among others: it may raise, and says when to look again at
        the latest.

        Raises:
            PutRejected: `take` says that there is never enough room, or there was none by `deadline`.
        """
        no_room: PutRejected | None = None
        with self._lock:
            tried_at = None if self._row.waiting else self._row.freed
        if tried_at is not None:
            # Nobody waits, so nobody is overtaken.
            try:
                return take()
            except PutRejected as error:
                if not error.retryable:
                    raise
                no_room = error
        is_patient = deadline > time.monotonic()
        with self._lock:
            ticket = self._next_ticket
            self._next_ticket += 1
        try:
            with self._lock:
                arrived = admission.Arrive(ticket, is_patient)
                self._step(arrived if tried_at is None else admission.NoRoom(ticket, is_patient, tried_at))
                freed = self._turns.pop(ticket, None)
            while freed is not None or (freed := self._wait(ticket, deadline, look)) is not None:
                try:
                    return take()
                except PutRejected as error:
                    if not error.retryable:
                        raise
                    no_room = error
                with self._lock:
                    self._step(admission.NoRoom(ticket, is_patient, freed))
                freed = None
            raise no_room or self._behind_others()
        finally:
            # A raised error refers to this frame, which must not refer to it.
            no_room = None
            try:
                self._leave(ticket)
            finally:
                # Twice: Ctrl-C may come while the first waits for the lock, and who stays in the row keeps others out.
                self._leave(ticket)

    def _leave(self, ticket: int) -> None:
        with self._lock:
            self._turns.pop(ticket, None)
            self._bells.pop(ticket, None)
            self._step(admission.Leave(ticket))

    def _wait(self, ticket: int, deadline: float, look: Callable[[], float]) -> int | None:
        until = deadline
        with self._lock:
            bell = self._bells.setdefault(ticket, Bell(self._lock))

        def turn() -> int | None:
            due_at = look()
            freed = self._turns.pop(ticket, None)
            return EARLIER if freed is None and due_at < until else freed

        while True:
            freed = bell.wait_for(turn, until)
            if freed != EARLIER and (freed is not None or time.monotonic() >= deadline):
                return freed
            with self._lock:
                until = min(deadline, look())

    def _step(self, event: admission.Event) -> None:
        self._row, turns = admission.step(self._row, event)
        for turn in turns:
            self._turns[turn.ticket] = turn.freed
            if turn.ticket in self._bells:
                self._bells[turn.ticket].ring()

    def _behind_others(self) -> PutRejected:
        return PutRejected(
            f"{self._transport}: {len(self._row.waiting)} requests wait for room already; wait too, or send later",
            retryable=True,
            transport=self._transport,
        )
