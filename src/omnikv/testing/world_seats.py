"""A rank's seat in the votes of a simulated group: it keeps the steps of each request and passes on what they say.

A seat does what a channel does and nothing more: it finds the request that a message belongs to, by key and order, and
forgets requests that are over. What it tells its caller must not call back into it at once. A channel of somebody's own
can sit in a world too: `Seats` makes both kinds of seat for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

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

# Gives a rank's caller what it asked for: a ruling, or, as a text, why it cannot be learnt.
Tell = Callable[[str, Ruling | str], None]


class Seat(Protocol):
    """A rank's seat: its caller votes and runs out of time. `open_keys` are the requests that it has not forgotten."""

    def cast(self, key: str, ballot: Ballot) -> None: ...
    def expire(self, key: str) -> None: ...
    def open_keys(self) -> Collection[str]: ...


class AnyLeaderSeat(Seat, Protocol):
    """A seat at rank 0: a follower's message arrives, or its connection ends."""

    def hear(self, rank: int, message: Any) -> None: ...
    def lose(self, rank: int) -> None: ...


class AnyFollowerSeat(Seat, Protocol):
    """A seat at another rank: a message of rank 0 arrives, or the connection to it ends."""

    def hear(self, message: Any) -> None: ...
    def lose(self) -> None: ...


class Seats(Protocol):
    """Makes the seats of a group. `send` carries a message, whatever it is, to `rank` or to rank 0."""

    def leader(self, size: int, *, send: Callable[[int, Any], None], tell: Tell) -> AnyLeaderSeat: ...
    def follower(self, rank: int, *, send: Callable[[Any], None], tell: Tell) -> AnyFollowerSeat: ...


class SteppedSeats:
    """Seats that run the given steps, by default the shipped ones."""

    def __init__(self, steps: Steps | None = None) -> None:
        self._steps = steps or Steps()

    def leader(self, size: int, *, send: Callable[[int, Any], None], tell: Tell) -> AnyLeaderSeat:
        """The seat of rank 0."""
        return LeaderSeat(size, self._steps, send=send, tell=tell)

    def follower(self, rank: int, *, send: Callable[[Any], None], tell: Tell) -> AnyFollowerSeat:
        """The seat of another rank."""
        return FollowerSeat(rank, self._steps, send=send, tell=tell)


class LeaderSeat:
    """The seat of rank 0; its messages are (key, ruling) pairs."""

    def __init__(self, size: int, steps: Steps, *, send: Callable[[int, tuple[str, Ruling]], None], tell: Tell) -> None:
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

    def open_keys(self) -> list[str]:
        """The keys with requests whose books are not closed."""
        return list(self.books)

    def hear(self, rank: int, message: tuple[str, Ballot]) -> None:
        """Nothing; a follower's ballot arrived."""
        key, ballot = message
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
                    self._send(rank, (key, effect.ruling))
            elif isinstance(effect, Conclude):
                self._tell(key, effect.ruling)

    def _fresh(self) -> LeaderState:
        state = LeaderState(size=self._size)
        for rank in self._lost:
            state, _ = self._steps.leader(state, Lost(rank, "gone"))
        return state


class FollowerSeat:
    """The seat of another rank; its messages are (key, ballot) pairs."""

    def __init__(self, rank: int, steps: Steps, *, send: Callable[[tuple[str, Ballot]], None], tell: Tell) -> None:
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

    def open_keys(self) -> list[str]:
        """The keys with requests that are not over."""
        return list(self.books)

    def hear(self, message: tuple[str, Ruling]) -> None:
        """Nothing; a ruling arrived."""
        key, ruling = message
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
                self._send((key, effect.ballot))
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
