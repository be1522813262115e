"""What a group decides about one request's KV, from what each of its ranks says: ballots in, one verdict out.

Ranks that run a request in lockstep must take the same way. Each casts exactly one ballot a request, whatever happened
to it: an error before the vote becomes a ballot that says no. Every rank feeds the same list of ballots, in rank order,
to `decide`, so all come to the same verdict without a further message.

Two dialects live here. `Ballot` and `decide` are omnikv's own: they compare what was received (tokens, layers, roles),
and a verdict of "drop" says why, rank by rank. The published dialect of engines compares a signature only, "did the
primary arrive, and which fields does the request carry now" (vllm-omni #5636); `published_verdict` is its rule.

Whether an exchange takes place at all is decided by `should_exchange` from values that are equal on every rank of the
group. Nothing that a single rank knows alone may enter there: one rank skipping what another enters is a deadlock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omnikv.errors import LocalProtocolError, RemoteProtocolError

Signature = tuple[bool, tuple[str, ...]]
MAX_BALLOT_NBYTES = 65536
_MAX_CAUSE_CHARS = 2000

DUMMY_REQUEST_ID = "dummy_req_id"


def is_dummy_request_id(request_id: object) -> bool:
    """Whether an engine made this id up for a warm-up run, for which no stage ever sends KV."""
    return isinstance(request_id, str) and (
        request_id == DUMMY_REQUEST_ID or request_id.startswith(f"{DUMMY_REQUEST_ID}/")
    )


def should_exchange(
    *, is_local: bool, tp_active: bool, has_group: bool, tp_size: int, need_recv_cache: bool, request_id: str | None
) -> bool:
    """Whether the ranks of a tensor-parallel group vote on this request; every argument is equal on all of them.

    Only ranks that each fetch their own shard can disagree: elsewhere one leader fetches and distributes.
    """
    if not (is_local and tp_active and has_group and tp_size > 1 and need_recv_cache):
        return False
    return request_id is not None and not is_dummy_request_id(request_id)


def published_signature(received: bool, roles: Sequence[str]) -> Signature:
    """What a rank reports in the published exchange: did the primary arrive, and the sorted names of what it holds."""
    return bool(received), tuple(sorted(roles))


def published_verdict(signatures: Sequence[object]) -> bool:
    """Whether every rank reported the same state. Absence on all of them is the same state too, and is kept."""
    return all(_as_tuples(signature) == _as_tuples(signatures[0]) for signature in signatures)


def _as_tuples(value: object) -> object:
    # A group may carry tuples as lists; the state they name is the same.
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One rank's word on one request: does it hold usable KV, why not, and what its KV is.

    `facts` are (name, text) pairs that must be equal on all ranks for the KV to be usable together, such as the number
    of tokens; they are kept sorted. A ballot that says no carries a cause.

    Raises:
        LocalProtocolError: a cause on a ballot that says yes.
    """

    have: bool
    cause: str | None = None
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.have and self.cause is not None:
            raise LocalProtocolError(f"a ballot that says yes has no cause, got {self.cause!r}")
        if not self.have:
            object.__setattr__(self, "cause", (self.cause or "no cause given")[:_MAX_CAUSE_CHARS])
        object.__setattr__(self, "facts", tuple(sorted((str(name), str(text)) for name, text in self.facts)))

    def encode(self) -> bytes:
        """The ballot as JSON, for a group's exchange.

        Raises:
            LocalProtocolError: its facts make it longer than a ballot may be.
        """
        fields = {"have": self.have, "cause": self.cause, "facts": [list(fact) for fact in self.facts]}
        data = json.dumps(fields, separators=(",", ":")).encode("ascii")
        if len(data) > MAX_BALLOT_NBYTES:
            raise LocalProtocolError(
                f"a ballot has {len(data)} bytes, at most {MAX_BALLOT_NBYTES} are allowed; state fewer or shorter facts"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Ballot:
        """The ballot that `encode` gave as `data`.

        Raises:
            RemoteProtocolError: `data` is no encoded ballot.
        """
        if len(data) > MAX_BALLOT_NBYTES:
            raise RemoteProtocolError(f"a ballot has {len(data)} bytes, at most {MAX_BALLOT_NBYTES} are allowed")
        try:
            fields = json.loads(bytes(data).decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"a ballot is no JSON: {bytes(data[:80])!r}") from error
        if not isinstance(fields, dict) or set(fields) != {"have", "cause", "facts"}:
            raise RemoteProtocolError(f"a ballot has the fields have, cause and facts, got {bytes(data[:80])!r}")
        return _checked_ballot(fields)


def _checked_ballot(fields: dict[str, Any]) -> Ballot:
    have, cause, facts = fields["have"], fields["cause"], fields["facts"]
    if not isinstance(have, bool):
        raise RemoteProtocolError(f"a ballot's have must be true or false, got {have!r}")
    if have != (cause is None) or not isinstance(cause, str | None):
        raise RemoteProtocolError(f"a ballot has a cause in words exactly when it says no, got {have!r} and {cause!r}")
    pairs = facts if isinstance(facts, list) else [facts]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise RemoteProtocolError(f"a ballot's facts must be pairs of texts, got {pair!r}")
    return Ballot(have=have, cause=cause, facts=tuple((name, text) for name, text in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What every rank of the group does with this request's KV; `causes` names each rank that stood against it."""

    keep: bool
    causes: dict[int, str] = field(default_factory=dict)


def decide(ballots: Sequence[Ballot]) -> Verdict:
    """The verdict on these ballots, given in rank order: keep exactly when all have KV and state the same facts.

    Ranks whose facts differ are measured against the lowest rank that has KV.

    Raises:
        LocalProtocolError: there are no ballots.
    """
    if not ballots:
        raise LocalProtocolError("a verdict needs at least one ballot: a group has at least one rank")
    causes: dict[int, str] = {}
    reference: int | None = None
    for rank, ballot in enumerate(ballots):
        if not ballot.have:
            causes[rank] = f"rank {rank}: {ballot.cause}"
        elif reference is None:
            reference = rank
        elif ballot.facts != ballots[reference].facts:
            causes[rank] = f"rank {rank}: {_difference(rank, ballot, reference, ballots[reference])}"
    return Verdict(keep=not causes, causes=causes)


def _difference(rank: int, ballot: Ballot, reference: int, other: Ballot) -> str:
    mine, theirs = dict(ballot.facts), dict(other.facts)
    absent = "not stated"
    parts = [
        f"{name} is {mine.get(name, absent)} on rank {rank} and {theirs.get(name, absent)} on rank {reference}"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    return "; ".join(parts) or "it states a fact twice"
