"""A sender's table of its payloads: the one place that knows what is live, who may read it, and how lives ended.

`omnikv.core.lease` decides; this table keeps a state and a room for each identity, and does what the steps say: it
frees room, and calls whoever must answer those who wait. How a life ended is remembered for the latest `MAX_ENDS`
identities, and an identity that is only waited for as long as somebody waits, so that the table does not grow.

The table does no I/O and takes no lock: its owner calls it under its own. `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from omnikv.core import lease as core
from omnikv.core.keys import PayloadId
from omnikv.core.lease import Answer, Effect, End, Event, Life, Phase
from omnikv.core.messages import spell_reason
from omnikv.errors import LocalProtocolError, PutRejected

MAX_ENDS = 4096
MAX_OTHERS = 3
MAX_HISTORY = 8
NOTHING_YET = Life()

Room = TypeVar("Room")


@dataclass(frozen=True, slots=True)
class Grant(Generic[Room]):
    """A lease that was just given out, and the room that it lets its holder read."""

    lease: int
    room: Room


@dataclass(slots=True, eq=False)
class _Record(Generic[Room]):
    payload: PayloadId
    life: Life = NOTHING_YET
    room: Room | None = None
    history: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))


@dataclass(frozen=True, slots=True)
class Ticket(Generic[Room]):
    """One life of a payload, in the hand of its writer."""

    record: _Record[Room]
    generation: int

    @property
    def payload(self) -> PayloadId:
        """Whose life it is."""
        return self.record.payload


class Ledger(Generic[Room]):
    """The payloads of one sender, which expire when nobody was interested in them for `ttl_s`.

    `free` is called with the room of each payload whose life ends; `look_again` with each payload for which those who
    wait may be told something new.
    """

    def __init__(
        self,
        transport: str,
        *,
        ttl_s: float,
        free: Callable[[Room], None],
        look_again: Callable[[PayloadId], None],
    ) -> None:
        self._transport = transport
        self._ttl_s = ttl_s
        self._free = free
        self._look_again = look_again
        self._records: dict[PayloadId, _Record[Room]] = {}
        self._ended: dict[_Record[Room], None] = {}
        self._leases: dict[int, _Record[Room]] = {}
        # In the order in which they are due: all lives have the same time, so the latest to start is the last to end.
        self._due: dict[_Record[Room], float] = {}
        self._next_generation = 1
        self._next_lease = 1
        self._ends: Counter[str] = Counter()
        # Counted rather than looked for: `drain` asks whenever room came back.
        self._held = 0

    @property
    def held(self) -> int:
        """How many payloads that were published still have their room: they are ready, or ended and still read."""
        return self._held

    @property
    def next_expiry(self) -> float | None:
        """When the next payload expires unless somebody becomes interested, or None."""
        return next(iter(self._due.values()), None)

    def census(self) -> dict[str, int]:
        """How many payloads are announced, ready and leased now, and how many lives have ended in which way."""
        lives = [record.life for record in self._records.values()]
        return {
            "announced": sum(life.phase is Phase.ANNOUNCED for life in lives),
            "ready": sum(life.phase is Phase.READY for life in lives),
            "leased": sum(bool(life.grips) for life in lives),
            **{name: self._ends[name] for name in ("released", "expired", "failed", "aborted")},
        }

    def reserve(self, payload: PayloadId, num_readers: int, now: float) -> Ticket[Room]:
        """A new life of `payload`, without room yet.

        Raises:
            PutRejected: the identity is live.
        """
        self.expire(now)
        record = self._records.get(payload)
        if record is not None and record.life.has_room:
            state = record.life.phase.value
            if record.life.grips or record.life.is_over:
                state = f"{state}, {'leased' if record.life.grips else 'being written'}"
            raise PutRejected(
                f"{self._transport}: payload {payload.encode()} is already live ({state}); acknowledge or fail it "
                "first, or send it as a new attempt",
                already_live=True,
                transport=self._transport,
                request_id=payload.transfer_id,
                key=payload.encode(),
                rank=payload.source_rank,
            )
        ticket = Ticket(record or self._new(payload), self._next_generation)
        self._next_generation += 1
        ticket.record.history.clear()
        self._apply(ticket.record, core.Reserve(ticket.generation, num_readers, self._ttl_s), now)
        return ticket

    def furnish(self, ticket: Ticket[Room], room: Room) -> bool:
        """Whether the life has `room` now; not when it was ended by `clear` meanwhile."""
        is_live = _is_live(ticket)
        if is_live:
            ticket.record.room = room
        return is_live

    def holds(self, payload: PayloadId) -> bool:
        """Whether a life of `payload` goes on, or somebody still writes or reads what is left of one."""
        record = self._records.get(payload)
        return record is not None and record.life.has_room

    def room_being_written(self, payload: PayloadId) -> Room | None:
        """The room of a payload that is not published yet, or None where there is no such payload, or no room yet."""
        record = self._records.get(payload)
        return record.room if record is not None and record.life.phase is Phase.ANNOUNCED else None

    def publish(self, ticket: Ticket[Room], now: float) -> None:
        """Nothing; the payload may be leased from now on.

        Raises:
            LocalProtocolError: it was published, dropped, failed or aborted before; in the latter cases it ends here.
        """
        record, life = ticket.record, ticket.record.life
        if not _is_live(ticket) or life.phase is not Phase.ANNOUNCED:
            is_it = life.generation == ticket.generation and life.cause
            went = f"it was {life.phase.value} ({life.cause})" if is_it else "it was published or dropped before"
            self.drop(ticket, now)
            raise LocalProtocolError(
                f"{self._transport}: payload {record.payload.encode()} cannot be published: {went}; reserve it again",
                history=tuple(record.history),
                request_id=record.payload.transfer_id,
            )
        self._apply(record, core.Publish(ticket.generation), now)

    def drop(self, ticket: Ticket[Room], now: float) -> None:
        """Nothing; ends the life of a payload that was not published, and does nothing to any other."""
        self._apply(ticket.record, core.Drop(ticket.generation), now)

    def fail(self, payload: PayloadId, cause: str, now: float) -> None:
        """Nothing; whoever asks for `payload` is told `cause`, and its room is free once nobody writes or reads it."""
        self._apply(self._records.get(payload) or self._new(payload), core.Fail(spell_reason(cause)), now)

    def abort(self, payload: PayloadId, cause: str, now: float) -> None:
        """Nothing; as `fail`, for a request that nobody needs any more."""
        self._apply(self._records.get(payload) or self._new(payload), core.Abort(spell_reason(cause)), now)

    def ask(
        self,
        payload: PayloadId,
        reader: int,
        holder: Hashable,
        now: float,
        show: Callable[[Grant[Room]], None] | None = None,
    ) -> Grant[Room] | End | None:
        """A lease for `holder`, which acts for `reader`; or how the payload's life ended; or None: not yet.

        `show` passes the lease on before it is entered here, so that its holder does not wait for that. It is entered
        though Ctrl-C comes meanwhile: its holder may have it by then, and would use what is offered again.
        """
        self.expire(now)
        record = self._records.get(payload)
        if record is None:
            return None
        told = core.answer(record.life, reader)
        if isinstance(told, End):
            return told
        if told is Answer.WAIT:
            return None
        lease = self._next_lease
        self._next_lease += 1
        assert record.room is not None
        grant = Grant(lease, record.room)
        try:
            if show is not None:
                show(grant)
        finally:
            self._leases[lease] = record
            self._apply(record, core.Take(lease, reader, holder), now)
        return grant

    def acknowledge(self, lease: int, holder: Hashable, now: float) -> bool:
        """Whether `holder` held that lease, or was noted for it by `lapse`: if so, it used the payload."""
        return self._end_lease(lease, core.Acknowledge(lease, holder), now)

    def give_back(self, lease: int, holder: Hashable, now: float) -> None:
        """Nothing; the payload can be leased again. Does nothing when `holder` holds no such lease (any more)."""
        self._end_lease(lease, core.GiveBack(lease, holder), now)

    def leave(self, holder: Hashable, now: float) -> None:
        """Nothing; everything that `holder` leased can be leased again."""
        for lease in self._held_by(holder):
            self.give_back(lease, holder, now)

    def lapse(self, holder: Hashable, name: Hashable, now: float) -> None:
        """Nothing; as `leave`, for a holder that may yet say as `name` what it used, until somebody leases it again."""
        for lease in self._held_by(holder):
            self._end_lease(lease, core.Lapse(lease, holder, name), now)

    def others_ready(self, payload: PayloadId) -> tuple[str, ...]:
        """Up to `MAX_OTHERS` transfer ids that are ready for the same target, most like the payload's first."""
        names = {
            other.transfer_id
            for other, record in self._records.items()
            if record.life.phase is Phase.READY and other.target_rank == payload.target_rank
        }
        names.discard(payload.transfer_id)

        def unlike(name: str) -> tuple[int, str]:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(name, payload.transfer_id, strict=False))
            return -sum(1 for _ in alike), name

        return tuple(sorted(names, key=unlike)[:MAX_OTHERS])

    def interest(self, payload: PayloadId, who: Hashable, now: float) -> None:
        """Nothing; the payload does not expire while `who` is interested."""
        self._apply(self._records.get(payload) or self._new(payload), core.Interest(who), now)

    def no_interest(self, payload: PayloadId, who: Hashable, now: float) -> None:
        """Nothing; `who` is interested no more."""
        record = self._records.get(payload)
        if record is not None:
            self._apply(record, core.NoInterest(who), now)

    def is_interested(self, payload: PayloadId, who: Hashable) -> bool:
        """Whether `who` is still counted as interested: not after an end, nor after its acknowledgement."""
        record = self._records.get(payload)
        return record is not None and who in record.life.interest

    def expire(self, now: float) -> None:
        """Nothing; ends what is due."""
        while self._due and (due := next(iter(self._due.items())))[1] <= now:
            self._apply(due[0], core.TimePassed(), now)

    def clear(self, now: float) -> None:
        """Nothing; ends every life and forgets all, as a sender does that closes."""
        for record in list(self._records.values()):
            self._apply(record, core.Close(), now)
        self._leases.clear()
        self._ended.clear()
        self._records.clear()

    def _new(self, payload: PayloadId) -> _Record[Room]:
        record: _Record[Room] = _Record(payload)
        self._records[payload] = record
        return record

    def _held_by(self, holder: Hashable) -> list[int]:
        return [
            lease
            for lease, record in self._leases.items()
            if any((grip.lease, grip.holder) == (lease, holder) for grip in record.life.grips)
        ]

    def _end_lease(self, lease: int, event: Event, now: float) -> bool:
        record = self._leases.get(lease)
        if record is None:
            return False
        before = record.life
        self._apply(record, event, now)
        if all(grip.lease != lease for grip in (*record.life.grips, *record.life.lapsed)):
            # Nobody may say anything of it any more; forgotten already where its life ended with it.
            self._leases.pop(lease, None)
        return record.life is not before

    def _apply(self, record: _Record[Room], event: Event, now: float) -> None:
        before = record.life
        life, effects = core.step(before, event, now)
        if life is before:
            return
        record.life = life
        record.history.append(type(event).__name__)
        self._note(record, before, life)
        for effect in effects:
            if effect is Effect.LOOK_AGAIN:
                self._look_again(record.payload)
            elif record.room is not None:
                room, record.room = record.room, None
                self._free(room)

    def _note(self, record: _Record[Room], before: Life, life: Life) -> None:
        """Keeps the counts, the due times and the bounds in step with a life."""
        self._held += _is_held(life) - _is_held(before)
        if life.expires_at != before.expires_at:
            self._due.pop(record, None)
            if life.expires_at is not None:
                self._due[record] = life.expires_at
        if life.is_over and not before.is_over:
            self._ends[life.phase.value] += 1
        for gone in before.lapsed:
            if gone not in life.lapsed:
                self._leases.pop(gone.lease, None)
        self._ended.pop(record, None)
        if life.has_room:
            return
        if life.phase is Phase.ABSENT and not life.interest:
            del self._records[record.payload]
        elif life.is_over:
            self._ended[record] = None
            if len(self._ended) > MAX_ENDS:
                oldest = next(iter(self._ended))
                del self._ended[oldest], self._records[oldest.payload]


def _is_held(life: Life) -> bool:
    return life.has_room and not life.is_written


def _is_live(ticket: Ticket[Room]) -> bool:
    """Whether the writer's life goes on: a later generation, or none, is not it."""
    life = ticket.record.life
    return life.generation == ticket.generation and life.has_room
