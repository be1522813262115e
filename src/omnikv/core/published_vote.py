"""The published dialect of the vote: what engines compare before a tensor-parallel group uses a request's KV.

Each rank reports a signature, "did the primary arrive, and which fields does the request carry now"; the group keeps
the KV exactly when all signatures are alike (vllm-omni #5636). Whether an exchange takes place at all is decided by
`should_exchange` from values that are equal on every rank of the group: nothing that a single rank knows alone may
enter there, since one rank skipping what another enters is a deadlock.

omnikv's own vote, which compares contents and can fetch again, is `omnikv.core.verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence

from omnikv.core.keys import PRIMARY_ROLE
from omnikv.core.roles import role_of_field

Signature = tuple[bool, tuple[str, ...]]

DUMMY_REQUEST_ID = "dummy_req_id"


def is_dummy_request_id(request_id: object) -> bool:
    """Whether an engine made this id up for a warm-up run, for which no stage ever sends KV."""
    return isinstance(request_id, str) and (
        request_id == DUMMY_REQUEST_ID or request_id.startswith(f"{DUMMY_REQUEST_ID}/")
    )


def should_exchange(
    *, fetches: bool, tp_active: bool, has_group: bool, tp_size: int, need_recv_cache: bool, request_id: str | None
) -> bool:
    """Whether the ranks of a tensor-parallel group vote on this request; every argument is equal on all of them.

    Only ranks that fetch for themselves (`fetches`) can come to different ends: a follower takes what its leader hands
    on. The ranks of one tensor-parallel group have the same guidance and sequence ranks, so all of them fetch or none.
    """
    if not (fetches and tp_active and has_group and tp_size > 1 and need_recv_cache):
        return False
    return request_id is not None and not is_dummy_request_id(request_id)


def published_signature(received: bool, roles: Sequence[str]) -> Signature:
    """What a rank reports in the published exchange: did the primary arrive, and the sorted names of what it holds."""
    return bool(received), tuple(sorted(roles))


def published_verdict(signatures: Sequence[object]) -> bool:
    """Whether every rank reported the same state. Absence on all of them is the same state too, and is kept."""
    return all(_as_tuples(signature) == _as_tuples(signatures[0]) for signature in signatures)


def published_causes(signatures: Sequence[object]) -> tuple[tuple[int, str, str], ...]:
    """Which rank lacks what of all that any rank holds, as (rank, role, words); empty role for a rank as a whole."""
    states = [_read(signature) for signature in signatures]
    known = {field for state in states if state is not None for field in state[1]}
    anyone_received = any(state is not None and state[0] for state in states)
    causes: dict[tuple[int, str], str] = {}
    for rank, state in enumerate(states):
        if state is None:
            causes[rank, ""] = "its vote could not be read"
            continue
        for field in sorted(known - set(state[1])):
            causes.setdefault((rank, role_of_field(field)), f"no {field} on its request")
        if anyone_received and not state[0]:
            causes[rank, PRIMARY_ROLE] = "not received"
    return tuple((rank, role, words) for (rank, role), words in sorted(causes.items()))


def _read(signature: object) -> Signature | None:
    match _as_tuples(signature):
        case (bool() as received, tuple() as names) if all(isinstance(name, str) for name in names):
            return received, names
    return None


def _as_tuples(value: object) -> object:
    # A group may carry tuples as lists; the state they name is the same.
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
