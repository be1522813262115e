"""Ranks in lockstep decide together whether a request's KV is used, round by round until the ruling is final.

Between the start of a receive and its ballot no path leaves: whatever goes wrong on a rank becomes a ballot that says
so, because a rank that stayed away would leave its peers in a vote that never ends. A round's fetch waits for a slice
of the request's time only, so that a failure anywhere is known everywhere within a slice, long before the deadline,
while a late part can still be fetched in a later round. A rank that cannot learn the ruling raises `VerdictInDoubt`; it
never guesses.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from omnikv.core.keys import PRIMARY_ROLE
from omnikv.core.messages import Ballot, RoleBallot, Ruling, spell_facts, spell_reason
from omnikv.core.rounds import round_end
from omnikv.core.verdict import MAX_ROUNDS, spell_cause, spell_causes
from omnikv.errors import Dropped, LocalProtocolError
from omnikv.groups.base import Agreement
from omnikv.handoff.assemble import layer_facts
from omnikv.handoff.receive import RoleFetch, gather
from omnikv.handoff.received import ReceivedKV
from omnikv.transports.base import Transport

logger = logging.getLogger("omnikv.agree")

_MAX_CAUSE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the group decided about a request, the same on every rank.

    After "keep", `roles` holds this rank's KV of every role that all ranks have, and `kv` is the primary's; a role that
    was asked for and is not in there was left out on every rank, and `causes` says why. After "drop" both are empty.
    `causes` are (rank, role, words). `rounds` is how many votes it took.
    """

    request_id: str
    verdict: Literal["keep", "drop"]
    roles: Mapping[str, ReceivedKV] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    causes: tuple[tuple[int, str, str], ...] = ()
    rounds: int = 1

    @property
    def kv(self) -> ReceivedKV | None:
        """This rank's KV of the primary role."""
        return self.roles.get(PRIMARY_ROLE)

    def require(self) -> ReceivedKV:
        """This rank's KV of the primary role.

        Raises:
            Dropped: the group dropped the request, or left the primary out, on every rank alike.
        """
        kv = self.kv
        if kv is None:
            raise Dropped(
                f"request {self.request_id!r} was dropped by every rank: {spell_causes(self.causes)}",
                request_id=self.request_id,
            )
        return kv

    def cause_of(self, rank: int) -> str:
        """Why the request was dropped or a role left out, as far as it lies with `rank`, in words."""
        return "; ".join(spell_cause(*cause) for cause in self.causes if cause[0] == rank)

    def close(self) -> None:
        """Tell the senders that every role was used; views on them end here. Idempotent."""
        for kv in self.roles.values():
            kv.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a request's fetches and votes end, all on the monotonic clock, in seconds; `slice_s` is a duration."""

    started: float
    deadline: float
    vote_deadline: float
    slice_s: float

    @classmethod
    def starting(cls, now: float, timeout_s: float, *, vote_timeout_s: float, slice_s: float) -> Schedule:
        """The schedule of a request that starts `now`."""
        deadline = now + timeout_s
        return cls(started=now, deadline=deadline, vote_deadline=deadline + vote_timeout_s, slice_s=slice_s)


def receive_and_vote(
    key: str, transport: Transport, fetches: Mapping[RoleFetch, bool], agreement: Agreement, schedule: Schedule
) -> Outcome:
    """The group's outcome; every rank of the group must call this for the same request.

    `fetches` maps each role's fetch to whether the role is required. After "drop", for roles that are left out, and
    when the ruling stays unknown, this rank's payloads are given back to their senders unconsumed.

    Raises:
        VerdictInDoubt: this rank voted and cannot learn the ruling by the schedule's vote deadline.
        RemoteProtocolError: the ranks do not vote on the same request, or a peer's vote cannot be read.
    """
    fetches = dict(sorted(fetches.items(), key=lambda item: item[0].role))
    with ExitStack() as given_back:
        for fetch in fetches:
            given_back.callback(fetch.give_back)
        for number in range(MAX_ROUNDS):
            ballot = _fetch_and_cast(number, transport, fetches, schedule)
            ruling = agreement.agree(key, ballot, deadline=schedule.vote_deadline)
            if ruling.kind != "refetch":
                return _outcome(list(fetches), ruling)
            logger.debug("request %r, round %d: %s", key, number, spell_causes(ruling.causes))
    raise LocalProtocolError(f"request {key!r} was to be fetched again after {MAX_ROUNDS} rounds")


def _outcome(fetches: Sequence[RoleFetch], ruling: Ruling) -> Outcome:
    request_id = fetches[0].request_id
    if ruling.kind == "drop":
        logger.warning("request %r is dropped on every rank: %s", request_id, spell_causes(ruling.causes))
        return Outcome(request_id=request_id, verdict="drop", causes=ruling.causes, rounds=ruling.round + 1)
    left_out = tuple(fetch.role for fetch in fetches if fetch.role not in ruling.usable)
    if left_out:
        logger.info("request %r goes on without %s: %s", request_id, left_out, spell_causes(ruling.causes))
    return Outcome(
        request_id=request_id,
        verdict="keep",
        roles={fetch.role: fetch.require() for fetch in fetches if fetch.role in ruling.usable},
        left_out=left_out,
        causes=ruling.causes,
        rounds=ruling.round + 1,
    )


def _fetch_and_cast(number: int, transport: Transport, fetches: Mapping[RoleFetch, bool], schedule: Schedule) -> Ballot:
    end, can_refetch = round_end(schedule.started, schedule.deadline, schedule.slice_s, number)
    unforeseen: Exception | None = None
    try:
        gather(transport, fetches, deadline=end)
        facts = {fetch.role: _facts(fetch.kv, fetch.plain) for fetch in fetches if fetch.kv is not None}
    # edge: just before the vote; a rank that left here would hang its peers, so every error becomes its ballot.
    except Exception as error:
        logger.warning("an error that nobody foresaw becomes the ballot of this rank", exc_info=True)
        unforeseen, facts = error, {}
    entries = [_role_ballot(fetch, required, facts, unforeseen) for fetch, required in fetches.items()]
    return Ballot(round=number, can_refetch=can_refetch, roles=tuple(entries))


def _role_ballot(
    fetch: RoleFetch, required: bool, facts: Mapping[str, str], unforeseen: Exception | None
) -> RoleBallot:
    error = unforeseen or fetch.failure
    if error is not None:
        return RoleBallot(fetch.role, "failed", required, cause=_spell_error(error))
    if fetch.kv is not None:
        return RoleBallot(fetch.role, "have", required, facts=facts[fetch.role])
    return RoleBallot(fetch.role, "missing", required, cause=fetch.spell_missing())


def _spell_error(error: Exception) -> str:
    return spell_reason(f"{type(error).__name__}: {error}")[:_MAX_CAUSE_CHARS]


def _facts(kv: ReceivedKV, plain: bool) -> str:
    """What must agree between ranks of one request: with a `plain` route they differ in heads only."""
    metadata = json.dumps(kv.metadata, sort_keys=True, default=repr).encode()
    facts = {
        "metadata": hashlib.blake2b(metadata, digest_size=8).hexdigest(),
        "tokens": str(kv.num_tokens),
    }
    if plain:
        facts |= {
            "dtype": str(kv.layers[0].key.dtype).removeprefix("torch."),
            "layer shapes": hashlib.blake2b(repr(layer_facts(kv.layers)).encode(), digest_size=8).hexdigest(),
            "layers": str(len(kv.layers)),
        }
    return spell_facts(facts)
