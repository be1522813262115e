"""The published vote of a tensor-parallel group, over an engine's own group object.

Rank 0 gathers the others' signatures, one message each, decides, and broadcasts the verdict; the others send and then
wait for it. A rank whose signature cannot be read counts as one that disagrees: rank 0 still tells everyone, so nobody
is left waiting. A rank that voted and cannot learn the verdict raises: its peers may go either way.

The group is an engine's: `rank_in_group`, `send_object(obj, dst=)`, `recv_object(src=)`, `broadcast_object(obj, src=)`.
It has no deadline, so a dead peer holds the others as long as the engine's own groups would.
"""

from __future__ import annotations

import logging
from typing import Any

from omnikv.core.published_vote import Signature, published_verdict
from omnikv.errors import VerdictInDoubt

logger = logging.getLogger("omnikv.agree")


def agree_on_state(group: Any, size: int, signature: Signature, request_id: str) -> bool:
    """Whether all `size` ranks of the group report the same state; the same answer on every rank.

    Raises:
        VerdictInDoubt: the verdict could not be exchanged.
    """
    try:
        if group.rank_in_group != 0:
            group.send_object(signature, dst=0)
            return bool(group.broadcast_object(None, src=0))
        verdict = published_verdict([signature, *(_signature_from(group, rank) for rank in range(1, size))])
        group.broadcast_object(verdict, src=0)
    # edge: the group is an engine's and may raise anything; whatever it is, this rank no longer knows the verdict.
    except Exception as error:
        raise VerdictInDoubt(
            f"the ranks voted on request {request_id!r} and the verdict could not be exchanged: {error}; its peers may "
            "go either way, so tear the group down",
            request_id=request_id,
        ) from error
    return verdict


def _signature_from(group: Any, rank: int) -> object:
    try:
        return group.recv_object(src=rank)
    # edge: one peer that cannot be read must not keep the verdict from the others.
    except Exception:
        logger.exception("the vote of rank %d could not be read; it counts as a disagreement", rank)
        return None
