"""Agreement over any group that can show every rank's ballot to every rank: each rank then rules for itself.

One exchange a round. All ranks see the same ballots and a ruling depends on nothing else, so all come to the same one;
the group's own `VerdictInDoubt` says when a rank could not see them. Ranks must vote on requests in the same order;
`omnikv.groups.channel` needs no order and keeps one slow request from holding up the others.
"""

from __future__ import annotations

from omnikv.core.messages import Ballot, Ruling, decode_vote, encode_vote
from omnikv.core.verdict import rule
from omnikv.errors import RemoteProtocolError
from omnikv.groups.base import Agreement, Group


class ExchangeAgreement(Agreement):
    """Votes through `group.exchange`. `facts` is text that must be equal on every rank, such as a fingerprint."""

    def __init__(self, group: Group, *, facts: str = "") -> None:
        self._group = group
        self._facts = facts

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def agree(self, key: str, ballot: Ballot, *, deadline: float) -> Ruling:
        answers = self._group.exchange(encode_vote(key, self._facts, ballot), deadline=deadline)
        votes = [decode_vote(answer) for answer in answers]
        for name, spoken in (("request", [vote.key for vote in votes]), ("facts", [vote.facts for vote in votes])):
            if len(set(spoken)) > 1:
                words = ", ".join(f"{text!r} on rank {rank}" for rank, text in enumerate(spoken))
                raise RemoteProtocolError(f"the ranks of this group do not vote on the same {name}: {words}")
        return rule([vote.ballot for vote in votes])
