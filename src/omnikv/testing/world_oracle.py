"""What must be true of a simulated world once nothing more happens in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omnikv.core.messages import Ballot
from omnikv.testing.explore_ballots import is_sound_to_keep, right_decision
from omnikv.testing.world_payloads import Payloads, spell_part

Ballots = Mapping[tuple[str, int, int], Mapping[int, Ballot]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one try of a request ended at one rank, and how much later than it had to (negative: earlier)."""

    rank: int
    key: str
    use: int
    round: int
    branch: str
    usable: tuple[str, ...]
    late_s: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {' '.join((self.branch, *self.usable))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """Everything the oracle looks at. `states` are the ranks' ("live", "stopped", ...), `open_runs` what each left."""

    endings: Sequence[Ending]
    ballots: Ballots
    payloads: Payloads
    states: Sequence[str]
    had_rank_fault: bool
    open_runs: Mapping[int, Sequence[str]]
    open_books: Sequence[str]


def judge(after: Aftermath) -> list[str]:
    """What is wrong with how a world ended; nothing if all is well."""
    return [
        *_ways(after),
        *_rulings(after),
        *_waiting(after),
        *_leases(after),
    ]


def _ways(after: Aftermath) -> Iterator[str]:
    tries: dict[tuple[str, int], list[Ending]] = {}
    for ending in after.endings:
        tries.setdefault((ending.key, ending.use), []).append(ending)
    for (key, use), endings in tries.items():
        known = [ending for ending in endings if ending.branch != "doubt"]
        if len({(ending.branch, ending.usable) for ending in known}) > 1:
            yield f"{key} (try {use}) went different ways: {'; '.join(map(str, known))}"
        if not after.had_rank_fault:
            yield from (f"{key} (try {use}) is in doubt without cause: {one}" for one in endings if one not in known)


def _rulings(after: Aftermath) -> Iterator[str]:
    for ending in after.endings:
        cast = after.ballots.get((ending.key, ending.use, ending.round), {})
        ballots = [cast.get(rank) for rank in range(len(after.states))]
        if ending.branch == "keep" and not is_sound_to_keep(ballots, ending.usable):
            yield f"{ending.key} (try {ending.use}) was kept by {ending}, which its ballots do not allow"
        if ending.branch == "drop" and not after.had_rank_fault:
            known = [ballot for ballot in ballots if ballot is not None]
            if len(known) < len(ballots) or right_decision(known)[0] != "drop":
                yield f"{ending.key} (try {ending.use}) was dropped by {ending}, which its ballots do not demand"


def _waiting(after: Aftermath) -> Iterator[str]:
    for ending in after.endings:
        if ending.late_s > 1e-6:
            yield f"{ending.key} (try {ending.use}) ended {ending.late_s:.3f} s too late at {ending}"
    for rank, keys in after.open_runs.items():
        if keys and after.states[rank] == "live":
            yield f"rank {rank} never ended {', '.join(keys)}"
    if after.states[0] == "live" and "stopped" not in after.states and after.open_books:
        yield f"the books of rank 0 are still open on {', '.join(after.open_books)}"


def _leases(after: Aftermath) -> Iterator[str]:
    for part in after.payloads.still_leased():
        if after.states[part.rank] != "stopped":
            yield f"the lease on {spell_part(part)} never came back"
    kept = {(ending.rank, ending.key, role) for ending in after.endings for role in ending.usable}
    for part in after.payloads.acknowledged():
        if (part.rank, part.key, part.role) not in kept:
            yield f"{spell_part(part)} was consumed without being kept"
