"""The states that an exploration has reached, and the shortest way to each."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)


@dataclass(slots=True)
class Visited(Generic[State]):
    """The states reached so far in the order of discovery, each with the state and edge that first led to it."""

    states: list[State]
    numbers: dict[State, int]
    parents: array[int] = field(default_factory=lambda: array("q", [-1]))
    edges: array[int] = field(default_factory=lambda: array("q", [-1]))

    @classmethod
    def from_start(cls, start: State) -> Visited[State]:
        """Only the first state."""
        return cls([start], {start: 0})

    def add(self, state: State, parent: int, edge: int) -> None:
        """Nothing; `state` is reached from state number `parent` by its `edge`, for the first time perhaps."""
        if state not in self.numbers:
            self.numbers[state] = len(self.states)
            self.states.append(state)
            self.parents.append(parent)
            self.edges.append(edge)

    def way_to(self, number: int, edge: int) -> list[tuple[int, int]]:
        """Each (state number, edge) from the start to `edge` of state `number`, on a shortest way."""
        steps = []
        while number >= 0:
            steps.append((number, edge))
            number, edge = self.parents[number], self.edges[number]
        return steps[::-1]
