"""When memory that a peer writes into may be handed out again: never while a write may still come.

Theory of operation. A room at a receiver is opened for one writer, a peer that writes into it on its own, one-sided:

    landing --Written--> landed --Abandon--> free
       |
       '--Abandon--> quarantined --Written, Fenced, or the writer gone for `grace_s`--> free

Whoever gives up a room before the write has ended cannot know whether bytes are on their way, so the room is kept from
everybody until the write is known to have ended (it was drained), the writer is known to be unable to write (it was
fenced: its access was taken away, its process ended on this host), or its connection ended so long ago that whatever
was on its way has come. Everything may be said twice and late.

Pure: time comes in as `now`, monotonic seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple


class Phase(enum.Enum):
    """Where a room stands."""

    LANDING = "landing"
    LANDED = "landed"
    QUARANTINED = "quarantined"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Landing:
    """One room. `free_at` is when its writer is too long gone to write."""

    phase: Phase = Phase.LANDING
    free_at: float | None = None


class Written(NamedTuple):
    """The write has ended, well or not: no byte of it comes any more."""


class Abandon(NamedTuple):
    """Nobody here wants the room any more."""


class WriterGone(NamedTuple):
    """The writer's connection ended; what it had sent by then may still come for `grace_s`."""

    grace_s: float


class Fenced(NamedTuple):
    """The writer is known to be unable to write."""


class TimePassed(NamedTuple):
    """Nothing but that."""


Event = Written | Abandon | WriterGone | Fenced | TimePassed


def step(landing: Landing, event: Event, now: float) -> Landing:
    """The next state; a room that has become free is handed out again by the shell."""
    landing = _pass_time(landing, now)
    unfinished = landing.phase in (Phase.LANDING, Phase.QUARANTINED)
    match event:
        case Written():
            after = {Phase.LANDING: Phase.LANDED, Phase.QUARANTINED: Phase.FREE}
            return replace(landing, phase=after.get(landing.phase, landing.phase))
        case Abandon():
            # Bytes that are here belong to nobody now; bytes that are not may still come.
            over = {Phase.LANDING: Phase.QUARANTINED, Phase.LANDED: Phase.FREE}
            return replace(landing, phase=over.get(landing.phase, landing.phase))
        case WriterGone(grace_s) if unfinished:
            due_at = now + grace_s if landing.free_at is None else min(landing.free_at, now + grace_s)
            return Landing(Phase.QUARANTINED, due_at)
        case Fenced() if unfinished:
            return replace(landing, phase=Phase.FREE)
        case _:
            return landing


def _pass_time(landing: Landing, now: float) -> Landing:
    is_due = landing.free_at is not None and now >= landing.free_at and landing.phase is Phase.QUARANTINED
    return replace(landing, phase=Phase.FREE) if is_due else landing
