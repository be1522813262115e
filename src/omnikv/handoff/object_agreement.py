"""The published vote of a tensor-parallel group, over an engine's own group object.

Rank 0 gathers the others' signatures, one message each, decides, and broadcasts the verdict; the others send and then
wait for it. A rank whose signature cannot be read counts as one that disagrees: rank 0 still tells everyone, so nobody
is left waiting. A rank that voted and cannot learn the verdict raises: its peers may go either way.

The group is an engine's: `rank_in_group`, `send_object(obj, dst=)`, `recv_object(src=)`, `broadcast_object(obj, src=)`.
It has no deadline, so `omnikv.handoff.bounded_calls` gives the exchange one.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from omnikv.core.published_vote import Signature, published_causes, published_verdict
from omnikv.handoff.bounded_calls import BoundedCalls

logger = logging.getLogger("omnikv.agree")


class PublishedVerdict(NamedTuple):
    """Whether every rank reported the same state, and which rank lacked what: only rank 0 sees that, others get ()."""

    kept: bool
    causes: tuple[tuple[int, str, str], ...] = ()


def agree_on_state(
    group: Any, size: int, signature: Signature, request_id: str, *, calls: BoundedCalls, deadline: float
) -> PublishedVerdict:
    """The verdict on the `size` ranks' states, the same on every rank. `deadline` is on the monotonic clock.

    Raises:
        VerdictInDoubt: the verdict could not be exchanged by the deadline.
    """

    def exchange() -> PublishedVerdict:
        if group.rank_in_group != 0:
            group.send_object(signature, dst=0)
            return PublishedVerdict(bool(group.broadcast_object(None, src=0)))
        signatures = [signature, *(_signature_from(group, rank) for rank in range(1, size))]
        kept = published_verdict(signatures)
        group.broadcast_object(kept, src=0)
        return PublishedVerdict(kept, () if kept else published_causes(signatures))

    return calls.make("the verdict", exchange, deadline=deadline, request_id=request_id)


def _signature_from(group: Any, rank: int) -> object:
    try:
        return group.recv_object(src=rank)
    # edge: one peer that cannot be read must not keep the verdict from the others.
    except Exception:
        logger.exception("the vote of rank %d could not be read; it counts as a disagreement", rank)
        return None
