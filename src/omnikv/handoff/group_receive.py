"""One rank's way through a distributed receive: open the request, receive, settle, hand on, conclude.

This ties together what each knows one part: `open_request` the deadlines and what is fetched, `lockstep` the votes,
`distribute` the way from leaders to followers. Every rank of a stage makes the same steps for the same requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omnikv.core.receive_role import ReceiveLayout
from omnikv.core.roles import Payload
from omnikv.errors import OmniKVError
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.distribute import Causes, HandingOn
from omnikv.handoff.engine_request import drop_payload, ids_of, received_until_vote, request_id_of
from omnikv.handoff.level_calls import takes_packed
from omnikv.handoff.lockstep import Case, Lockstep, VoteRules
from omnikv.handoff.open_request import Deadlines, OpenRequest, OpenRequests
from omnikv.tensors.place import move_tensors

ResolveId = Callable[[Any], str | None]


class GroupReceive:
    """The receives of one rank together with its groups; close it to give up its seats in their votes.

    `timeouts_s` says how long a receive may take and how long its vote, in seconds. `channel_address` is where this
    rank listens for the votes of its group if it is the group's rank 0 and the others run on other hosts.
    """

    def __init__(
        self,
        rules: VoteRules,
        timeouts_s: Callable[[], tuple[float, float]],
        counters: Counter[str],
        *,
        channel_address: tuple[str, int] | None = None,
    ) -> None:
        self._rules = rules
        self._timeouts_s = timeouts_s
        self._counters = counters
        self._calls = BoundedCalls()
        self._lockstep = Lockstep(rules, counters, self._calls, channel_address=channel_address)
        self._open = OpenRequests()

    def begin(self, request_id: str) -> OpenRequest:
        """A receive that nobody else takes part in, with what an earlier one left over."""
        return self._open.begin((request_id,), self._deadlines())

    @contextmanager
    def opened(self, req: Any, resolve: ResolveId) -> Iterator[tuple[OpenRequest, bool]]:
        """The request, open while the block runs, and whether it was opened here; one that is open already is entered.

        What came for it goes back to its senders at the end unless it was acknowledged.
        """
        with self._open.opened(ids_of(req, request_id_of(req, resolve)), self._deadlines()) as opened:
            yield opened

    @contextmanager
    def opened_id(self, request_id: str) -> Iterator[tuple[OpenRequest, bool]]:
        """As `opened`, for an id: that of an open request, or of one of its companions, or one that stands alone."""
        with self._open.opened((request_id,), self._deadlines()) as opened:
            yield opened

    def receive(self, receive: Callable[[], bool], request: OpenRequest, layout: ReceiveLayout) -> bool:
        """What `receive` says, or False with the cause noted in `request`: nothing but a request to stop gets out.

        Where the ranks vote in rounds it waits for the first of them only, and may be called again.
        """

        def attempt() -> bool:
            return received_until_vote(receive, request, self._counters)

        self._lockstep.begin_rounds(layout, request, attempt)
        return attempt()

    def settle(self, req: Any, layout: ReceiveLayout, resolve: ResolveId, *, received: bool) -> bool:
        """Whether this rank still holds the request's KV after its tensor-parallel group voted, if it votes.

        Raises:
            VerdictInDoubt: this rank voted and cannot learn the verdict; tear the group down.
            RemoteProtocolError: a peer votes in another way; the same holds.
            ConfigError: votes were to go over a channel, and the group is no process group.
        """
        case = self._case(req, layout, resolve, received=received)
        try:
            return self._lockstep.settle(case)
        except OmniKVError:
            if layout.is_leader:
                hands_on = self._case(req, layout, resolve, received=False, hands_on=True)
                self._handing_on(hands_on, None).spread_doubt()
            raise

    def hand_on(
        self, req: Any, layout: ReceiveLayout, resolve: ResolveId, *, received: bool, device: torch.device | None
    ) -> Payload | None:
        """What this rank must set on its request, on `device`, after leaders handed their KV on; None for nothing.

        Raises:
            VerdictInDoubt: some ranks have the KV and others do not, or the groups do not answer; tear them down.
        """
        case = self._case(req, layout, resolve, received=received, hands_on=True)
        return self._handing_on(case, device).run(req, received=received)

    def conclude(
        self, req: Any, layout: ReceiveLayout, request: OpenRequest, *, received: bool, handed_on: bool
    ) -> bool:
        """Whether this rank uses the request's KV; what came for it is acknowledged then, and given back otherwise."""
        if not handed_on and (layout.is_leader or request.is_broken):
            # A leader that handed nothing on must not use what its followers lack.
            drop_payload(req, request.request_id)
            received = False
        if received or handed_on:
            self.acknowledge(request)
        return received or handed_on

    def acknowledge(self, request: OpenRequest) -> None:
        """Nothing; tells the senders that what came for the request was used."""
        self._counters["received"] += request.acknowledge()

    def close(self) -> None:
        """Give up this rank's seats; a vote afterwards fails. Idempotent."""
        self._lockstep.close()

    def _handing_on(self, case: Case, device: torch.device | None) -> HandingOn:
        def settle(causes: Causes) -> bool:
            return self._lockstep.settle_handing_on(case, causes)

        return HandingOn(
            layout=case.layout,
            request_id=case.request_id,
            prepare=lambda payload: move_tensors(payload, device),
            settle=settle,
            calls=self._calls,
            deadline=case.deadline,
            counters=self._counters,
            packs=self._packs,
        )

    def _packs(self, group: Any) -> bool:
        # As with the votes: what released engines do stays what their peers see, where a setting asks for that.
        return self._rules.dialect != "published" and self._rules.over != "objects" and takes_packed(group)

    def _deadlines(self) -> Deadlines:
        recv_timeout_s, vote_timeout_s = self._timeouts_s()
        return Deadlines.starting(time.monotonic(), recv_timeout_s=recv_timeout_s, vote_timeout_s=vote_timeout_s)

    def _case(
        self, req: Any, layout: ReceiveLayout, resolve: ResolveId, *, received: bool, hands_on: bool = False
    ) -> Case:
        request_id = request_id_of(req, resolve)
        request = self._open.find(request_id or "") or OpenRequest(self._deadlines())
        deadlines = request.deadlines
        return Case(
            req=req,
            layout=layout,
            request=request,
            request_id=request_id,
            received=received,
            deadline=deadlines.hand_on if hands_on else deadlines.vote,
        )
