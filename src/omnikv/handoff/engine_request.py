"""An engine's request as a rank meets it around the vote: whatever it raises, the rank stays in the vote.

A request is an engine's object, and what is run to receive it may be a model's function. Peers wait for this rank's
vote, so what goes wrong here is logged and becomes a value.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from omnikv.core.roles import clear_payload, companion_ids
from omnikv.handoff.open_request import OpenRequest

logger = logging.getLogger("omnikv.agree")

# What a rank votes on whose request has an id that cannot be read: not an id, and no warm-up run either.
_UNREADABLE_ID = "<unreadable>"


def received_until_vote(receive: Callable[[], bool], request: OpenRequest, counters: Counter[str]) -> bool:
    """What `receive` says, or False with the cause logged, counted and noted in `request`."""
    request.begin_attempt()
    try:
        return bool(receive()) and not request.is_broken
    # edge: just before the vote; a rank that left here would leave its peers waiting in the exchange.
    except Exception as error:
        counters["receive_failed"] += 1
        request.is_broken = True
        request.failures[str(request.request_id)] = f"{type(error).__name__}: {error}"
        logger.exception("KV of request %s was not received", request.request_id)
        return False


def request_id_of(req: Any, resolve: Callable[[Any], str | None]) -> str | None:
    """What `resolve` says as text, or a stand-in that is voted on, logged, where the request cannot be asked."""
    try:
        found: object = resolve(req)
        return None if found is None else str(found)
    # edge: the request is an engine's object; its peers wait for this rank's vote on it.
    except Exception:
        logger.exception("a request could not be asked for its id")
        return _UNREADABLE_ID


def drop_payload(req: Any, request_id: str | None) -> None:
    """Nothing; clears the request's KV, and keeps its inputs. One that cannot be cleared is logged."""
    try:
        clear_payload(req)
    # edge: the request is an engine's object; its group has decided, and followers may still wait to be told.
    except Exception:
        logger.exception("the KV of request %s was dropped and its request could not be cleared", request_id)


def ids_of(req: Any, request_id: str | None) -> tuple[str, ...]:
    """The id that a request travels under and those of its companions, its own first; none without one."""
    if not request_id:
        return ()
    try:
        return (request_id, *companion_ids(req).values())
    # edge: the request is an engine's object, and its peers wait for this rank's vote whatever it raises.
    except Exception:
        logger.exception("the companions of request %s could not be read", request_id)
        return (request_id,)
