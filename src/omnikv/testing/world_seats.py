"""A rank's seat in the votes of a simulated group: it keeps the steps of each request and passes on what they say.

A seat does what a channel does and nothing more: it finds the request that a message belongs to, by key and order, and
forgets requests that are over. What it tells its caller must not call back into it at once.
"""

from __future__ import annotations

from collections.abc import Callable

from omnikv.core.messages import Ballot, Ruling
from omnikv.core.vote import (
    Announce,
    Cast,
    Conclude,
    Doubt,
    Event,
    Expired,
    FollowerState,
    Heard,
    LeaderState,
    Lost,
    Report,
    Ruled,
)
from omnikv.testing.steps import Steps

Tell = Callable[[str, Ruling | str], None]


class LeaderSeat:
    """The seat of rank 0. `send(rank, key, ruling)` carries a ruling; `tell(key, ruling)` gives one to its caller."""

    def __init__(self, size: int, steps: Steps, *, send: Callable[[int, str, Ruling], None], tell: Tell) -> None:
        self.books: dict[str, list[LeaderState]] = {}
        self._size = size
        self._steps = steps
        self._send = send
        self._tell = tell
        self._lost: list[int] = []

    def cast(self, key: str, ballot: Ballot) -> None:
        """Nothing; rank 0 votes."""
        states = self.books.get(key, [])
        mine = (index for index, state in enumerate(states) if state.final is None and not _has_voted(state))
        self._step(key, next(mine, None), Cast(ballot))

    def hear(self, rank: int, key: str, ballot: Ballot) -> None:
        """Nothing; a follower's ballot arrived."""
        self._step(key, self._steps.ballot_goes_to(self.books.get(key, []), rank), Heard(rank, ballot))

    def expire(self, key: str) -> None:
        """Nothing; the deadline of the request that rank 0 has voted on passed."""
        for index, state in enumerate(self.books.get(key, [])):
            if state.final is None and _has_voted(state):
                self._step(key, index, Expired())
                return

    def lose(self, rank: int) -> None:
        """Nothing; the connection to a follower ended."""
        self._lost.append(rank)
        for key in list(self.books):
            # Newest first: those that are over leave the list.
            for index in reversed(range(len(self.books[key]))):
                self._step(key, index, Lost(rank, "gone"))

    def _step(self, key: str, index: int | None, event: Event) -> None:
        states = self.books.setdefault(key, [])
        if index is None:
            index = len(states)
            states.append(self._fresh())
        states[index], effects = self._steps.leader(states[index], event)
        if states[index].is_over:
            del states[index]
        if not states:
            del self.books[key]
        for effect in effects:
            if isinstance(effect, Announce):
                for rank in effect.ranks:
                    self._send(rank, key, effect.ruling)
            elif isinstance(effect, Conclude):
                self._tell(key, effect.ruling)

    def _fresh(self) -> LeaderState:
        state = LeaderState(size=self._size)
        for rank in self._lost:
            state, _ = self._steps.leader(state, Lost(rank, "gone"))
        return state


class FollowerSeat:
    """The seat of another rank. `send(key, ballot)` carries a ballot; `tell(key, answer)` gives a ruling or a doubt."""

    def __init__(self, rank: int, steps: Steps, *, send: Callable[[str, Ballot], None], tell: Tell) -> None:
        self.books: dict[str, list[FollowerState]] = {}
        self._rank = rank
        self._steps = steps
        self._send = send
        self._tell = tell
        self._leader_is_lost = False
        self._is_in_doubt = False

    def cast(self, key: str, ballot: Ballot) -> None:
        """Nothing; this rank votes."""
        states = self.books.get(key, [])
        mine = (index for index, state in enumerate(states) if state.phase == "fetching")
        self._step(key, next(mine, None), Cast(ballot))

    def hear(self, key: str, ruling: Ruling) -> None:
        """Nothing; a ruling arrived."""
        index = self._steps.ruling_goes_to(self.books.get(key, []))
        if index is None and self._is_in_doubt:
            # The answer to a vote that was given up; this rank is about to leave.
            return
        self._step(key, index, Ruled(ruling))

    def expire(self, key: str) -> None:
        """Nothing; the deadline of the request that this rank has voted on passed."""
        for index, state in enumerate(self.books.get(key, [])):
            if state.phase == "voted":
                self._step(key, index, Expired())
                return

    def lose(self) -> None:
        """Nothing; the connection to rank 0 ended."""
        self._leader_is_lost = True
        for key in list(self.books):
            for index in reversed(range(len(self.books[key]))):
                self._step(key, index, Lost(0, "gone"))

    def _step(self, key: str, index: int | None, event: Event) -> None:
        states = self.books.setdefault(key, [])
        if index is None:
            index = len(states)
            states.append(self._fresh())
        states[index], effects = self._steps.follower(states[index], event)
        if states[index].is_over:
            del states[index]
        if not states:
            del self.books[key]
        for effect in effects:
            if isinstance(effect, Report):
                self._send(key, effect.ballot)
            elif isinstance(effect, Conclude):
                self._tell(key, effect.ruling)
            elif isinstance(effect, Doubt):
                self._is_in_doubt = True
                self._tell(key, effect.cause)

    def _fresh(self) -> FollowerState:
        state = FollowerState(rank=self._rank)
        return self._steps.follower(state, Lost(0, "gone"))[0] if self._leader_is_lost else state


def _has_voted(state: LeaderState) -> bool:
    return bool(state.ballots) and state.ballots[0] is not None
