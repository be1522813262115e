"""What a rank votes about an engine's request: each role that it holds or lacks, with the facts that must agree.

A request is an engine's object, so its KV is whatever carries `key_cache` and `value_cache`, as attributes or as keys.
Ranks of one stage hold different heads of it; tokens, layers, head size and dtype must be the same on all of them.
Whatever text an engine brings is spelled so that it can be sent: a vote that fails to leave its rank hangs its peers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal

from omnikv.core.keys import PRIMARY_ROLE
from omnikv.core.messages import Ballot, RoleBallot, spell_facts, spell_reason
from omnikv.core.roles import branch_kv, branch_roles, companion_ids, primary_kv

_MAX_CAUSE_CHARS = 500
_MAX_ROLE_CHARS = 200
_MAX_KEY_CHARS = 512


def ballot_of(
    req: Any,
    *,
    received: bool,
    request_id: str,
    required: Iterable[str],
    failures: Mapping[str, str],
    waiting: Set[str],
    round_number: int,
    can_refetch: bool,
) -> Ballot:
    """This rank's vote on its request in this round.

    The primary is required, and each of the roles `required`; other companions are optional. `failures` says why
    something did not come, by the id that it travels under. What lacks is missing if it is `waiting` for another round;
    otherwise nothing more will come for it, and it failed.
    """
    companions = companion_ids(req)
    must = {PRIMARY_ROLE, *required}
    kv_by_role: dict[str, object] = {
        role: branch_kv(req, role) for role in (*companions, *required, *branch_roles(req))
    }
    kv_by_role[PRIMARY_ROLE] = primary_kv(req) if received else None
    ids = {**companions, PRIMARY_ROLE: request_id}
    attempts = {PRIMARY_ROLE: _attempt(getattr(req, "kv_metadata", None))}
    entries = [
        _held(role, kv, role in must, attempts.get(role, {}))
        if kv is not None
        else _lacking(role, role in must, failures.get(ids.get(role, ""), ""), may_come=ids.get(role) in waiting)
        for role, kv in kv_by_role.items()
    ]
    return Ballot(round_number, can_refetch, tuple(sorted(entries, key=lambda entry: entry.role)))


def vote_key(request_id: str | None, what: str = "") -> str:
    """What a vote on this request is called on every rank; `what` tells a second one on the same request apart."""
    name = spell_reason(request_id)
    if len(name) > _MAX_KEY_CHARS:
        digest = hashlib.blake2b(str(request_id).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        name = f"{name[:_MAX_KEY_CHARS]}...{digest}"
    return f"{name}/{what}" if what else name


def failed_ballot(role: str, cause: str, *, round_number: int = 0) -> Ballot:
    """The vote of a rank that cannot say more than that something went wrong."""
    return Ballot(round_number, False, (RoleBallot(role, "failed", True, cause=_words(cause)),))


def done_ballot(role: str) -> Ballot:
    """The vote of a rank that did its part."""
    return Ballot(0, False, (RoleBallot(role, "have", True),))


def _kv_facts(kv: object) -> dict[str, str]:
    """What must be equal on every rank that holds a part of this KV, by name."""
    keys, values = (list(_part(kv, name) or ()) for name in ("key_cache", "value_cache"))
    tensors = [*keys, *values]
    present = [tensor for tensor in tensors if hasattr(tensor, "shape") and hasattr(tensor, "dtype")]
    if not present:
        return {"form": type(kv).__name__}
    return {
        "dtype": _spell(str(tensor.dtype).removeprefix("torch.") for tensor in present),
        "head_dim": _spell("x".join(map(str, tensor.shape[2:])) for tensor in present),
        "layers": str(len(keys)) if len(keys) == len(values) else f"{len(keys)} of keys, {len(values)} of values",
        "tokens": _spell(str(tensor.shape[0]) if tensor.shape else "0" for tensor in present),
    }


def _attempt(metadata: object) -> dict[str, str]:
    # A sender that numbers its attempts says so in the metadata; parts of two attempts must not be used together.
    attempt = metadata.get("attempt") if isinstance(metadata, Mapping) else None
    return {"attempt": spell_reason(attempt)} if attempt is not None else {}


def _held(role: str, kv: object, required: bool, more: dict[str, str]) -> RoleBallot:
    return RoleBallot(_name(role), "have", required, facts=spell_facts(_kv_facts(kv) | more))


def _lacking(role: str, required: bool, cause: str, *, may_come: bool) -> RoleBallot:
    standing: Literal["missing", "failed"] = "missing" if may_come else "failed"
    return RoleBallot(_name(role), standing, required, cause=_words(cause or "not received"))


def _name(role: str) -> str:
    return spell_reason(role)[:_MAX_ROLE_CHARS] or "unnamed"


def _words(cause: str) -> str:
    return spell_reason(cause)[:_MAX_CAUSE_CHARS]


def _part(kv: object, name: str) -> Any:
    return kv.get(name) if isinstance(kv, Mapping) else getattr(kv, name, None)


def _spell(values: Iterable[str]) -> str:
    # Alike in every layer as a rule; otherwise the layers are told apart.
    found = list(values)
    return found[0] if len(set(found)) == 1 else ",".join(found)
