"""A distributed receive through an engine's groups: receive, vote, hand on, in an order that no rank leaves.

Between the start of a receive and the vote nothing may leave a rank: whatever goes wrong becomes "not received", since
its peers already wait for its vote. After a negative verdict every rank drops what it holds, and keeps what the request
came with, so that all take the same other way and a retry can ask again.

Two dialects of the vote. The published one compares which fields ranks hold, call for call as released engines do, once
a request. The other compares contents: each role with its tokens, layers and dtype (X12), over `omnikv.groups`, says in
words which rank lacks what, and goes in rounds: a rank waits for a slice of the request's time, votes, and where some
rank still waits for something that may come, that rank fetches that again before all vote once more. So a failure
anywhere is known everywhere within a slice, and a late shard costs no rank what it has. `VoteRules` decides between the
two by values that are equal on every rank of a group.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from omnikv.core.keys import PRIMARY_ROLE
from omnikv.core.messages import Ballot, Ruling
from omnikv.core.published_vote import published_signature, should_exchange
from omnikv.core.receive_role import ReceiveLayout
from omnikv.core.roles import branch_roles, collect_payload, companion_ids, missing_roles, primary_kv
from omnikv.core.verdict import MAX_ROUNDS, spell_causes, tells_of_difference
from omnikv.errors import LocalProtocolError
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.engine_ballot import ballot_of, done_ballot, failed_ballot, vote_key
from omnikv.handoff.engine_request import drop_payload
from omnikv.handoff.engine_seat import Seats, VotesOver, is_process_group
from omnikv.handoff.object_agreement import PublishedVerdict, agree_on_state
from omnikv.handoff.open_request import OpenRequest

logger = logging.getLogger("omnikv.agree")

Causes = tuple[tuple[int, str, str], ...]
Dialect = Literal["auto", "published", "contents"]
# What the leaders' second vote is about.
_HANDING_ON = "handing on"


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRules:
    """How the ranks of a stage agree; every rank must be given the same.

    `dialect` "auto" compares contents where the group is a real process group, whose ranks all run this code, and takes
    the published exchange where it has the object methods alone. `over` says what carries the contents. The companions
    named by `required_roles` fail a request that lacks them, even where all ranks do. `slice_s` is how long a round of
    a vote on contents waits for what is missing.
    """

    need_recv_cache: bool
    dialect: Dialect = "auto"
    over: VotesOver = "auto"
    required_roles: tuple[str, ...] = ()
    slice_s: float = 0.5

    def compares_contents(self, group: Any) -> bool:
        """Whether ranks of this group show each other contents rather than names of fields."""
        return self.dialect == "contents" or (self.dialect == "auto" and is_process_group(group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request to be voted on, as this rank knows it. `deadline` is on the monotonic clock, in seconds."""

    req: Any
    layout: ReceiveLayout
    request: OpenRequest
    request_id: str | None
    received: bool
    deadline: float


class Lockstep:
    """This rank's part in the votes of its stage; close it to give up its seats."""

    def __init__(
        self,
        rules: VoteRules,
        counters: Counter[str],
        calls: BoundedCalls,
        *,
        channel_address: tuple[str, int] | None = None,
    ) -> None:
        self._rules = rules
        self._counters = counters
        self._calls = calls
        facts = {name: str(value) for name, value in asdict(rules).items()}
        self._seats = Seats(rules.over, facts=facts, channel_address=channel_address)

    def begin_rounds(self, layout: ReceiveLayout, request: OpenRequest, receive: Callable[[], bool]) -> None:
        """Nothing; where the ranks vote in rounds, the request waits for the first only, and may call `receive` again.

        In the published dialect, and where nobody votes, it waits until its deadline.
        """
        if self._votes(layout, request.request_id) and self._rules.compares_contents(layout.tp_group):
            request.receive_again = receive
            request.begin_round(0, self._rules.slice_s)

    def settle(self, case: Case) -> bool:
        """Whether this rank still holds the request's KV, after its tensor-parallel group compared what its ranks hold.

        Without a vote (see `should_exchange`) that is whether it came and lacks no required companion. When the ranks
        drop it, each clears its request.

        Raises:
            VerdictInDoubt: this rank voted and cannot learn the verdict; tear the group down.
            RemoteProtocolError: a peer votes in another way; the same holds.
            ConfigError: the votes were to go over a channel, and the group is no process group.
        """
        if not self._votes(case.layout, case.request_id):
            return self._kept_alone(case)
        if self._rules.compares_contents(case.layout.tp_group):
            return self._vote_on_contents(case)
        return self._vote_as_published(case)

    def settle_handing_on(self, case: Case, causes: Causes) -> bool:
        """Whether every leader of the group served all its followers; `causes` says whom this one could not.

        Raises:
            VerdictInDoubt: this rank voted and cannot learn the verdict; tear the group down.
            RemoteProtocolError: a peer votes in another way; the same holds.
        """
        if not self._votes(case.layout, case.request_id):
            return not causes
        words = spell_causes(causes)
        if self._rules.compares_contents(case.layout.tp_group):
            ballot = failed_ballot(_HANDING_ON, words) if causes else done_ballot(_HANDING_ON)
            seat = self._seats.of(case.layout.tp_group, deadline=case.deadline)
            ruling = seat.agree(vote_key(case.request_id, _HANDING_ON), ballot, deadline=case.deadline)
            return ruling.kind == "keep" or self._dropped(case, ruling.causes)
        verdict = self._exchange(case, published_signature(not causes, ()))
        return (verdict.kept and not causes) or self._dropped(case, causes)

    def close(self) -> None:
        """Give up this rank's seats; a vote afterwards fails. Idempotent."""
        self._seats.close()

    def _votes(self, layout: ReceiveLayout, request_id: str | None) -> bool:
        return should_exchange(
            fetches=not layout.is_follower,
            tp_active=layout.tp_active,
            has_group=layout.tp_group is not None,
            tp_size=layout.tp_size,
            need_recv_cache=self._rules.need_recv_cache,
            request_id=request_id,
        )

    def _vote_as_published(self, case: Case) -> bool:
        received, fields = self._published_state(case)
        verdict = self._exchange(case, published_signature(received, fields))
        if not verdict.kept:
            return self._dropped(case, verdict.causes)
        return self._warned(case) if received else self._cleared_of_parts(case)

    def _published_state(self, case: Case) -> tuple[bool, list[str]]:
        try:
            return case.received and not self._lacks_required(case.req), list(collect_payload(case.req))
        # edge: just before the vote; a request that cannot be read must not keep this rank from voting.
        except Exception:
            logger.exception("request %s could not be read for the vote", case.request_id)
            return False, []

    def _exchange(self, case: Case, signature: tuple[bool, tuple[str, ...]]) -> PublishedVerdict:
        layout = case.layout
        return agree_on_state(
            layout.tp_group,
            layout.tp_size,
            signature,
            str(case.request_id),
            calls=self._calls,
            deadline=case.deadline,
        )

    def _vote_on_contents(self, case: Case) -> bool:
        seat = self._seats.of(case.layout.tp_group, deadline=case.deadline)
        for number in range(MAX_ROUNDS):
            if number:
                case = self._fetched_again(case, number)
            ruling = seat.agree(vote_key(case.request_id), self._ballot(case, number), deadline=case.deadline)
            if ruling.kind != "refetch":
                return self._warned(case) if _keeps(ruling, seat.size) else self._dropped(case, ruling.causes)
            logger.debug("request %s, round %d: %s", case.request_id, number, spell_causes(ruling.causes))
        raise LocalProtocolError(f"request {case.request_id!r} was to be fetched again after {MAX_ROUNDS} rounds")

    def _fetched_again(self, case: Case, number: int) -> Case:
        request = case.request
        request.begin_round(number, self._rules.slice_s)
        if not request.waiting or request.receive_again is None:
            return case
        self._counters["refetched"] += 1
        return replace(case, received=request.receive_again())

    def _ballot(self, case: Case, number: int) -> Ballot:
        request = case.request
        try:
            return ballot_of(
                case.req,
                received=case.received,
                request_id=str(case.request_id),
                required=self._rules.required_roles,
                failures=request.failures,
                waiting=request.waiting,
                round_number=number,
                can_refetch=request.can_refetch,
            )
        # edge: just before the vote; a request that cannot be read must not keep this rank from voting.
        except Exception as error:
            logger.exception("request %s could not be read for the vote", case.request_id)
            return failed_ballot(PRIMARY_ROLE, f"{type(error).__name__}: {error}", round_number=number)

    def _kept_alone(self, case: Case) -> bool:
        # Nothing is asked of a request that no stage sends KV for.
        if not (case.received and self._rules.need_recv_cache):
            return case.received
        return self._warned(case) if not self._lacks_required(case.req) else self._dropped(case, ())

    def _cleared_of_parts(self, case: Case) -> bool:
        # All ranks lack the same. With nothing required that state is kept, as published; but no KV may stay that
        # every rank calls not received.
        return self._dropped(case, ()) if self._rules.required_roles or primary_kv(case.req) is not None else False

    def _warned(self, case: Case) -> bool:
        missing = missing_roles(case.req)
        if missing:
            self._counters["companions_missing"] += 1
            causes = spell_causes(self._own_causes(case))
            logger.warning(
                "request %s goes on without the companions %s: %s", case.request_id, ", ".join(missing), causes
            )
        return True

    def _dropped(self, case: Case, causes: Causes) -> bool:
        mine = {cause[:2]: cause for cause in self._own_causes(case)}
        told = {cause[:2]: cause for cause in causes}
        merged = tuple(cause for _, cause in sorted({**told, **mine}.items()))
        case.request.is_mixed = tells_of_difference(causes)
        self._counters["dropped"] += 1
        self._counters.update(f"rank {rank} lacks {role or 'a vote'}" for rank, role, _ in merged)
        words = spell_causes(merged) or f"rank 0 saw a difference; rank {_rank(case.layout)} lacks nothing"
        logger.warning("KV of request %s is dropped on every rank of its group: %s", case.request_id, words)
        drop_payload(case.req, case.request_id)
        return False

    def _own_causes(self, case: Case) -> Causes:
        rank, own = _rank(case.layout), []
        try:
            ids, lacking = companion_ids(case.req), missing_roles(case.req, self._rules.required_roles)
            own = [(role, case.request.failures.get(ids.get(role, ""), "not received")) for role in lacking]
        # edge: the request is an engine's object, and these are only words.
        except Exception as error:  # noqa: BLE001
            logger.debug("the companions of request %s could not be read: %s", case.request_id, error)
        if not case.received:
            own.append((PRIMARY_ROLE, case.request.failures.get(str(case.request_id), "not received")))
        return tuple((rank, role, words) for role, words in sorted(own))

    def _lacks_required(self, req: Any) -> bool:
        return not set(self._rules.required_roles) <= set(branch_roles(req))


def _keeps(ruling: Ruling, size: int) -> bool:
    # An optional role that no rank has is the same state everywhere; one that only some have is not.
    lacking = Counter(role for _, role, _ in ruling.causes)
    return ruling.kind == "keep" and all(number == size for number in lacking.values())


def _rank(layout: ReceiveLayout) -> int:
    return int(getattr(layout.tp_group, "rank_in_group", 0))
