"""What an exploration writes on its messages, its moves, and the small numbers that stand for values seen before."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from omnikv.core.messages import Ballot, Ruling
from omnikv.testing.explore_ballots import Alphabet

NOTHING = -1

Value = TypeVar("Value", bound=Hashable)


class Numbers(Generic[Value]):
    """Gives each different value a number, and the value back for it: comparing and hashing numbers is cheap."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}
        self.values: list[Value] = []

    def of(self, value: Value) -> int:
        """The number of `value`, the same for equal values."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class Message(NamedTuple):
    """A ballot or ruling under way. Where it belongs is known to the exploration alone: no step reads it."""

    request: int
    nth_round: int
    content: int


class Decided(NamedTuple):
    """A rank's caller was told the end of a request."""

    request: int
    kind: str
    usable: tuple[str, ...]


class Move(NamedTuple):
    """One thing that may happen at a rank: what it is, the rank's number afterwards, and what others see of it.

    `is_ordinary` marks what happens sooner or later by itself; a crash and a deadline may also not happen. `broken`
    says which invariant this move violates. `sends` go from the leader to followers, by position.
    """

    words: tuple[str, int]
    record: int
    is_ordinary: bool = True
    is_crash: bool = False
    decided: Decided | None = None
    sends: tuple[tuple[int, Message], ...] = ()
    broken: str = ""
    # The position of the peer whose ballot arrived.
    about: int = 0


class Vocabulary:
    """The ballots and rulings of one exploration by number, and what a rank may cast next."""

    def __init__(self, alphabet: Alphabet, max_rounds: int) -> None:
        self.ballots: Numbers[Ballot] = Numbers()
        self.rulings: Numbers[Ruling] = Numbers()
        self._alphabet = alphabet
        self._max_rounds = max_rounds
        self._choices: dict[tuple[int, int], tuple[int, ...]] = {}

    def choices(self, held: int, number: int, nth_round: int) -> tuple[int, ...]:
        """The ballots of round `number` that a rank may cast which held `held` (`NOTHING` in the first round)."""
        found = self._choices.get((held, number))
        if found is None:
            is_last_round = nth_round + 1 >= self._max_rounds
            if held == NOTHING:
                ballots = self._alphabet.first(is_last_round=is_last_round)
            else:
                ballots = self._alphabet.following(self.ballots.values[held], number, is_last_round=is_last_round)
            found = self._choices[held, number] = tuple(self.ballots.of(ballot) for ballot in ballots)
        return found


def without_words(ruling: Ruling) -> Ruling:
    """The ruling less its explanations, which no step reads: states that differ in them alone are one state."""
    return Ruling(ruling.kind, ruling.round, usable=ruling.usable)
