"""The vote as one bundle that may be swapped: the shipped steps, and who gets a message when a key is used again.

Several requests may follow one another under one key. Each rank votes exactly once in every round, and runs requests of
one key one after another, so nothing but order is needed to tell them apart: a leader gives an arriving ballot to the
oldest request of that key which still expects one of that rank, and a follower gives an arriving ruling to the oldest
request which has not been told its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnikv.core.vote import Effect, Event, FollowerState, LeaderState, step_follower, step_leader

LeaderStep = Callable[[LeaderState, Event], tuple[LeaderState, tuple[Effect, ...]]]
FollowerStep = Callable[[FollowerState, Event], tuple[FollowerState, tuple[Effect, ...]]]


def oldest_expecting_ballot(states: Sequence[LeaderState], rank: int) -> int | None:
    """Which of a key's open requests, oldest first, gets a ballot of `rank`; None opens a new one."""
    return next((index for index, state in enumerate(states) if state.expects(rank)), None)


def oldest_expecting_ruling(states: Sequence[FollowerState]) -> int | None:
    """Which of a key's open requests, oldest first, gets a ruling; None opens a new one."""
    return next((index for index, state in enumerate(states) if state.early is None and not state.is_over), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What an exploration or a simulated world runs: by default what omnikv ships; see `omnikv.testing.mutants`."""

    leader: LeaderStep = step_leader
    follower: FollowerStep = step_follower
    ballot_goes_to: Callable[[Sequence[LeaderState], int], int | None] = oldest_expecting_ballot
    ruling_goes_to: Callable[[Sequence[FollowerState]], int | None] = oldest_expecting_ruling
