"""Which shards a receiver still lacks, what it does next, and when it gives up.

A receiver works in rounds. It asks for every shard that is missing, reports each arrival, and ends the round; it is
then told that it has all, or to pause before the next round, or that the deadline has passed. A pause starts short
after a round that brought something and doubles while nothing comes. The last pause ends at the deadline and is
followed by one more round, so a shard that came during it is still found. A receive whose wait ended may be resumed
with a later deadline: it asks only for what is missing then.

Pure: the clock's reading comes in with the event, and pausing is the shell's work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from omnikv.errors import LocalProtocolError

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05
_MAX_HISTORY = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard by its connector key; `source_rank` is None where no rank has to be named."""

    key: str
    source_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """The shard under `key` is here."""

    key: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Every missing shard has been asked for once; `now_s` is the monotonic clock."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Complete:
    """All shards are here."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait this long, or until something arrives, and ask for what is missing again."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The deadline has passed and these are missing."""

    missing: tuple[Shard, ...]


Event = Arrived | RoundEnded
Effect = Complete | Pause | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """The state of one receive. `deadline_s` is absolute, on the monotonic clock."""

    wanted: tuple[Shard, ...]
    deadline_s: float
    here: frozenset[str] = frozenset()
    arrived_in_round: bool = False
    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    pause_s: float = FIRST_PAUSE_S
    history: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Shard, ...]:
        """The shards still to be asked for, in the order of their sources."""
        return tuple(shard for shard in self.wanted if shard.key not in self.here)


def begin(
    wanted: tuple[Shard, ...],
    *,
    deadline_s: float,
    first_pause_s: float = FIRST_PAUSE_S,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> Fetch:
    """The state of a receive that has asked for nothing yet.

    A connector that must be polled wants short pauses; one that wakes its caller can be waited on for longer.

    Raises:
        LocalProtocolError: nothing is wanted, or two shards have the same key, so that one would stand for both.
    """
    keys = [shard.key for shard in wanted]
    if not keys or len(set(keys)) != len(keys):
        raise LocalProtocolError(f"a receive needs at least one shard and a key of its own for each, got {keys}")
    return Fetch(
        wanted=wanted,
        deadline_s=deadline_s,
        first_pause_s=first_pause_s,
        longest_pause_s=longest_pause_s,
        pause_s=first_pause_s,
    )


def resume(state: Fetch, *, deadline_s: float) -> Fetch:
    """The receive with another deadline, as eager as it began; what is here stays here."""
    return replace(state, deadline_s=deadline_s, pause_s=state.first_pause_s, arrived_in_round=False)


def step(state: Fetch, event: Event) -> tuple[Fetch, tuple[Effect, ...]]:
    """The next state and what the shell must do.

    Raises:
        LocalProtocolError: a shard arrived that is not missing.
    """
    history = (*state.history, repr(event))[-_MAX_HISTORY:]
    if isinstance(event, Arrived):
        if all(shard.key != event.key for shard in state.missing):
            raise LocalProtocolError(f"shard {event.key!r} arrived but is not missing", history=history)
        here = state.here | {event.key}
        return replace(state, here=here, arrived_in_round=True, history=history), ()
    return _end_round(replace(state, history=history), event.now_s)


def _end_round(state: Fetch, now_s: float) -> tuple[Fetch, tuple[Effect, ...]]:
    if not state.missing:
        return state, (Complete(),)
    # Written so that a deadline which is no number has passed too.
    if not now_s < state.deadline_s:
        return state, (GiveUp(state.missing),)
    pause_s = state.first_pause_s if state.arrived_in_round else state.pause_s
    following_s = min(2 * pause_s, state.longest_pause_s)
    # Never past the deadline: the round after this pause is the last one.
    effect = Pause(min(pause_s, state.deadline_s - now_s))
    return replace(state, arrived_in_round=False, pause_s=following_s), (effect,)
