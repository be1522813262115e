"""What a rank knows of a request between its beginning and the verdict: deadlines, causes, and its fetches.

A request's companions travel under ids of their own and are asked for by a function of the model's. All of them belong
to one request here: they share its deadline and are fetched side by side, so their waits overlap; why one did not come
is kept for the vote's words; and nothing that came is acknowledged before the verdict.

What a request leaves that was not used and that no connector takes back is kept until the request is received again, or
another one is: an engine that moves on has no more use for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from omnikv.core.rounds import round_end
from omnikv.handoff.keyed_assemble import ReceiveRoute, place_payload
from omnikv.handoff.keyed_receive import KeyedFetch, ReceivedPayload, fetch_until

logger = logging.getLogger("omnikv.receive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """When a request began and when its phases end, in seconds of the monotonic clock; every rank counts alike."""

    started: float
    fetch: float
    vote: float
    hand_on: float

    @classmethod
    def starting(cls, now: float, *, recv_timeout_s: float, vote_timeout_s: float) -> Deadlines:
        """Those of a request that begins `now`: the fetch, then the vote, then handing on, each bounded."""
        fetch = now + recv_timeout_s
        return cls(started=now, fetch=fetch, vote=fetch + vote_timeout_s, hand_on=fetch + 2 * vote_timeout_s)


@dataclass(slots=True)
class OpenRequest:
    """One request that is being received, under its own id and those of its companions.

    `failures` says why something did not come, by the id it travels under. `waiting` are the ids that another round may
    bring. `is_broken` says that something failed which no single id stands for, so that the request cannot count as
    received. `is_mixed` says that what came differs between ranks, so that a retry must have it sent anew.
    `fetches_companions` says that whoever waits for one of the ids waits for all.
    """

    deadlines: Deadlines
    ids: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    is_broken: bool = False
    is_mixed: bool = False
    fetches_companions: bool = False
    fetches: dict[str, KeyedFetch] = field(default_factory=dict)
    receive_again: Callable[[], bool] | None = None
    # The wait of this round: until when, and whether the request's time allows another.
    until: float = field(init=False)
    can_refetch: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.until = self.deadlines.fetch

    @property
    def request_id(self) -> str | None:
        """The id of the request itself."""
        return self.ids[0] if self.ids else None

    def begin_round(self, number: int, slice_s: float) -> None:
        """Nothing; waits end after another slice of the request's time from now on."""
        self.until, self.can_refetch = round_end(self.deadlines.started, self.deadlines.fetch, slice_s, number)

    def begin_attempt(self) -> None:
        """Nothing; forgets why things did not come: they are asked for again."""
        self.is_broken = False
        self.failures.clear()
        self.waiting.clear()

    def fetch(
        self,
        connector: Any,
        request_id: str,
        route: ReceiveRoute,
        *,
        device: torch.device | None,
        closing: threading.Event,
    ) -> ReceivedPayload:
        """The KV that travels under this id; waits until the round's end at most, and fetches the others meanwhile.

        Raises:
            OmniKVError: as `KeyedFetch.require`; a fetch that `waiting` names afterwards goes on in the next round.
        """
        for wanted in self.ids if self.fetches_companions and request_id == self.request_id else (request_id,):
            if wanted not in self.fetches:
                self.fetches[wanted] = KeyedFetch(connector, wanted, route, device=device, closing=closing)
        fetch = self.fetches[request_id]
        fetch.redirect(route)
        self._wait(fetch)
        received = fetch.require()
        # What an earlier receive or a prefetch brought may lie on another device.
        return replace(received, data=place_payload(request_id, received.data, (), device))

    def must_wait(self) -> bool:
        """Whether a companion is not here and another round may bring it; waits for all of them until this round's end.

        A model's function that collects companions is called once, so not before that is False.
        """
        if not self.can_refetch:
            return False
        companions = [fetch for fetch in self.fetches.values() if fetch.request_id != self.request_id]
        for fetch in companions:
            self._wait(fetch)
        return any(fetch.request_id in self.waiting for fetch in companions)

    def _wait(self, fetch: KeyedFetch) -> None:
        beside = [other for other in self.fetches.values() if other is not fetch]
        fetch_until(fetch, beside, until=self.until, deadline=self.deadlines.fetch)
        if not (fetch.is_over or fetch.is_closing):
            self.wait_for(fetch.request_id)
            self.failures[fetch.request_id] = fetch.spell_missing()

    def wait_for(self, request_id: str) -> None:
        """Nothing; notes that another round may bring what travels under this id, if there is one."""
        if self.can_refetch:
            self.waiting.add(request_id)

    def adopt(self, fetch: KeyedFetch) -> None:
        """Nothing; a fetch that began elsewhere goes on here, and is asked again for what it could not get."""
        self.give_up(fetch.request_id)
        fetch.retry()
        self.fetches[fetch.request_id] = fetch

    def give_up(self, request_id: str) -> None:
        """Nothing; a fetch under this id, if there is one, ends unused."""
        known = self.fetches.pop(request_id, None)
        if known is not None:
            known.give_back()

    def acknowledge(self) -> int:
        """How many payloads came whole, now that their senders are told that they were used. Idempotent."""
        used = [request_id for request_id, fetch in self.fetches.items() if fetch.payload is not None]
        for request_id in used:
            self.fetches.pop(request_id).acknowledge()
        return len(used)

    def give_back(self) -> dict[str, KeyedFetch]:
        """What came unused and no connector takes back, by id; all else is with its senders again."""
        fetches, self.fetches = self.fetches, {}
        return {request_id: fetch for request_id, fetch in fetches.items() if not fetch.give_back()}


class OpenRequests:
    """The requests that this rank is receiving now, by each id that belongs to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, OpenRequest] = {}
        self._left_over: dict[str, KeyedFetch] = {}

    def find(self, request_id: str) -> OpenRequest | None:
        """The open request that this id belongs to, as its own or as a companion's."""
        with self._lock:
            return self._by_id.get(request_id)

    def begin(self, ids: Sequence[str], deadlines: Deadlines) -> OpenRequest:
        """A request with what an earlier receive of these ids left over; what others left is dropped."""
        request = OpenRequest(deadlines, tuple(ids))
        if not ids:
            return request
        with self._lock:
            left_over, self._left_over = self._left_over, {}
        for request_id in ids:
            if request_id in left_over:
                request.adopt(left_over[request_id])
        return request

    @contextmanager
    def opened(self, ids: Sequence[str], deadlines: Deadlines) -> Iterator[tuple[OpenRequest, bool]]:
        """The request open under these ids, its own first, while the block runs, and whether it was opened here.

        One that is open already under the first id is entered, and stays open. What is not acknowledged at the end is
        given back, or left for a retry.
        """
        known = self.find(ids[0]) if ids else None
        if known is not None:
            yield known, False
            return
        request = self.begin(ids, deadlines)
        with self._lock:
            added = [request_id for request_id in dict.fromkeys(ids) if request_id not in self._by_id]
            self._by_id.update(dict.fromkeys(added, request))
        try:
            yield request, True
        finally:
            with self._lock:
                for request_id in added:
                    del self._by_id[request_id]
            self.leave(request)

    def leave(self, request: OpenRequest) -> None:
        """Nothing; gives back what the request holds, and keeps for a retry what cannot go back and is of use to it."""
        left_over = request.give_back()
        if left_over and not request.is_mixed:
            with self._lock:
                self._left_over = left_over
