"""What a group decides about one request's KV in one round: ballots in, one ruling out, from the ballots alone.

`omnikv.core.vote` says how ballots and rulings travel; a group that shows every ballot to every rank may also let each
rank rule for itself, since all come to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnikv.core.messages import Ballot, RoleBallot, Ruling, read_facts
from omnikv.errors import LocalProtocolError

# A ruling about a rank as a whole, not about one of its roles.
WHOLE_RANK = ""
# More rounds than any deadline leaves room for: a bound that makes every run finite.
MAX_ROUNDS = 1024
_DIFFERS = "differs: "


def rule(ballots: Sequence[Ballot]) -> Ruling:
    """The ruling on one round's ballots, given in rank order; it depends on nothing else.

    A role is usable when every rank has it with the same facts. What some ranks still miss, and no sender has failed,
    is fetched again while every rank has time. Without time, a required role that is not usable drops the request, and
    an optional one is left out on every rank; one that no rank has is the same state everywhere, and left out as well.

    Raises:
        LocalProtocolError: no ballots, or ballots of different rounds.
    """
    rounds = {ballot.round for ballot in ballots}
    if len(rounds) != 1:
        raise LocalProtocolError(f"a ruling needs ballots of one round, got those of rounds {sorted(rounds)}")
    number = rounds.pop()
    if len(set(ballots)) == 1 and all(entry.standing == "have" for entry in ballots[0].roles):
        return Ruling("keep", number, usable=tuple(entry.role for entry in ballots[0].roles))
    undeclared = _undeclared(ballots)
    if undeclared:
        return Ruling("drop", number, causes=undeclared)
    findings = [_find(index, ballots) for index in range(len(ballots[0].roles))]
    causes = tuple(sorted(cause for finding in findings for cause in finding.causes))
    missing = tuple(sorted(pair for finding in findings for pair in finding.missing))
    blocked = any(finding.required and finding.is_beyond_fetching for finding in findings)
    if missing and not blocked and number + 1 < MAX_ROUNDS and all(ballot.can_refetch for ballot in ballots):
        return Ruling("refetch", number, missing=missing, causes=causes)
    if any(finding.required and not finding.is_usable for finding in findings):
        return Ruling("drop", number, causes=causes)
    usable = tuple(finding.role for finding in findings if finding.is_usable)
    return Ruling("keep", number, usable=usable, causes=causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """One role over all ranks. `missing` are the (rank, role) pairs that another fetch might bring."""

    role: str
    required: bool
    is_usable: bool
    is_beyond_fetching: bool
    missing: tuple[tuple[int, str], ...] = ()
    causes: tuple[tuple[int, str, str], ...] = ()


def _find(index: int, ballots: Sequence[Ballot]) -> _Finding:
    entries = [ballot.roles[index] for ballot in ballots]
    role, required = entries[0].role, entries[0].required
    holders = [rank for rank, entry in enumerate(entries) if entry.standing == "have"]
    lacking = [rank for rank, entry in enumerate(entries) if entry.standing != "have"]
    causes = [(rank, role, entries[rank].cause or entries[rank].standing) for rank in lacking]
    odd = [rank for rank in holders if entries[rank].facts != entries[holders[0]].facts]
    causes += [(rank, role, _difference(entries[rank], entries[holders[0]], holders[0])) for rank in odd]
    is_usable = len(holders) == len(entries) and not odd
    # What a sender failed, or what differs in content, no further fetch can mend.
    is_beyond_fetching = bool(odd) or any(entries[rank].standing == "failed" for rank in lacking)
    return _Finding(
        role=role,
        required=required,
        is_usable=is_usable,
        is_beyond_fetching=is_beyond_fetching,
        missing=() if is_beyond_fetching else tuple((rank, role) for rank in lacking),
        causes=tuple(causes),
    )


def _difference(entry: RoleBallot, other: RoleBallot, other_rank: int) -> str:
    mine, theirs = read_facts(entry.facts), read_facts(other.facts)
    parts = [
        f"{name} {mine.get(name, 'not stated')} here, {theirs.get(name, 'not stated')} on rank {other_rank}"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    return _DIFFERS + ("; ".join(parts) or "the same facts are spelled in another way")


def _undeclared(ballots: Sequence[Ballot]) -> tuple[tuple[int, str, str], ...]:
    declared = [tuple((entry.role, entry.required) for entry in ballot.roles) for ballot in ballots]
    return tuple(
        (rank, WHOLE_RANK, f"votes on {_spell(roles)}, rank 0 on {_spell(declared[0])}")
        for rank, roles in enumerate(declared)
        if roles != declared[0]
    )


def _spell(roles: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{role} ({'required' if required else 'optional'})" for role, required in roles) or "no roles"


def spell_cause(rank: int, role: str, words: str) -> str:
    """One cause in words: "rank 1 lacks cfg_text: producer failed"."""
    return f"rank {rank}: {words}" if role == WHOLE_RANK else f"rank {rank} lacks {role}: {words}"


def tells_of_difference(causes: Sequence[tuple[int, str, str]]) -> bool:
    """Whether some ranks hold other contents than their peers: the same payloads can never be agreed on."""
    return any(words.startswith(_DIFFERS) for _, _, words in causes)


def spell_causes(causes: Sequence[tuple[int, str, str]]) -> str:
    """A ruling's causes in one line."""
    return "; ".join(spell_cause(*cause) for cause in causes)
