"""Handing KV on from the rank that received it to the ranks that did not, over an engine's own groups.

KV goes down level by level (`ReceiveLayout.levels`): with tensor parallelism a leader scatters one payload to each rank
of its guidance (CFG) group, and the first rank of each sequence-parallel (SP) group broadcasts its own there; without
it one leader broadcasts everything to the ranks that run its request. Which calls a rank makes depends on its layout
alone, never on whether the KV came: a leader without KV sends None, so that no follower is left waiting. How a payload
goes over one group, packed or as an object, is `omnikv.handoff.level_calls`.

A follower that could not be served fails the request for its whole group:

* Where the leaders have a tensor-parallel group (`ReceiveLayout.confirms`), whoever was given KV brings it to its
  device and confirms that upwards, each leader brings the answers of its tree to a second vote of the leaders, and the
  result goes down again as the last word. Nobody uses KV before it.
* Where they have none, the published calls are all that followers expect. If nobody was given KV yet when a send fails,
  everybody gets None; otherwise one rank uses what another lacks, and the leader says so by `VerdictInDoubt`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omnikv.core.receive_role import Level, ReceiveLayout
from omnikv.core.roles import Payload, branch_payloads, collect_payload, ranks_without_kv
from omnikv.core.verdict import WHOLE_RANK, spell_causes
from omnikv.errors import OmniKVError, VerdictInDoubt
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.level_calls import DOUBT, NOTHING, Given, LevelCalls, ObjectCalls, PackedCalls

logger = logging.getLogger("omnikv.distribute")

Causes = tuple[tuple[int, str, str], ...]
_WHAT = "handing KV on"


@dataclass(slots=True, kw_only=True)
class _Way:
    """How far one request's KV came. `served` are the ranks given KV, by the place of their level; `causes` what broke.

    `gave` says that some other rank has the KV, or may have it. `failure` is what a group raised from above.
    """

    rank: int
    given: Given = NOTHING
    served: dict[int, list[int]] = field(default_factory=dict)
    causes: list[tuple[int, str, str]] = field(default_factory=list)
    gave: bool = False
    failure: Exception | None = None

    @property
    def payload(self) -> Any:
        return self.given.payload

    def blame(self, words: str) -> None:
        self.causes.append((self.rank, WHOLE_RANK, words))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandingOn:
    """One request's KV on its way down, as this rank takes part in it.

    `prepare` brings a payload to where this rank uses it. `settle` is the leaders' second vote: it is given what went
    wrong below this leader as (rank, role, words), and says whether all is well under every leader. `packs` says of a
    group whether its ranks give one another packed payloads. `deadline` is on the monotonic clock, in seconds.
    """

    layout: ReceiveLayout
    request_id: str | None
    prepare: Callable[[Payload], Payload]
    settle: Callable[[Causes], bool]
    calls: BoundedCalls
    deadline: float
    counters: Counter[str] = field(default_factory=Counter)
    packs: Callable[[Any], bool] = lambda group: False

    def run(self, req: Any, *, received: bool) -> Payload | None:
        """What this rank must apply to its request after every rank has made its calls; None for nothing.

        Raises:
            VerdictInDoubt: some ranks have the KV and others do not, or the groups did not answer by the deadline.
        """
        layout = self.layout
        if layout.is_local:
            return None
        way = _Way(rank=_world_rank(layout))
        parts = self._parts(req, way) if layout.is_leader and received else []
        self._call(lambda: self._hand_down(way, parts))
        if way.payload == DOUBT:
            raise self._doubted()
        if not layout.confirms:
            return self._use_unconfirmed(way)
        if way.payload is None and not (layout.is_leader and received):
            return None
        payload = self._prepare(way)
        if layout.is_leader:
            self._call(lambda: self._gather_answers(way))
            word: object = self._settle(way)
            self._call(lambda: self._pass_word_down(way, word))
        else:
            word = self._call(lambda: self._confirm_and_hear(way))
        if word == DOUBT:
            raise self._doubted()
        return payload if word else None

    def spread_doubt(self) -> None:
        """Nothing; this leader's followers learn that it is in doubt, as far as they can be reached.

        It makes the calls that its followers expect, so it is called instead of `run`.
        """
        parts: list[Any] = [DOUBT] * max(self.layout.cfg_size, 1)
        self._tell(lambda: self._hand_down(_Way(rank=_world_rank(self.layout)), parts))

    def _settle(self, way: _Way) -> bool:
        try:
            return self.settle(tuple(way.causes))
        except OmniKVError:
            self._tell(lambda: self._pass_word_down(way, DOUBT))
            raise

    def _tell(self, calls: Callable[[], object]) -> None:
        # The leaders' group is what failed; the followers' groups are others.
        try:
            BoundedCalls().make(_WHAT, calls, deadline=self.deadline, request_id=self.request_id)
        except OmniKVError as error:
            logger.warning("followers could not be told that request %s is in doubt: %s", self.request_id, error)

    def _doubted(self) -> VerdictInDoubt:
        return VerdictInDoubt(
            f"the leader of this rank does not know what became of request {self.request_id!r}; tear the group down",
            request_id=self.request_id,
        )

    def _use_unconfirmed(self, way: _Way) -> Payload | None:
        if not way.causes:
            return self.prepare(way.payload) if way.payload else None
        # A follower that lost what is below it has KV from above; a leader may not have given any yet.
        if way.gave or not self.layout.is_leader:
            raise VerdictInDoubt(
                f"KV of request {self.request_id!r} reached only a part of its ranks: {spell_causes(way.causes)}; tear "
                "the group down",
                request_id=self.request_id,
            )
        logger.error("no rank gets KV of request %s: %s", self.request_id, spell_causes(way.causes))
        return None

    def _call(self, calls: Callable[[], Any]) -> Any:
        def in_doubt_when_lost() -> Any:
            try:
                return calls()
            except OmniKVError as error:
                # What a peer of this group has now, or will do, nobody here can tell.
                raise VerdictInDoubt(str(error), request_id=self.request_id) from error

        return self.calls.make(_WHAT, in_doubt_when_lost, deadline=self.deadline, request_id=self.request_id)

    def _prepare(self, way: _Way) -> Payload | None:
        try:
            return self.prepare(way.payload) if way.payload else None
        # edge: just before this rank confirms; its peers wait for that, whatever its device raises.
        except Exception as error:
            logger.exception("KV of request %s came and could not be brought to its device", self.request_id)
            way.blame(f"could not bring it to its device: {type(error).__name__}: {error}")
            return None

    def _hand_down(self, way: _Way, parts: list[Payload | None]) -> None:
        way.given = Given(parts[0] if parts else None)
        for at, level in enumerate(self.layout.levels()):
            if level.rank != 0:
                self._take(level, way)
            elif level.splits:
                served = [self._send(level, rank, parts[rank] if parts else None, way) for rank in range(1, level.size)]
                way.served[at] = [rank for rank, was_served in enumerate(served, 1) if was_served]
            elif self._broadcast(level, way):
                way.served[at] = list(range(1, level.size))
        if way.failure is not None:
            raise way.failure

    def _parts(self, req: Any, way: _Way) -> list[Payload | None]:
        """One payload a rank of the guidance group, or the one payload that everybody gets; none of what cannot go."""
        layout, size = self.layout, self.layout.cfg_size
        try:
            if not (layout.tp_active and layout.cfg_active):
                return [collect_payload(req) or None]
            parts = branch_payloads(req, size)
        # edge: the request is an engine's object; the followers wait for a message whatever is wrong with it.
        except Exception as error:
            logger.exception("KV of request %s could not be split by guidance branch; no rank gets it", self.request_id)
            way.blame(f"could not split it by guidance branch: {error}")
            return []
        return self._complete(parts, way)

    def _complete(self, parts: list[Payload | None], way: _Way) -> list[Payload | None]:
        lacking = ranks_without_kv(parts)
        found = sum(part is not None for part in parts) - 1
        for rank in lacking:
            self.counters["cfg_ranks_without_kv"] += 1
            logger.error(
                "rank %d of the guidance group of %d gets no KV for request %s: the producer split it into %d "
                "branches; send one branch a rank, or use a group of 2, which shares the main KV",
                rank, len(parts), self.request_id, found,
            )  # fmt: skip
        if lacking and not found:
            # D07: a prefix that nobody split cannot serve some ranks and leave the others without one.
            way.blame(f"has no KV for guidance ranks {lacking}: the producer sent one shared prefix")
            return []
        return parts

    def _over(self, level: Level) -> LevelCalls:
        return PackedCalls(level.group, deadline=self.deadline) if self.packs(level.group) else ObjectCalls(level.group)

    def _take(self, level: Level, way: _Way) -> None:
        try:
            calls = self._over(level)
            way.given = calls.receive() if level.splits else calls.receive_broadcast()
        # edge: the group is an engine's; the ranks below this one wait for a message whatever it raises.
        except Exception as error:  # noqa: BLE001
            way.failure, way.given = error, NOTHING

    def _send(self, level: Level, rank: int, part: Payload | None, way: _Way) -> bool:
        """Whether this rank was given KV. Once one could not be given any, the others are not either."""
        part = None if way.causes else part
        try:
            self._over(level).send(Given(part), rank)
        # edge: the group is an engine's, and one follower that cannot be served must not keep the others waiting.
        except Exception as error:
            logger.exception("KV of request %s could not be sent to guidance rank %d", self.request_id, rank)
            self.counters["cfg_scatter_failed"] += 1
            way.blame(f"could not send it to guidance rank {rank}: {error}")
            self._send_nothing(level, rank, way)
            return False
        way.gave = way.gave or part is not None
        return part is not None

    def _send_nothing(self, level: Level, rank: int, way: _Way) -> None:
        try:
            self._over(level).send(NOTHING, rank)
        # edge: the same group failed a moment ago.
        except Exception:
            logger.exception("guidance rank %d could not even be told that there is no KV", rank)
            way.gave = True  # Nobody knows what it has.

    def _broadcast(self, level: Level, way: _Way) -> bool:
        """Whether the ranks below were given KV."""
        given = NOTHING if way.causes or way.failure is not None else way.given
        try:
            self._over(level).broadcast(given)
        # edge: the group is an engine's. What cannot be packed failed before anything left; None can still be told.
        except Exception as error:
            logger.exception("KV of request %s could not be broadcast", self.request_id)
            self.counters["broadcast_failed"] += 1
            way.blame(f"could not broadcast it: {error}")
            self._over(level).broadcast(NOTHING)
            return False
        way.gave = way.gave or given.payload is not None
        return given.payload is not None

    def _gather_answers(self, way: _Way) -> None:
        levels = self.layout.levels()
        for at in sorted(way.served, reverse=True):
            for rank in way.served[at]:
                way.causes += [tuple(cause) for cause in levels[at].group.recv_object(src=rank)]

    def _confirm_and_hear(self, way: _Way) -> object:
        self._gather_answers(way)
        above = [level for level in self.layout.levels() if level.rank != 0][-1]
        above.group.send_object(way.causes, dst=0)
        word: object = above.group.recv_object(src=0) if above.splits else above.group.broadcast_object(None, src=0)
        self._pass_word_down(way, word)
        return word

    def _pass_word_down(self, way: _Way, word: object) -> None:
        levels = self.layout.levels()
        for at, ranks in sorted(way.served.items()):
            if not levels[at].splits:
                levels[at].group.broadcast_object(word, src=0)
                continue
            for rank in ranks:
                levels[at].group.send_object(word, dst=rank)


def _world_rank(layout: ReceiveLayout) -> int:
    return int(getattr(layout.world, "rank_in_group", layout.cfg_rank * layout.sp_size + layout.sp_rank))
