"""How a one-sided target comes to its payloads: its engine reads each where it lies, into the room where it is used.

Every Placed of a source is answered once, when the engine is done with the room or never began: by Drawn, or by the
engine itself, whose notice to the source's engine comes with the end of a read that went well. The source answers in
turn with Sound, which may be here before this end has looked at its own engine. After both the payload is handed over,
or what failed or was given up returned. A notice that is not answered within `NOTICE_S` may be lost: then Drawn is said
as well. A lease ends over the link alone, so between Placed and Sound the source cannot have given the payload's room
to another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omnikv.core.messages import Return
from omnikv.errors import PutRejected, RemoteProtocolError, TransportError
from omnikv.transports.links import Link
from omnikv.transports.one_sided_engine import Engine, EngineFault, Place
from omnikv.transports.one_sided_memory import RegisteredPool
from omnikv.transports.one_sided_messages import Drawn, Placed, Reach, Sound
from omnikv.transports.one_sided_puller import Puller
from omnikv.transports.shm_pool import Room
from omnikv.transports.wants import Wants
from omnikv.transports.window import Arrival


class Transfer:
    """One payload on its way: where it lies at its source, and its room here once it has one."""

    def __init__(self, link: Link, placed: Placed) -> None:
        self.link = link
        self.ask = placed.ask
        self.lease = placed.lease
        self.places: Sequence[Place] = placed.places
        self.notice = placed.notice
        self.nbytes = sum(nbytes for _, nbytes in placed.places)
        # Nobody waits for it; the engine is done with it; all of it is here; its source has said Sound.
        self.is_over = False
        self.is_read = False
        self.is_whole = False
        self.is_sound = False
        self.room: Room | None = None
        self.local = 0


class OneSidedWindow:
    """What a target reads from its sources. Methods are called with the transport's lock, but those of the pullers.

    `find_wants` gives the role that waits for the payloads, `broken` hears what ended a puller's thread.
    """

    def __init__(
        self,
        name: str,
        memory: RegisteredPool,
        engine: Engine,
        lock: threading.Lock,
        find_wants: Callable[[], Wants],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._memory = memory
        self._engine = engine
        self._lock = lock
        self._find_wants = find_wants
        self._broken = broken
        self._transfers: dict[Link, dict[int, Transfer]] = {}
        self._pullers: dict[Link, Puller[Transfer]] = {}
        self._ending: list[Puller[Transfer]] = []
        # Transfers that wait for room, in their order.
        self._waiting: list[Transfer] = []
        # How often room was given back, for whoever found none meanwhile.
        self._gives = 0

    def handle(self, link: Link, message: Any, extra: Any) -> Arrival | None:
        """The payload that a source confirms; one that it offers is read first, and what its engine says is passed on.

        Raises:
            RemoteProtocolError: it says something else, or of a lease that there is not.
        """
        transfers = self._transfers[link]
        if isinstance(message, Reach):
            self._pullers[link].learn(message.word)
        elif isinstance(message, Placed):
            if message.lease in transfers:
                raise RemoteProtocolError(f"lease {message.lease} is told of twice")
            transfer = transfers[message.lease] = Transfer(link, message)
            transfer.is_whole = not transfer.nbytes
            if transfer.nbytes and self._find_wants().is_expected(link, message.ask):
                self._pullers[link].pull(transfer)
            else:
                self._end_read(transfer)
        elif isinstance(message, Sound) and message.lease in transfers:
            transfer = transfers[message.lease]
            transfer.is_sound = True
            return self._hand_over(transfer) if transfer.is_read else None
        else:
            raise RemoteProtocolError(f"{message} is nothing that a source says here, or not now")
        return None

    def expected(self, link: Link) -> memoryview | None:
        """None: memory is taken for what comes."""
        return None

    def link_ready(self, link: Link) -> None:
        """A source that has shown nothing yet gets its thread."""
        assert link.seat is not None
        self._transfers[link] = {}
        self._ending = [puller for puller in self._ending if not puller.join(0.0)]
        self._pullers[link] = Puller(
            self._engine,
            f"{self._name}-reads-rank-{link.seat.rank}",
            prepare=self._prepare,
            done=self._done,
            doubt=self._doubt,
            broken=self._broken,
        )

    def link_gone(self, link: Link) -> None:
        """Nothing; what is being read of it comes to nothing, and its room back when the engine is done."""
        for transfer in self._transfers.get(link, {}).values():
            transfer.is_over = True
            if transfer in self._waiting:
                self._waiting.remove(transfer)
        puller = self._pullers.get(link)
        if puller is not None:
            self._ending.append(puller)
            puller.stop()
        # Forgotten last: where Ctrl-C comes in between, all of it is done again, which harms nothing.
        self._transfers.pop(link, None)
        self._pullers.pop(link, None)

    def given_up(self, link: Link, ask: int) -> None:
        """Nothing; what is not read yet need not be."""
        for transfer in list(self._transfers.get(link, {}).values()):
            if transfer.ask == ask:
                transfer.is_over = True
                if transfer in self._waiting:
                    self._waiting.remove(transfer)
                    self._end_read(transfer)

    def close(self) -> None:
        """Nothing; what is leased stays readable."""
        for link in list(self._pullers):
            self.link_gone(link)

    def join(self, deadline: float) -> bool:
        """Whether no read is under way by `deadline` (monotonic seconds). Call once closed, without the lock."""
        return all(puller.join(deadline) for puller in self._ending)

    # What follows is called by the pullers, without the lock.

    def _prepare(self, transfer: Transfer) -> bool:
        """Whether it has room; else it is pulled again when there is, or was refused for good."""
        if transfer.room is not None:
            return True
        gives = self._gives
        try:
            room = self._memory.take(transfer.nbytes)
        except PutRejected as error:
            self._without_room(transfer, error, gives)
            return False
        except TransportError as error:
            self._fail(transfer, error)
            return False
        known = self._memory.known(room)
        transfer.room, transfer.local = room, known.address + room.offset
        return True

    def _without_room(self, transfer: Transfer, error: PutRejected, gives: int) -> None:
        if error.retryable:
            with self._lock:
                if not transfer.is_over:
                    self._waiting.append(transfer)
                    if gives != self._gives:
                        self._pull_waiting()
                else:
                    self._end_read(transfer)
            return
        refusal = TransportError(
            f"{self._name}: a payload of {transfer.nbytes} bytes can never be received here: the option landing_nbytes "
            f"is {self._memory.pool.limit_nbytes}; raise it at this target",
            transport=self._name,
        )
        refusal.__cause__ = error
        self._fail(transfer, refusal)

    def _done(self, transfer: Transfer, fault: EngineFault | None, has_notified: bool) -> None:
        if fault is None or transfer.is_over:
            with self._lock:
                transfer.is_whole = fault is None
                self._end_read(transfer, has_notified=has_notified)
        else:
            error = TransportError(
                f"{self._name}: {transfer.nbytes} bytes could not be read from source {transfer.link.seat} "
                f"({transfer.link.who}): the engine says {fault.code}; the payload is still there, get it again",
                transport=self._name,
            )
            error.__cause__ = fault
            self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: TransportError) -> None:
        with self._lock:
            self._find_wants().fail_ask(transfer.link, transfer.ask, error)
            self._end_read(transfer)

    def _doubt(self, transfer: Transfer) -> None:
        with self._lock:
            if not transfer.is_sound and transfer.link in self._transfers:
                transfer.link.send(Drawn(transfer.lease))

    # And this with the lock again.

    def _end_read(self, transfer: Transfer, *, has_notified: bool = False) -> None:
        transfer.is_read = True
        if transfer.link not in self._transfers:
            self._give(transfer)
        elif transfer.is_sound:
            arrival = self._hand_over(transfer)
            if arrival is not None:
                self._find_wants().arrive(transfer.link, arrival)
        elif not has_notified:
            transfer.link.send(Drawn(transfer.lease))

    def _hand_over(self, transfer: Transfer) -> Arrival | None:
        del self._transfers[transfer.link][transfer.lease]
        if not transfer.is_whole:
            self._give(transfer)
            transfer.link.send(Return(transfer.lease))
            return None
        if transfer.room is None:
            return Arrival(transfer.ask, transfer.lease, memoryview(bytearray()))
        return Arrival(transfer.ask, transfer.lease, transfer.room.view, partial(self._give, transfer))

    def _give(self, transfer: Transfer) -> None:
        room, transfer.room = transfer.room, None
        if room is not None:
            self._memory.give(room)
            self._gives += 1
            self._pull_waiting()

    def _pull_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            self._pullers[transfer.link].pull(transfer)
