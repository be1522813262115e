"""The published dialect of the vote: what engines compare before a tensor-parallel group uses a request's KV.

Each rank reports a signature, "did the primary arrive, and which fields does the request carry now"; the group keeps
the KV exactly when all signatures are alike (vllm-omni #5636). Whether an exchange takes place at all is decided by
`should_exchange` from values that are equal on every rank of the group: nothing that a single rank knows alone may
enter there, since one rank skipping what another enters is a deadlock.

omnikv's own vote, which compares contents and can fetch again, is `omnikv.core.verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence

Signature = tuple[bool, tuple[str, ...]]

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
