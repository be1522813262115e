"""Ranks in lockstep decide together whether a request's KV is used.

Between the start of a receive and its ballot no path leaves: whatever goes wrong on a rank becomes a ballot that says
so, because a rank that stayed away would leave its peers in an exchange that never ends. Every rank then computes the
same verdict from the same ballots. A rank that cannot learn its peers' ballots raises `VerdictInDoubt`: it never
guesses.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from omnikv.core.verdict import Ballot, decide
from omnikv.errors import Dropped, OmniKVError
from omnikv.groups.base import Group
from omnikv.handoff.receive import ReceivedKV, layer_facts

logger = logging.getLogger("omnikv.agree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the group decided about a request, the same on every rank.

    `kv` is this rank's part after "keep" and None after "drop"; `causes` says in words what was wrong, by rank.
    """

    request_id: str
    verdict: Literal["keep", "drop"]
    kv: ReceivedKV | None
    causes: dict[int, str]

    def require(self) -> ReceivedKV:
        """This rank's KV.

        Raises:
            Dropped: the group dropped the request, on every rank alike.
        """
        if self.kv is None:
            causes = "; ".join(cause for _, cause in sorted(self.causes.items()))
            raise Dropped(
                f"request {self.request_id!r} was dropped by every rank: {causes}", request_id=self.request_id
            )
        return self.kv


def receive_and_vote(
    request_id: str, receive: Callable[[], ReceivedKV], group: Group, *, vote_deadline: float
) -> Outcome:
    """The group's outcome; every rank of the group must call this for the same request.

    After "drop", and when the verdict stays unknown, this rank's payloads are given back to their senders unconsumed.

    Raises:
        VerdictInDoubt: this rank voted and cannot learn the verdict by `vote_deadline` (monotonic seconds).
        RemoteProtocolError: a peer's ballot is not one.
    """
    with ExitStack() as unless_kept:
        kv, ballot = _cast(receive)
        if kv is not None:
            unless_kept.callback(kv.give_back)
        answers = group.exchange(ballot.encode(), deadline=vote_deadline)
        verdict = decide([Ballot.decode(answer) for answer in answers])
        if not verdict.keep:
            logger.warning("request %r dropped on all %d ranks: %s", request_id, group.size, verdict.causes)
            return Outcome(request_id=request_id, verdict="drop", kv=None, causes=dict(verdict.causes))
        unless_kept.pop_all()
        return Outcome(request_id=request_id, verdict="keep", kv=kv, causes={})


def _cast(receive: Callable[[], ReceivedKV]) -> tuple[ReceivedKV | None, Ballot]:
    try:
        kv = receive()
        return kv, Ballot(have=True, cause=None, facts=_facts(kv))
    # edge: just before the vote; a rank that left here would hang its peers, so every error becomes its ballot.
    except Exception as error:
        if not isinstance(error, OmniKVError):
            logger.warning("an unexpected error became a ballot", exc_info=True)
        return None, Ballot(have=False, cause=f"{type(error).__name__}: {error}", facts=())


def _facts(kv: ReceivedKV) -> tuple[tuple[str, str], ...]:
    """What must agree between ranks that hold different heads of one request."""
    layers = hashlib.blake2b(repr(layer_facts(kv.layers)).encode(), digest_size=8).hexdigest()
    metadata = json.dumps(kv.metadata, sort_keys=True, default=repr).encode()
    return (
        ("tokens", str(kv.num_tokens)),
        ("layers", str(len(kv.layers))),
        ("layer shapes and dtypes", layers),
        ("metadata", hashlib.blake2b(metadata, digest_size=8).hexdigest()),
    )
