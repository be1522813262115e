"""One rank's part of a request that several ranks share: what it is, how it travels, and what it votes on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omnikv.core.messages import Ballot, RoleBallot, spell_facts, spell_reason
from omnikv.errors import RemoteProtocolError
from omnikv.handoff.received import ReceivedKV, ReceivedPiece
from omnikv.tensors.bundle import pack, unpack
from omnikv.tensors.kv import LayerKV

# What the vote is about, whatever the branch of the rank.
_PART = "part"
_MAX_CAUSE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's roles of a request, or None and why not; `rounds` is how many votes the readers took."""

    roles: Mapping[str, ReceivedKV] | None = None
    rounds: int = 1
    why_not: str = ""


def pack_part(part: Part) -> torch.Tensor:
    """The part as bytes, 1-D uint8 on the CPU, its tensors copied.

    Raises:
        ConfigError: there is something in its metadata or tensors that cannot be packed.
        RuntimeError: torch could not copy a tensor.
    """
    roles = {role: _as_values(kv) for role, kv in (part.roles or {}).items()}
    # A tensor has one size whatever the number, and so has the part.
    return pack({"roles": roles, "rounds": torch.tensor(part.rounds)})


def unpack_part(request_id: str, packed: torch.Tensor, waited_s: float) -> Part:
    """The part that a rank was given after it `waited_s`; its tensors are views on `packed`.

    Raises:
        RemoteProtocolError: it is no part of a request.
    """
    value = unpack(packed)
    try:
        roles = {role: _as_received(request_id, entry, waited_s) for role, entry in value["roles"].items()}
        return Part(roles=roles, rounds=int(value["rounds"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError(
            f"what the reader gave on is no part of a request: {error!r}", request_id=request_id
        ) from error


def ballot_of_part(part: Part) -> Ballot:
    """What a rank votes: it has its part, or why it has none. Final, since what was given on is given once."""
    if part.roles is None:
        cause = spell_reason(part.why_not)[:_MAX_CAUSE_CHARS]
        return Ballot(0, False, (RoleBallot(_PART, "failed", True, cause=cause),))
    # Branches differ in their tokens and metadata, which the readers have compared; never in their layers.
    layers = next(iter(part.roles.values())).layers
    facts = {"dtype": str(layers[0].key.dtype).removeprefix("torch."), "layers": str(len(layers))}
    return Ballot(0, False, (RoleBallot(_PART, "have", True, facts=spell_facts(facts)),))


def _as_values(kv: ReceivedKV) -> dict[str, Any]:
    return {
        "layers": [tuple(layer) for layer in kv.layers],
        "layer_ids": list(kv.layer_ids),
        "num_tokens": kv.num_tokens,
        "metadata": kv.metadata,
        "sources": [(piece.source_rank, list(piece.heads)) for piece in kv.sources],
    }


def _as_received(request_id: str, entry: Mapping[str, Any], waited_s: float) -> ReceivedKV:
    return ReceivedKV(
        request_id=request_id,
        layers=[LayerKV(*layer) for layer in entry["layers"]],
        layer_ids=entry["layer_ids"],
        num_tokens=entry["num_tokens"],
        metadata=entry["metadata"],
        sources=tuple(
            ReceivedPiece(source_rank=rank, heads=tuple(heads), nbytes=0, waited_s=waited_s)
            for rank, heads in entry["sources"]
        ),
        leases=(),
        owns_memory=True,
    )
