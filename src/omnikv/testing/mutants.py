"""Broken variants of the vote, each a mistake that real implementations made: an exploration must catch every one.

They are shipped so that whoever changes the steps, or writes a channel of their own, can see that the checks bite:
`python -m omnikv.testing.explore --mutant NAME` prints the shortest way to the harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omnikv.core.messages import Ballot, Ruling
from omnikv.core.verdict import rule
from omnikv.core.vote import (
    Announce,
    Cast,
    Conclude,
    Doubt,
    Effect,
    Event,
    Expired,
    FollowerState,
    Heard,
    LeaderState,
    Report,
    step_follower,
    step_leader,
)
from omnikv.testing.steps import Steps, oldest_expecting_ballot

LeaderOutcome = tuple[LeaderState, tuple[Effect, ...]]
FollowerOutcome = tuple[FollowerState, tuple[Effect, ...]]


def _drop_at_deadline(state: FollowerState, event: Event) -> FollowerOutcome:
    after, effects = step_follower(state, event)
    if isinstance(event, Expired):
        return after, (Conclude(Ruling("drop", state.round)),)
    return after, effects


def _ignore_leader_deadline(state: LeaderState, event: Event) -> LeaderOutcome:
    return (state, ()) if isinstance(event, Expired) else step_leader(state, event)


def _ignore_follower_deadline(state: FollowerState, event: Event) -> FollowerOutcome:
    return (state, ()) if isinstance(event, Expired) else step_follower(state, event)


def _keep_early(state: LeaderState, event: Event) -> LeaderOutcome:
    after, effects = step_leader(state, event)
    ballots = [ballot for ballot in after.ballots if ballot is not None]
    if after.final is not None or effects or not ballots or after.ballots[0] is None or len(ballots) < state.size - 1:
        return after, effects
    ruling = rule(ballots)
    if ruling.kind != "keep":
        return after, effects
    unheard = frozenset(rank for rank, ballot in enumerate(after.ballots) if ballot is None)
    return replace(after, final=ruling, owing=unheard), (
        Announce(tuple(range(1, state.size)), ruling),
        Conclude(ruling),
    )


def _compare_names_alone(state: LeaderState, event: Event) -> LeaderOutcome:
    after, effects = step_leader(state, event)
    ballots = [*(state.ballots or (None,) * state.size)]
    if after.final is None or after.final.kind != "drop" or not isinstance(event, Cast | Heard):
        return after, effects
    ballots[event.rank if isinstance(event, Heard) else 0] = event.ballot
    if any(ballot is None or any(entry.standing != "have" for entry in ballot.roles) for ballot in ballots):
        return after, effects
    ruling = Ruling("keep", state.round, usable=tuple(entry.role for entry in event.ballot.roles))
    return replace(after, final=ruling), (Announce(tuple(range(1, state.size)), ruling), Conclude(ruling))


def _answer_first_mismatch(state: LeaderState, event: Event) -> LeaderOutcome:
    after, effects = step_leader(state, event)
    ruling = next((effect.ruling for effect in effects if isinstance(effect, Conclude)), None)
    if ruling is None or ruling.kind == "keep" or not isinstance(event, Cast | Heard):
        return after, effects
    differing = next((rank for rank, _, _ in ruling.causes if rank > 0), 0)
    return after, (Announce((differing,) if differing else (), ruling), Conclude(ruling))


def _skip_vote_on_error(state: FollowerState, event: Event) -> FollowerOutcome:
    after, effects = step_follower(state, event)
    if isinstance(event, Cast) and _has_failed(event.ballot):
        silent = tuple(effect for effect in effects if not isinstance(effect, Report | Conclude | Doubt))
        return replace(after, phase="over"), (*silent, Conclude(Ruling("drop", state.round)))
    return after, effects


def _has_failed(ballot: Ballot) -> bool:
    return any(entry.standing == "failed" for entry in ballot.roles)


def _count_late_ballot_for_next(states: Sequence[LeaderState], rank: int) -> int | None:
    undecided = [index for index, state in enumerate(states) if state.final is None]
    found = oldest_expecting_ballot([states[index] for index in undecided], rank)
    return None if found is None else undecided[found]


def _take_ruling_for_newest(states: Sequence[FollowerState]) -> int | None:
    return len(states) - 1 if states else None


def _forget_owed_ballots(state: LeaderState, event: Event) -> LeaderOutcome:
    after, effects = step_leader(state, event)
    return replace(after, owing=frozenset()), effects


def _refetch_in_same_round_at_leader(state: LeaderState, event: Event) -> LeaderOutcome:
    after, effects = step_leader(state, event)
    return replace(after, round=state.round), effects


def _refetch_in_same_round_at_follower(state: FollowerState, event: Event) -> FollowerOutcome:
    after, effects = step_follower(state, event)
    return replace(after, round=state.round), effects


def _keep_old_ballots_in_refetch(state: LeaderState, event: Event) -> LeaderOutcome:
    after, effects = step_leader(state, event)
    if after.round == state.round or not isinstance(event, Cast | Heard):
        return after, effects
    cast = list(state.ballots or (None,) * state.size)
    cast[event.rank if isinstance(event, Heard) else 0] = event.ballot
    lacking = {rank for effect in effects if isinstance(effect, Conclude) for rank, _ in effect.ruling.missing}
    kept = [
        None if ballot is None or rank in lacking else Ballot(after.round, ballot.can_refetch, ballot.roles)
        for rank, ballot in enumerate(cast)
    ]
    return replace(after, ballots=(None, *kept[1:])), effects


MUTANTS = {
    "timeout-means-drop": Steps(follower=_drop_at_deadline),
    "no-deadline-at-leader": Steps(leader=_ignore_leader_deadline),
    "no-deadline-at-follower": Steps(follower=_ignore_follower_deadline),
    "early-keep": Steps(leader=_keep_early),
    "names-compared-alone": Steps(leader=_compare_names_alone),
    "first-mismatch-return": Steps(leader=_answer_first_mismatch),
    "vote-skipped-on-error": Steps(follower=_skip_vote_on_error),
    "late-ballot-counts-for-next": Steps(ballot_goes_to=_count_late_ballot_for_next),
    "owed-ballot-forgotten": Steps(leader=_forget_owed_ballots),
    "old-ruling-for-next": Steps(ruling_goes_to=_take_ruling_for_newest),
    "refetch-in-same-round": Steps(
        leader=_refetch_in_same_round_at_leader, follower=_refetch_in_same_round_at_follower
    ),
    "refetch-with-old-ballots": Steps(leader=_keep_old_ballots_in_refetch),
}
