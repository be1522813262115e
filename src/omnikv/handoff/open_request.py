"""What a rank knows of a request between its beginning and the verdict: one deadline, causes, and payloads held.

A request's companions travel under ids of their own and are fetched by a function of the model's. All of them belong to
one request here: they share its deadline, so their waits overlap instead of adding up; why one did not come is kept for
the vote's words; and what came is held unacknowledged until the verdict where the connector takes payloads back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omnikv.core.roles import companion_ids
from omnikv.handoff.keyed_receive import ReceivedPayload

logger = logging.getLogger("omnikv.receive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """When the phases of a request end, on the monotonic clock, in seconds; every rank counts them alike."""

    fetch: float
    vote: float
    hand_on: float

    @classmethod
    def starting(cls, now: float, *, recv_timeout_s: float, vote_timeout_s: float) -> Deadlines:
        """Those of a request that begins `now`: the fetch, then the vote, then handing on, each bounded."""
        fetch = now + recv_timeout_s
        return cls(fetch=fetch, vote=fetch + vote_timeout_s, hand_on=fetch + 2 * vote_timeout_s)


@dataclass(slots=True)
class OpenRequest:
    """One request that is being received; `failures` says why something did not come, by the id it travels under.

    `is_broken` says that something failed which no single id stands for, so that the request cannot count as received.
    """

    deadlines: Deadlines
    request_id: str | None = None
    failures: dict[str, str] = field(default_factory=dict)
    held: list[ReceivedPayload] = field(default_factory=list)
    is_broken: bool = False

    def acknowledge(self) -> None:
        """Nothing; tells the senders that their payloads were used. Idempotent."""
        while self.held:
            self.held.pop().settle()

    def give_back(self) -> None:
        """Nothing; returns unused payloads to connectors that take them back, so that a retry finds them."""
        while self.held:
            self.held.pop().put_back()


class OpenRequests:
    """The requests that this rank is receiving now, by each id that belongs to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, OpenRequest] = {}

    def find(self, request_id: str) -> OpenRequest | None:
        """The open request that this id belongs to, as its own or as a companion's."""
        with self._lock:
            return self._by_id.get(request_id)

    @contextmanager
    def opened(self, request_ids: Sequence[str], request: OpenRequest) -> Iterator[OpenRequest]:
        """`request`, open under these ids, its own first, while the block runs; what it still holds then is given back.

        One that is open already under the first id is entered instead, and stays open.
        """
        known = self.find(request_ids[0]) if request_ids else None
        if known is not None:
            yield known
            return
        with self._lock:
            added = [request_id for request_id in dict.fromkeys(request_ids) if request_id not in self._by_id]
            self._by_id.update(dict.fromkeys(added, request))
        try:
            yield request
        finally:
            with self._lock:
                for request_id in added:
                    del self._by_id[request_id]
            request.give_back()


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
