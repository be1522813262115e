"""Receiving where several ranks share KV: one of them reads, the others get their part from it, all go the same way.

The ranks of a stage with guidance- and sequence-parallel groups need the same heads several times, and a payload is
fetched once. For each tensor-parallel place one rank is the reader, elected by the mesh (`MeshGroups.sharing`):

    readers   fetch every role, and vote among themselves on what came (`KVReceiver.receive_together`)
    down      each reader packs one bundle a guidance rank, with that rank's branch alone, and sends it; the first rank
              of each sequence group broadcasts the same bytes there
    all       every rank that runs the request votes on whether it has its part: all use it, or none does

Every rank makes these steps for every request, whatever went wrong before: a reader without KV says so and why in a
parcel of its own, and what fails on a rank becomes its vote. Payloads stay leased until the last vote, so a request
that is dropped because one follower could not be served can be fetched again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from omnikv.config import HandoffConfig
from omnikv.core.keys import PRIMARY_ROLE, PayloadId
from omnikv.core.reshard import Route
from omnikv.core.sharing import roles_of_guidance_ranks
from omnikv.core.verdict import spell_causes
from omnikv.errors import OmniKVError, TopologyError, VerdictInDoubt
from omnikv.groups.channel import Channel
from omnikv.groups.device_mesh import MeshGroups
from omnikv.groups.parcels import Parcel, ParcelKind, ParcelPost
from omnikv.groups.torch_dist import TorchDistGroup
from omnikv.handoff.agree import Outcome
from omnikv.handoff.api import KVReceiver, seconds
from omnikv.handoff.shared_part import Part, ballot_of_part, pack_part, unpack_part

logger = logging.getLogger("omnikv.share")


@dataclass(slots=True)
class Traffic:
    """Bytes that went through this rank so far: fetched from the sending stage, given to peers, taken from one.

    A broadcast counts once for each rank that it reaches.
    """

    fetched_nbytes: int = 0
    given_nbytes: int = 0
    taken_nbytes: int = 0


class SharedReceiver:
    """One rank's end of a receive that the ranks of a mesh make together. For one request at a time."""

    def __init__(
        self,
        route: Route,
        groups: MeshGroups,
        *,
        roles: Sequence[str] = (PRIMARY_ROLE,),
        transport: str | None = None,
        options: Mapping[str, Any] | None = None,
        config: HandoffConfig | None = None,
        deadline: float,
    ) -> None:
        """Every rank of the request must call this, with the same arguments.

        `route` leads to the readers, one target rank a tensor-parallel place. `roles` are what the producer sends of
        each request, all of them required; guidance rank n works on the n-th. `deadline` (monotonic seconds) bounds
        the forming of the channels that carry the votes.

        Raises:
            TopologyError: some guidance rank would run without KV, or the route's target ranks are not the readers.
            ConfigError: ranks were configured differently.
            ConnectError, VerdictInDoubt: the ranks did not find one another by the deadline.
            TransportUnavailable: the transport cannot start here.
        """
        self.config = (config or HandoffConfig()).with_overrides(transport=transport, options=options)
        self.traffic = Traffic()
        self._edge = route.edge
        self._groups = groups
        self._roles = tuple(roles)
        self._roles_by_rank = roles_of_guidance_ranks(roles, groups.sizes["cfg"])
        if route.num_target_ranks != groups.sizes["tp"]:
            raise TopologyError(
                f"the route has {route.num_target_ranks} target ranks and the mesh {groups.sizes['tp']} tensor-"
                "parallel places: state the heads of one reader a place"
            )
        facts = {**self.config.facts(), **route.facts(), "roles": ", ".join(roles)}
        with ExitStack() as unless_formed:
            self._receiver: KVReceiver | None = None
            if groups.is_reader:
                votes = Channel.form(TorchDistGroup(groups.tp), facts=facts, deadline=deadline)
                unless_formed.enter_context(votes)
                self._receiver = KVReceiver(route, groups.places["tp"], group=votes, config=self.config)
                unless_formed.enter_context(self._receiver)
            self._lockstep = Channel.form(TorchDistGroup(groups.lockstep), facts=facts, deadline=deadline)
            unless_formed.enter_context(self._lockstep)
            self._open = unless_formed.pop_all()
        self._cfg_post, self._sp_post = ParcelPost(groups.cfg), ParcelPost(groups.sp)

    def receive_together(self, request_id: str, *, timeout_s: float | None = None, attempt: int = 0) -> Outcome:
        """The outcome, the same on every rank: each has the roles of its own guidance branch, or none has any.

        Close it when the KV was used. After "drop" the payloads are with their senders again, unconsumed.

        Raises:
            ConfigError: the request id, attempt or timeout is none.
            VerdictInDoubt: this rank cannot learn what the others do; tear the stage's groups down.
        """
        wait_s = self.config.receive_timeout_s if timeout_s is None else seconds(timeout_s)
        self._require_identity(request_id, attempt)
        self._require_whole_groups(request_id)
        fetched_by = time.monotonic() + wait_s + self.config.vote_timeout_s
        handed_on_by = fetched_by + self.config.vote_timeout_s
        with ExitStack() as unless_kept:
            # Whoever leaves without a ruling leaves its peers to learn it at once, from the end of its connections.
            unless_kept.callback(self._lockstep.close)
            fetched = self._fetch(request_id, wait_s, attempt, handed_on_by)
            given_back = unless_kept.enter_context(ExitStack())
            for kv in fetched.roles.values() if fetched is not None else ():
                given_back.callback(kv.give_back)
            part = self._get_part(request_id, fetched, handed_on_by)
            ruling = self._lockstep.agree(
                f"{request_id}/{attempt}", ballot_of_part(part), deadline=handed_on_by + self.config.vote_timeout_s
            )
            if ruling.kind == "keep":
                given_back.pop_all()
            else:
                given_back.close()
            unless_kept.pop_all()
        if ruling.kind != "keep" or part.roles is None:
            return Outcome(request_id=request_id, verdict="drop", causes=ruling.causes, rounds=part.rounds)
        for role, kv in fetched.roles.items() if fetched is not None else ():
            if role not in part.roles:
                # Another rank's branch, which has it by now.
                kv.close()
        return Outcome(request_id=request_id, verdict="keep", roles=part.roles, rounds=part.rounds)

    def discard(self, request_id: str, *, attempt: int = 0) -> int:
        """How many parts of a dropped request were at this reader and are now consumed unread; 0 on other ranks."""
        if self._receiver is None:
            return 0
        return sum(self._receiver.discard(request_id, role=role, attempt=attempt) for role in self._roles)

    def close(self) -> None:
        """Nothing; leaves the votes and closes the transport. Idempotent."""
        self._open.close()

    def __enter__(self) -> SharedReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_identity(self, request_id: str, attempt: int) -> None:
        # Refused on every rank alike, not by the reader alone while its followers wait for it.
        for role in self._roles:
            PayloadId(edge=self._edge, transfer_id=request_id, role=role, attempt=attempt, source_rank=0, target_rank=0)

    def _require_whole_groups(self, request_id: str) -> None:
        broken = self._cfg_post.broken or self._sp_post.broken
        if broken is not None:
            # Its peers learn that from the end of this rank's connections.
            self._lockstep.close()
            raise VerdictInDoubt(
                f"the groups through which KV is handed on failed before ({broken}); tear them down",
                request_id=request_id,
            )

    def _fetch(self, request_id: str, wait_s: float, attempt: int, handed_on_by: float) -> Outcome | None:
        if self._receiver is None:
            return None
        try:
            fetched = self._receiver.receive_together(
                request_id, timeout_s=wait_s, required=self._roles, attempt=attempt
            )
        except OmniKVError as error:
            doubt = Parcel.words(ParcelKind.DOUBT, str(error))
            self._hand_down(lambda rank: doubt, handed_on_by)
            raise
        self.traffic.fetched_nbytes += sum(kv.nbytes for kv in fetched.roles.values())
        return fetched

    def _get_part(self, request_id: str, fetched: Outcome | None, deadline: float) -> Part:
        try:
            return self._handed_on(request_id, fetched, deadline)
        except VerdictInDoubt:
            raise
        # edge: just before the vote; a rank that left here would hang its peers, so every error becomes its ballot.
        except Exception as error:
            logger.warning("request %r: this rank's part could not be handed on", request_id, exc_info=True)
            return Part(why_not=f"{type(error).__name__}: {error}")

    def _handed_on(self, request_id: str, fetched: Outcome | None, deadline: float) -> Part:
        started = time.monotonic()
        parcel, failure = self._hand_down(lambda rank: self._parcel_for(rank, fetched), deadline)
        if parcel.kind is ParcelKind.DOUBT:
            raise VerdictInDoubt(
                f"the reader of this rank does not know what became of request {request_id!r}: {parcel.text}; tear the "
                "group down",
                request_id=request_id,
            )
        if failure is not None or parcel.kind is ParcelKind.NOTHING:
            return Part(why_not=str(failure or parcel.text))
        if fetched is not None:
            mine = {role: fetched.roles[role] for role in self._roles_by_rank[0]}
            return Part(roles=mine, rounds=fetched.rounds)
        return unpack_part(request_id, parcel.data, time.monotonic() - started)

    def _parcel_for(self, rank: int, fetched: Outcome | None) -> Parcel:
        """What this reader gives to a guidance rank; one whose part cannot be packed is told so in its place."""
        if fetched is None or fetched.verdict == "drop":
            return Parcel.words(ParcelKind.NOTHING, spell_causes(fetched.causes if fetched is not None else ()))
        if rank == 0 and self._groups.sizes["sp"] == 1:
            # Nobody takes the reader's own part where no sequence group shares it.
            return Parcel.words(ParcelKind.BUNDLE, "")
        roles = {role: fetched.roles[role] for role in self._roles_by_rank[rank]}
        try:
            return Parcel(ParcelKind.BUNDLE, pack_part(Part(roles=roles, rounds=fetched.rounds)))
        except (OmniKVError, RuntimeError) as error:
            logger.warning("the part of guidance rank %d could not be packed", rank, exc_info=True)
            return Parcel.words(ParcelKind.NOTHING, f"its part could not be packed: {error}")

    def _hand_down(self, parcel_for: Callable[[int], Parcel], deadline: float) -> tuple[Parcel, OmniKVError | None]:
        """This rank's own parcel and what failed, after its calls: every rank makes those that its peers expect."""
        groups, failure = self._groups, None
        if groups.places["sp"] != 0:
            return self._taken(self._sp_post.broadcast(None, deadline=deadline)), None
        if groups.places["cfg"] == 0:
            # One after the other, so that no more than one part of a request is here twice at a time.
            for rank in range(1, groups.sizes["cfg"]):
                failure = self._send(parcel_for(rank), rank, deadline) or failure
            parcel = parcel_for(0)
        else:
            try:
                parcel = self._taken(self._cfg_post.receive(0, deadline=deadline))
            except OmniKVError as error:
                failure, parcel = error, Parcel.words(ParcelKind.NOTHING, str(error))
        if groups.sizes["sp"] > 1:
            try:
                self._sp_post.broadcast(parcel, deadline=deadline)
                self.traffic.given_nbytes += parcel.nbytes * (groups.sizes["sp"] - 1)
            except OmniKVError as error:
                failure = error
        return parcel, failure

    def _send(self, parcel: Parcel, rank: int, deadline: float) -> OmniKVError | None:
        """What went wrong; the other ranks are served all the same, since they wait for it."""
        try:
            self._cfg_post.send(parcel, rank, deadline=deadline)
        except OmniKVError as error:
            return error
        self.traffic.given_nbytes += parcel.nbytes
        return None

    def _taken(self, parcel: Parcel) -> Parcel:
        self.traffic.taken_nbytes += parcel.nbytes
        return parcel
