"""The slot table of a background prefetch: what happens to each request's KV between being asked for and being used.

    absent --submit--> queued --start--> running --finish--> ready --take--> (delivered, absent)
                         |                  |                  |
                     discard/take        discard            discard
                         v                  v                  v
                      absent            orphaned --finish--> lost (if something had been consumed) or absent
                                            |
                                     submit/take: back to running

A request that was discarded while its fetch ran is an orphan: the fetch cannot be stopped, and what it brings has been
taken from the connector. If the same request is asked for again in time, it is adopted back. If what it brought was
dropped and could not be given back (it was consumed), the slot stays as "lost", so that the next taker learns at once
that a retry cannot help, instead of waiting for a payload that no longer exists.

Pure: `step(table, event)` gives the next table and the effects that the shell must carry out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from omnikv.errors import LocalProtocolError

_MAX_HISTORY = 32
_MAX_LOST = 64


class Phase(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    ORPHANED = "orphaned"
    LOST = "lost"


class Kind(enum.Enum):
    """What happened: SUBMIT, TAKE and DISCARD come from the owner; START and FINISH from the worker."""

    SUBMIT = "submit"
    START = "start"
    FINISH = "finish"
    TAKE = "take"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True)
class Event:
    """`consumed` belongs to FINISH: the fetch took something that cannot be given back, usable or not."""

    kind: Kind
    request_id: str
    consumed: bool = False


class Effect(enum.Enum):
    """What the shell must do about the event's request."""

    ENQUEUE = "hand the job to the worker"
    UNQUEUE = "take the job back from the worker, which has not begun it"
    AWAIT = "wait until the fetch finishes, then take again"
    DELIVER = "give the fetch's outcome to the taker and forget it"
    DROP = "forget the fetch's outcome, and give back what it holds"
    REPORT_MISS = "tell the taker that nothing was prefetched"
    REPORT_LOSS = "tell the taker that the payload was consumed and is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All slots by request id; one without a slot is absent. `consumed` are the ready ones that cannot go back."""

    slots: Mapping[str, Phase] = field(default_factory=lambda: MappingProxyType({}))
    consumed: frozenset[str] = frozenset()
    history: tuple[str, ...] = ()

    def phase(self, request_id: str) -> Phase | None:
        return self.slots.get(request_id)

    def having(self, *phases: Phase) -> tuple[str, ...]:
        """The requests in one of these phases, in the order in which they were submitted."""
        return tuple(request_id for request_id, phase in self.slots.items() if phase in phases)


# (phase before, event) -> (phase after, effects); None is absence. Cases that hang on `consumed` are in `_resolve`.
_TRANSITIONS: dict[tuple[Phase | None, Kind], tuple[Phase | None, tuple[Effect, ...]]] = {
    (None, Kind.SUBMIT): (Phase.QUEUED, (Effect.ENQUEUE,)),
    (None, Kind.TAKE): (None, (Effect.REPORT_MISS,)),
    (None, Kind.DISCARD): (None, ()),
    (Phase.QUEUED, Kind.SUBMIT): (Phase.QUEUED, ()),
    (Phase.QUEUED, Kind.START): (Phase.RUNNING, ()),
    # Not begun means that nothing was consumed: the taker fetches for itself rather than wait behind another job.
    (Phase.QUEUED, Kind.TAKE): (None, (Effect.UNQUEUE, Effect.REPORT_MISS)),
    (Phase.QUEUED, Kind.DISCARD): (None, (Effect.UNQUEUE,)),
    (Phase.RUNNING, Kind.SUBMIT): (Phase.RUNNING, ()),
    (Phase.RUNNING, Kind.FINISH): (Phase.READY, ()),
    (Phase.RUNNING, Kind.TAKE): (Phase.RUNNING, (Effect.AWAIT,)),
    (Phase.RUNNING, Kind.DISCARD): (Phase.ORPHANED, ()),
    (Phase.READY, Kind.SUBMIT): (Phase.READY, ()),
    (Phase.READY, Kind.TAKE): (None, (Effect.DELIVER,)),
    (Phase.ORPHANED, Kind.SUBMIT): (Phase.RUNNING, ()),
    (Phase.ORPHANED, Kind.TAKE): (Phase.RUNNING, (Effect.AWAIT,)),
    (Phase.ORPHANED, Kind.DISCARD): (Phase.ORPHANED, ()),
    (Phase.LOST, Kind.SUBMIT): (Phase.QUEUED, (Effect.ENQUEUE,)),
    (Phase.LOST, Kind.TAKE): (None, (Effect.REPORT_LOSS,)),
    (Phase.LOST, Kind.DISCARD): (Phase.LOST, ()),
}


def step(table: Table, event: Event) -> tuple[Table, tuple[Effect, ...]]:
    """The next table and the effects to carry out for the event's request.

    Raises:
        LocalProtocolError: the request's slot cannot take this event; the history tells how it came there.
    """
    request_id, before = event.request_id, table.phase(event.request_id)
    history = (*table.history, f"{event.kind.value}({request_id!r}) in {before.value if before else 'absent'}")
    history = history[-_MAX_HISTORY:]
    resolved = _resolve(before, event, request_id in table.consumed)
    if resolved is None:
        raise LocalProtocolError(
            f"a prefetch that is {before.value if before else 'absent'} cannot take {event.kind.value!r}",
            history=history,
            request_id=request_id,
        )
    after, effects = resolved
    slots = dict(table.slots)
    if after is None:
        slots.pop(request_id, None)
    else:
        slots[request_id] = after
    consumed = table.consumed - {request_id}
    if after is Phase.READY and (event.consumed or request_id in table.consumed):
        consumed |= {request_id}
    return Table(slots=MappingProxyType(_bounded(slots)), consumed=consumed, history=history), effects


def _resolve(before: Phase | None, event: Event, is_consumed: bool) -> tuple[Phase | None, tuple[Effect, ...]] | None:
    if before is Phase.ORPHANED and event.kind is Kind.FINISH:
        return (Phase.LOST if event.consumed else None), (Effect.DROP,)
    if before is Phase.READY and event.kind is Kind.DISCARD:
        return (Phase.LOST if is_consumed else None), (Effect.DROP,)
    return _TRANSITIONS.get((before, event.kind))


def _bounded(slots: dict[str, Phase]) -> dict[str, Phase]:
    """The slots without the oldest lost ones beyond a fixed number: they are only reminders."""
    lost = [request_id for request_id, phase in slots.items() if phase is Phase.LOST]
    for request_id in lost[: max(0, len(lost) - _MAX_LOST)]:
        del slots[request_id]
    return slots
