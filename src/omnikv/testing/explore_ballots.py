"""What ranks may vote in an exploration, and what the right ruling on it is.

The oracle here is written from the words of the protocol, apart from `omnikv.core.verdict`, so that the two can be held
against each other on every combination of ballots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omnikv.core.messages import Ballot, RoleBallot, read_facts, spell_facts
from omnikv.core.verdict import MAX_ROUNDS, rule

# Letters stand for facts: two ranks that hold "A" and "B" hold different contents.
WORDS = ("A", "B", "missing", "failed")

# What a ruling decides, without its explanations: kind, usable roles, missing (rank, role) pairs.
Decision = tuple[str, tuple[str, ...], tuple[tuple[int, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphabet:
    """What a rank may say: a word for each role, whether it has time for another fetch, and whole odd ballots."""

    roles: tuple[tuple[str, bool], ...]
    words: tuple[str, ...] = WORDS
    can_refetch: tuple[bool, ...] = (True, False)
    # Ballots on other roles than these, as of a rank that was configured differently.
    odd_roles: tuple[tuple[str, bool], ...] = ()

    def first(self, *, is_last_round: bool) -> list[Ballot]:
        """Every ballot that a rank may cast in a request's first round."""
        choices = [[_entry(role, required, word) for word in self.words] for role, required in self.roles]
        ballots = self._ballots(0, choices, is_last_round)
        if self.odd_roles:
            odd = [[_entry(role, required, "A")] for role, required in self.odd_roles]
            ballots += self._ballots(0, odd, is_last_round)
        return ballots

    def following(self, held: Ballot, number: int, *, is_last_round: bool) -> list[Ballot]:
        """Every ballot of round `number` that agrees with what its rank held: only what was missing may change."""
        choices = [
            [_entry(entry.role, entry.required, word) for word in self.words]
            if entry.standing == "missing"
            else [entry]
            for entry in held.roles
        ]
        return self._ballots(number, choices, is_last_round)

    def _ballots(self, number: int, choices: list[list[RoleBallot]], is_last_round: bool) -> list[Ballot]:
        times = (False,) if is_last_round else self.can_refetch
        return [Ballot(number, time, entries) for time in times for entries in itertools.product(*choices)]


def _entry(role: str, required: bool, word: str) -> RoleBallot:
    if word == "missing":
        return RoleBallot(role, "missing", required, cause="nothing yet")
    if word == "failed":
        return RoleBallot(role, "failed", required, cause="its sender failed")
    return RoleBallot(role, "have", required, facts=spell_facts({"content": word}))


def right_decision(ballots: Sequence[Ballot]) -> Decision:
    """What the protocol's words demand for one round's ballots, in rank order."""
    number = ballots[0].round
    if any(_declared(ballot) != _declared(ballots[0]) for ballot in ballots):
        return "drop", (), ()
    roles = dict(_declared(ballots[0]))
    said = {(rank, entry.role): entry for rank, ballot in enumerate(ballots) for entry in ballot.roles}
    complete, hopeless, wanted = set(), set(), set()
    for role in roles:
        entries = [said[rank, role] for rank in range(len(ballots))]
        contents = {entry.facts for entry in entries if entry.standing == "have"}
        standings = {entry.standing for entry in entries}
        if "failed" in standings or len(contents) > 1:
            hopeless.add(role)
        elif standings == {"have"}:
            complete.add(role)
        else:
            wanted.add(role)
    required = {role for role in roles if roles[role]}
    if required & hopeless:
        return "drop", (), ()
    has_time = number < MAX_ROUNDS - 1 and all(ballot.can_refetch for ballot in ballots)
    if wanted and has_time:
        return "refetch", (), tuple(sorted(key for key in said if key[1] in wanted and said[key].standing == "missing"))
    if required - complete:
        return "drop", (), ()
    return "keep", tuple(sorted(complete)), ()


def is_sound_to_keep(ballots: Sequence[Ballot | None], usable: Sequence[str]) -> bool:
    """Whether every rank voted, holds each usable role with the same contents, and no required role is left out."""
    for ballot in ballots:
        if ballot is None:
            return False
        if any(entry.required and entry.role not in usable for entry in ballot.roles):
            return False
        if any(entry.role in usable and entry.standing != "have" for entry in ballot.roles):
            return False
    contents = {
        tuple((entry.role, entry.facts) for entry in ballot.roles if entry.role in usable)
        for ballot in ballots
        if ballot is not None
    }
    return len(contents) == 1


def wrong_rulings(ranks: int, alphabet: Alphabet) -> Iterator[tuple[int, str]]:
    """For every combination of first ballots of `ranks` ranks: its number, and what is wrong with its ruling."""
    ballots = alphabet.first(is_last_round=False)
    others = itertools.combinations_with_replacement(ballots, ranks - 1)
    for number, (follower_ballots, leader_ballot) in enumerate(itertools.product(others, ballots), start=1):
        cast = (leader_ballot, *follower_ballots)
        ruling, right = rule(cast), right_decision(cast)
        got = (ruling.kind, ruling.usable, ruling.missing)
        is_sound = ruling.kind != "keep" or is_sound_to_keep(cast, ruling.usable)
        wrong = "" if got == right and is_sound else f"{spell_ballots(cast)}: ruled {got}, right is {right}"
        yield number, wrong


def _declared(ballot: Ballot) -> tuple[tuple[str, bool], ...]:
    return tuple((entry.role, entry.required) for entry in ballot.roles)


def spell_ballot(ballot: Ballot) -> str:
    """A ballot in a few words: "round 0: primary=A cfg_text=missing, has time"."""
    words = " ".join(
        f"{entry.role}={read_facts(entry.facts)['content'] if entry.standing == 'have' else entry.standing}"
        for entry in ballot.roles
    )
    return f"round {ballot.round}: {words}, {'has time' if ballot.can_refetch else 'no time left'}"


def spell_ballots(ballots: Sequence[Ballot]) -> str:
    """Ballots in rank order, in a few words each."""
    return "; ".join(f"rank {rank} {spell_ballot(ballot)}" for rank, ballot in enumerate(ballots))
