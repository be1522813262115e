"""A whole group in an exploration: all ranks together, every thing that may happen next, and what must never be.

Ranks other than 0 are interchangeable, so a group is kept with its followers in a fixed order of what they are and of
what rank 0 knows of them; groups that differ in names alone are one state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from omnikv.testing.explore_ballots import Alphabet, spell_ballot
from omnikv.testing.explore_follower import DEAD, Followers
from omnikv.testing.explore_leader import Leaders
from omnikv.testing.explore_messages import NOTHING, Decided, Move, Numbers, Vocabulary
from omnikv.testing.steps import Steps

# The number of rank 0's record, of what was decided, how many crashes may still come, then the followers' numbers.
State = tuple[int, ...]
_FIXED = 3


class Edge(NamedTuple):
    """One thing that may happen in a group: at which rank of the state it leaves, and the state it leads to.

    The followers of `state` are not yet in their fixed order.
    """

    rank: int
    move: Move
    state: State
    broken: str


class GroupModel:
    """The states and moves of one group, given its size, its ballots, and how many requests, rounds and crashes."""

    def __init__(
        self, *, ranks: int, alphabet: Alphabet, requests: int, max_rounds: int, crashes: int, steps: Steps
    ) -> None:
        self._vocabulary = Vocabulary(alphabet, max_rounds)
        self._leaders = Leaders(steps, self._vocabulary, ranks, requests)
        self._followers = Followers(steps, self._vocabulary, requests)
        self._decided: Numbers[tuple[Decided | None, ...]] = Numbers()
        self._in_order = tuple(range(ranks - 1))
        nothing = self._decided.of((None,) * requests)
        self.start: State = (self._leaders.start, nothing, crashes, *(self._followers.start,) * (ranks - 1))

    def canonical(self, state: State) -> tuple[State, tuple[int, ...]]:
        """The state with its followers in order, and where each of them was."""
        views = self._leaders.views(state[0])
        keys = list(zip(state[_FIXED:], views, strict=True))
        if keys == sorted(keys):
            return state, self._in_order
        order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
        leader = self._leaders.permuted(state[0], order)
        return (leader, *state[1:_FIXED], *(state[_FIXED + was] for was in order)), order

    def edges(self, state: State) -> list[Edge]:
        """Everything that may happen next."""
        leader, _, crashes_left = state[:_FIXED]
        alive = leader != self._leaders.dead
        edges = [
            self._leader_edge(state, move, state)
            for move in self._leaders.moves(leader)
            if crashes_left or not move.is_crash
        ]
        for place in range(_FIXED, len(state)):
            number = state[place]
            edges += [
                self._follower_edge(state, place, move)
                for move in self._followers.moves(number, alive)
                if crashes_left or not move.is_crash
            ]
            if alive:
                edges += self._arrivals(state, place)
        return edges

    def stuck(self, state: State) -> tuple[int, str]:
        """At which rank, by its place, and what is wrong where nothing more happens by itself; empty if nothing is."""
        if self._leaders.is_waiting(state[0]):
            return 0, "RANK waits although nothing more comes"
        for rank, number in enumerate(state[_FIXED:], start=1):
            if self._followers.is_waiting(number):
                return rank, "RANK waits although nothing more comes"
        if self._leaders.rank(state[0]).book:
            return 0, "every request is over, but the books of RANK are not closed"
        return 0, ""

    def spell(self, move: Move, names: Sequence[int]) -> str:
        """A move in words; `names` are the ranks by their places in the state that it leaves."""
        verb, content = move.words
        if content == NOTHING:
            return verb
        if verb == "casts" or "ballot" in verb:
            verb = verb.replace("RANK", f"rank {names[move.about]}")
            return f"{verb} {spell_ballot(self._vocabulary.ballots.values[content])}"
        if verb == "hears":
            ruling = self._vocabulary.rulings.values[content]
            return f"hears the ruling of round {ruling.round}: {ruling.kind} {' '.join(ruling.usable)}".rstrip()
        return f"{verb} {names[content]}"

    def _arrivals(self, state: State, place: int) -> list[Edge]:
        follower, position = self._followers.rank(state[place]), place - _FIXED + 1
        edges = []
        if follower.up:
            move = self._leaders.hear(state[0], position, follower.up[0])
            edges.append(self._leader_edge(state, move, _with(state, place, self._followers.popped(state[place]))))
        if follower.status == DEAD:
            # What it had sent may arrive first, all of it or a part; the end of the connection loses the rest.
            move = self._leaders.lose(state[0], position)
            edges.append(self._leader_edge(state, move, _with(state, place, self._followers.gone)))
        return edges

    def _leader_edge(self, state: State, move: Move, after: State) -> Edge:
        followers = list(after[_FIXED:])
        for rank, message in move.sends:
            followers[rank - 1] = self._followers.pushed(followers[rank - 1], message)
        if move.is_crash:
            followers = [self._followers.orphaned(number) for number in followers]
        decided, broken = self._decide(state[1], move)
        return Edge(0, move, (move.record, decided, state[2] - move.is_crash, *followers), move.broken or broken)

    def _follower_edge(self, state: State, place: int, move: Move) -> Edge:
        rank = place - _FIXED + 1
        decided, broken = self._decide(state[1], move)
        after = (state[0], decided, state[2] - move.is_crash, *state[_FIXED:])
        return Edge(rank, move, _with(after, place, move.record), move.broken or broken)

    def _decide(self, number: int, move: Move) -> tuple[int, str]:
        if move.decided is None:
            return number, ""
        request, known = move.decided.request, list(self._decided.values[number])
        other = known[request]
        if other is not None and other != move.decided:
            mine, theirs = _spell_decided(move.decided), _spell_decided(other)
            return number, f"RANK ends request {request} with {mine}, another rank with {theirs}"
        known[request] = move.decided
        return self._decided.of(tuple(known)), ""


def _with(state: State, place: int, number: int) -> State:
    return (*state[:place], number, *state[place + 1 :])


def _spell_decided(decided: Decided) -> str:
    return f"{decided.kind} {' '.join(decided.usable)}".strip()
