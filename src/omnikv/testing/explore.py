"""Every way that a vote can go, one after another: a proof by exhaustion that the shipped steps keep their promises.

Theory of operation. A group of simulated ranks runs the shipped `step_leader` and `step_follower`. From a group's state
everything that may happen next is tried, breadth first: a rank casts any ballot of a small alphabet, a message arrives
(in order on its connection, in any order between them), a deadline passes, a rank crashes and its connections end with
or without what it had sent. A rank in doubt leaves, as its group is to be torn down. After "refetch" a rank keeps what
it had and may say anything of what it missed. Two requests may follow one another under one key. States that are the
same but for the names of the followers are visited once. In every state reached must hold:

* no two ranks, dead ones included, end a request differently;
* a ruling on all ballots is the right one, by an oracle of its own; keep stands only on all ballots of its round, equal
  in contents, with every required role; without all ballots there is only drop, after a loss or a deadline;
* no ballot or ruling counts in another round or for another request than its own;
* where nothing more happens by itself, no living rank waits and rank 0's books are closed: so without faults every
  rank learns the right ruling, and after a crash nobody needs its deadline; and each waiting rank's own deadline,
  alone, ends its waiting, whatever has become of the others;
* no step refuses what happens.

The shortest way to what breaks one of these is printed. `python -m omnikv.testing.explore --help` says more.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from omnikv.testing.explore_ballots import Alphabet, wrong_rulings
from omnikv.testing.explore_group import GroupModel, State
from omnikv.testing.explore_search import Visited
from omnikv.testing.mutants import MUTANTS
from omnikv.testing.steps import Steps

ALPHABETS = {
    # One required and one optional role, every word on each, with and without time for another fetch.
    "full": Alphabet(roles=(("cfg_text", False), ("primary", True)), odd_roles=(("primary", True),)),
    "words": Alphabet(roles=(("cfg_text", False), ("primary", True)), can_refetch=(True,)),
    "one role": Alphabet(roles=(("primary", True),)),
    "two roles": Alphabet(roles=(("cfg_text", False), ("primary", True)), words=("A", "missing"), can_refetch=(True,)),
    "small": Alphabet(roles=(("primary", True),), words=("A", "missing", "failed"), can_refetch=(True,)),
    "tiny": Alphabet(roles=(("primary", True),), words=("A", "missing"), can_refetch=(True,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What an exploration covers: ranks, the ballots' alphabet, requests under one key, rounds, and crashes."""

    ranks: int
    alphabet: str
    requests: int = 1
    rounds: int = 2
    crashes: int = 2

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, alphabet {self.alphabet!r}, requests {self.requests}, rounds {self.rounds}, "
            f"crashes {self.crashes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was found: how many states and transitions, and the shortest way to a broken invariant, if there is one."""

    scope: Scope
    states: int
    transitions: int
    violation: str = ""
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.scope}: {self.states} states, {self.transitions} transitions"]
        if self.violation:
            lines += [
                f"BROKEN: {self.violation}",
                *(f"  {number}. {event}" for number, event in enumerate(self.path, 1)),
            ]
        return "\n".join(lines)


# What continuous integration runs.
SCOPES = (
    Scope(ranks=2, alphabet="full", rounds=3),
    Scope(ranks=2, alphabet="one role", requests=2),
    Scope(ranks=3, alphabet="one role"),
    Scope(ranks=3, alphabet="two roles"),
    Scope(ranks=3, alphabet="tiny", requests=2),
    Scope(ranks=4, alphabet="tiny"),
)


def explore(scope: Scope, steps: Steps | None = None) -> Exploration:
    """What an exhaustive exploration of `scope` finds; it ends at the first broken invariant, a nearest one."""
    model = GroupModel(
        ranks=scope.ranks,
        alphabet=ALPHABETS[scope.alphabet],
        requests=scope.requests,
        max_rounds=scope.rounds,
        crashes=scope.crashes,
        steps=steps or Steps(),
    )
    start, _ = model.canonical(model.start)
    visited = Visited.from_start(start)
    transitions = 0
    for number, state in enumerate(visited.states):
        goes_on = False
        for place, edge in enumerate(model.edges(state)):
            transitions += 1
            if edge.broken:
                return _broken(scope, model, visited, transitions, (number, place), (edge.rank, edge.broken))
            goes_on = goes_on or edge.move.is_ordinary
            visited.add(model.canonical(edge.state)[0], number, place)
        rank, words = (0, "") if goes_on else model.stuck(state)
        if words:
            last = visited.parents[number], visited.edges[number]
            return _broken(scope, model, visited, transitions, last, (rank, words))
    return Exploration(scope=scope, states=len(visited.states), transitions=transitions)


def _broken(
    scope: Scope,
    model: GroupModel,
    visited: Visited[State],
    transitions: int,
    last: tuple[int, int],
    violation: tuple[int, str],
) -> Exploration:
    # Sorting moves followers about; what is printed keeps the name that each had in the beginning.
    names = list(range(scope.ranks))
    path = []
    for number, place in visited.way_to(*last):
        edge = model.edges(visited.states[number])[place]
        path.append(f"rank {names[edge.rank]} {model.spell(edge.move, names)}")
        if not edge.broken:
            _, order = model.canonical(edge.state)
            names = [0, *(names[was + 1] for was in order)]
    rank, words = violation
    return Exploration(
        scope=scope,
        states=len(visited.states),
        transitions=transitions,
        violation=words.replace("RANK", f"rank {names[rank]}"),
        path=tuple(path),
    )


def check_rulings(ranks: int, alphabet: str = "full") -> tuple[int, list[str]]:
    """How many combinations of first ballots were ruled on, and every wrong ruling in words."""
    count, wrong = 0, []
    for number, words in wrong_rulings(ranks, ALPHABETS[alphabet]):
        count = number
        if words:
            wrong.append(words)
    return count, wrong


def main(arguments: list[str] | None = None) -> int:
    """0 when every invariant holds, 1 when one is broken; prints what was explored."""
    options = _parser().parse_args(arguments)
    if options.ranks is None:
        scopes: tuple[Scope, ...] = SCOPES
    else:
        scopes = (
            Scope(
                ranks=options.ranks,
                alphabet=options.alphabet,
                requests=options.requests,
                rounds=options.rounds,
                crashes=options.crashes,
            ),
        )
    steps = MUTANTS[options.mutant] if options.mutant else Steps()
    started_s = time.monotonic()
    is_sound = True
    for scope in scopes:
        found = explore(scope, steps)
        is_sound = is_sound and not found.violation
        sys.stdout.write(f"{found}\n")
    for ranks in sorted({scope.ranks for scope in scopes}):
        alphabet = "full" if ranks <= 3 else "words"
        count, wrong = check_rulings(ranks, alphabet)
        is_sound = is_sound and not wrong
        sys.stdout.write(f"{ranks} ranks, alphabet {alphabet!r}: {count} sets of ballots, {len(wrong)} wrong rulings\n")
        sys.stdout.writelines(f"  {words}\n" for words in wrong[:1])
    sys.stdout.write(f"{'every invariant holds' if is_sound else 'BROKEN'}; {time.monotonic() - started_s:.1f} s\n")
    return 0 if is_sound else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m omnikv.testing.explore",
        description="Explores every way that a vote can go. Without --ranks: the set that is run on every change.",
    )
    parser.add_argument("--ranks", type=int, help="explore one scope, with this many ranks")
    parser.add_argument(
        "--alphabet", choices=sorted(ALPHABETS), default="tiny", help="which ballots may be cast; %(default)s"
    )
    parser.add_argument("--requests", type=int, default=1, help="requests one after another under one key; %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of fetching a request; %(default)s")
    parser.add_argument("--crashes", type=int, default=2, help="ranks that may crash; %(default)s")
    parser.add_argument(
        "--mutant", choices=sorted(MUTANTS), help="explore these broken steps instead of the shipped ones"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
