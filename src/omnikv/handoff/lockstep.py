"""A distributed receive through an engine's groups: receive, vote, hand on, in an order that no rank leaves.

Between the start of a receive and the vote nothing may leave a rank: whatever goes wrong becomes "not received", since
its peers already wait for its vote. After a negative verdict every rank drops what it holds, and keeps what the request
came with, so that all take the same other way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from omnikv.core.published_vote import published_signature, should_exchange
from omnikv.core.receive_role import ReceiveLayout
from omnikv.core.roles import clear_payload, collect_payload
from omnikv.handoff.object_agreement import agree_on_state

logger = logging.getLogger("omnikv.agree")


def received_until_vote(receive: Callable[[], bool], request_id: str | None, counters: Counter[str]) -> bool:
    """What `receive` says, or False with the cause logged and counted."""
    try:
        return receive()
    # edge: just before the vote; a rank that left here would leave its peers waiting in the exchange.
    except Exception:
        counters["receive_failed"] += 1
        logger.exception("KV of request %s was not received", request_id)
        return False


def keep_or_drop(
    req: Any,
    layout: ReceiveLayout,
    *,
    received: bool,
    request_id: str | None,
    need_recv_cache: bool,
    counters: Counter[str],
) -> bool:
    """Whether this rank still holds the request's KV, after its tensor-parallel group compared what its ranks hold.

    Without a vote (see `should_exchange`) that is `received`. When the ranks differ, each clears its request.

    Raises:
        VerdictInDoubt: this rank voted and cannot learn the verdict.
    """
    if not should_exchange(
        is_local=layout.is_local,
        tp_active=layout.tp_active,
        has_group=layout.tp_group is not None,
        tp_size=layout.tp_size,
        need_recv_cache=need_recv_cache,
        request_id=request_id,
    ):
        return received
    signature = published_signature(received, list(collect_payload(req)))
    if agree_on_state(layout.tp_group, layout.tp_size, signature, str(request_id)):
        return received
    counters["dropped"] += 1
    logger.warning("ranks hold different KV for request %s (this one: %s); all of them drop it", request_id, signature)
    clear_payload(req)
    return False
