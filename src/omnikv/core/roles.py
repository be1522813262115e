"""Which fields of a request carry its KV, and how they are collected, cleared, applied and split by guidance branch.

A request is an engine's object and has no type of ours: only its attributes are read and written. Its KV sits in two
places, on the request itself and on its `sampling_params`; a collected payload names the latter with the prefix "sp.".
Guidance (CFG) companions live on the sampling parameters alone: `cfg_text_past_key_values`, `cfg_img_kv_metadata`, ...

`cfg_kv_request_ids` is collected with the rest, as engines do, because followers need it. It is an input of the
request, not something received: clearing keeps it, or no rank could ever ask for the companions again (X13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omnikv.core.keys import PRIMARY_ROLE

PRIMARY_FIELDS = ("past_key_values", "kv_metadata")
SAMPLING_PREFIX = "sp."
COMPANION_IDS = "cfg_kv_request_ids"

_CFG_FIELDS = frozenset(
    {COMPANION_IDS, "cfg_active_branch", "cfg_branch_roles", "cfg_branch_past_key_values", "cfg_branch_kv_metadata"}
)
_KV_SUFFIX, _METADATA_SUFFIX = "_past_key_values", "_kv_metadata"
# The branches that models know by name come first, in this order, so that every rank counts them alike.
_PREFERRED_ROLES = ("cfg_text", "cfg_img")

Payload = dict[str, object]


def collect_payload(req: Any) -> Payload:
    """Every KV field of the request that is not None, by name; the objects themselves, not copies."""
    payload: Payload = {name: getattr(req, name, None) for name in PRIMARY_FIELDS}
    params = getattr(req, "sampling_params", None)
    for name in _field_names(params):
        if name in PRIMARY_FIELDS or _is_cfg_field(name):
            payload[f"{SAMPLING_PREFIX}{name}"] = getattr(params, name, None)
    return {name: value for name, value in payload.items() if value is not None}


def clear_payload(req: Any) -> None:
    """Nothing; sets every collected field to None except the request's own inputs."""
    for name in collect_payload(req):
        owner, field = _owner_of(req, name)
        if field != COMPANION_IDS:
            setattr(owner, field, None)


def apply_payload(req: Any, payload: Payload) -> None:
    """Nothing; sets the payload's fields on the request. A primary field that is None leaves what is there."""
    for name in PRIMARY_FIELDS:
        if payload.get(name) is not None:
            setattr(req, name, payload[name])
    if getattr(req, "sampling_params", None) is None:
        return
    for name, value in payload.items():
        if name.startswith(SAMPLING_PREFIX):
            setattr(req.sampling_params, name.removeprefix(SAMPLING_PREFIX), value)


def received_fields(data: Mapping[str, Any], kv_type: Callable[..., object]) -> Payload:
    """A received payload as the fields it sets on a request: its KV as a `kv_type` of its caches, and its metadata."""
    fields: Payload = {}
    if "layer_blocks" in data:
        fields["past_key_values"] = kv_type(**data["layer_blocks"])
    if "metadata" in data:
        fields["kv_metadata"] = data["metadata"]
    return fields | {f"{SAMPLING_PREFIX}{name}": value for name, value in fields.items()}


def branch_roles(req: Any) -> list[str]:
    """The guidance branches of the request: text, image, then others in the order they were set.

    A rank gets the branch of its own number, so a named branch whose KV is missing keeps its place.
    """
    params = getattr(req, "sampling_params", None)
    by_role = getattr(params, "cfg_branch_past_key_values", None) or {}
    single = [
        name.removesuffix(_KV_SUFFIX)
        for name in _field_names(params)
        if name.startswith("cfg_") and name.endswith(_KV_SUFFIX) and name not in _CFG_FIELDS
    ]
    found = [role for role in (*by_role, *single) if _branch_part(params, role, _KV_SUFFIX) is not None]
    preferred = [role for role in _PREFERRED_ROLES if role in by_role or role in found]
    return list(dict.fromkeys((*preferred, *found)))


def role_of_field(name: str) -> str:
    """Whose KV a collected field is part of: "primary", a guidance branch, or the field itself where it is neither."""
    field = name.removeprefix(SAMPLING_PREFIX)
    if field in PRIMARY_FIELDS:
        return PRIMARY_ROLE
    return field if field in _CFG_FIELDS else field.removesuffix(_KV_SUFFIX).removesuffix(_METADATA_SUFFIX)


def branch_kv(req: Any, role: str) -> object:
    """The KV of one guidance branch as the request holds it, or None."""
    return _branch_part(getattr(req, "sampling_params", None), role, _KV_SUFFIX)


def primary_kv(req: Any) -> object:
    """The KV of the request itself as it holds it, or None."""
    found = getattr(req, "past_key_values", None)
    return getattr(getattr(req, "sampling_params", None), "past_key_values", None) if found is None else found


def companion_ids(req: Any) -> dict[str, str]:
    """The ids under which the request's guidance companions travel, by role; none where it names none."""
    asked = getattr(getattr(req, "sampling_params", None), COMPANION_IDS, None)
    if not isinstance(asked, Mapping):
        return {}
    return {str(role): request_id for role, request_id in asked.items() if isinstance(request_id, str)}


def missing_roles(req: Any, required: Iterable[str] = ()) -> tuple[str, ...]:
    """The companions that the request asks for, or that are `required`, and that it does not hold now, sorted."""
    return tuple(sorted({*companion_ids(req), *required} - set(branch_roles(req))))


def branch_payloads(req: Any, cfg_size: int) -> list[Payload | None]:
    """One payload for each rank of a guidance group of `cfg_size`: rank 0 gets the main KV, rank n the n-th branch's.

    A producer that did not split its KV by branch lets the one follower of a group of 2 share the main KV as a prefix.
    In a larger group there is no telling which branch a rank would need, so the ranks that no branch serves get None
    (D07); `ranks_without_kv` names them.
    """
    roles = branch_roles(req)
    main = {
        name: value
        for name, value in collect_payload(req).items()
        if name.removeprefix(SAMPLING_PREFIX) in PRIMARY_FIELDS
    }
    if roles:
        main |= {"sp.cfg_branch_roles": list(roles), "sp.cfg_active_branch": None}
    payloads: list[Payload | None] = [main or None]
    payloads += [_branch_payload(req, main, role, roles) for role in roles]
    while len(payloads) < cfg_size:
        payloads.append(dict(main) if main and not roles and cfg_size == 2 else None)
    return payloads[:cfg_size]


def ranks_without_kv(payloads: Sequence[Payload | None]) -> list[int]:
    """The ranks of a guidance group that get nothing although rank 0 does."""
    if not payloads or not payloads[0]:
        return []
    return [rank for rank, payload in enumerate(payloads) if not payload]


def _branch_payload(req: Any, main: Payload, role: str, roles: list[str]) -> Payload | None:
    params = req.sampling_params
    kv = _branch_part(params, role, _KV_SUFFIX)
    metadata = _branch_part(params, role, _METADATA_SUFFIX)
    if kv is None:
        return None
    payload = main | {
        "sp.cfg_active_branch": role,
        "sp.cfg_branch_roles": list(roles),
        "sp.cfg_branch_past_key_values": {role: kv},
        f"sp.{role}{_KV_SUFFIX}": kv,
    }
    if metadata is not None:
        payload |= {"sp.cfg_branch_kv_metadata": {role: metadata}, f"sp.{role}{_METADATA_SUFFIX}": metadata}
    return payload


def _branch_part(params: Any, role: str, suffix: str) -> object:
    by_role = getattr(params, f"cfg_branch{suffix}", None) or {}
    part = by_role.get(role)
    return getattr(params, f"{role}{suffix}", None) if part is None else part


def _is_cfg_field(name: str) -> bool:
    return name in _CFG_FIELDS or (name.startswith("cfg_") and name.endswith((_KV_SUFFIX, _METADATA_SUFFIX)))


def _field_names(params: Any) -> Iterable[str]:
    # Sampling parameters are plain objects in some engines and msgspec structs in others.
    own = vars(params) if hasattr(params, "__dict__") else {}
    return tuple(dict.fromkeys((*getattr(params, "__struct_fields__", ()), *own)))


def _owner_of(req: Any, name: str) -> tuple[Any, str]:
    if name.startswith(SAMPLING_PREFIX):
        return req.sampling_params, name.removeprefix(SAMPLING_PREFIX)
    return req, name
