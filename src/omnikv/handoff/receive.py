"""The receiving half of a handoff: every payload that a rank needs is leased, checked and put together.

Nothing is consumed here. What arrived stays leased while the rest is waited for, over as many rounds as it takes, so a
round fetches only what is missing; a set that turns out incomplete, broken or not agreed upon is given back whole and
can be asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from types import TracebackType

from omnikv.core.boxes import Boxes
from omnikv.core.keys import PayloadId
from omnikv.core.plan import Piece
from omnikv.errors import OmniKVError, ReceiveTimeout, TransportError
from omnikv.handoff.assemble import assemble
from omnikv.handoff.forecast import Forecast
from omnikv.handoff.part import Arrived, Prepared, prepare_part, read_part
from omnikv.handoff.received import ReceivedKV
from omnikv.transports.base import Lease, Transport

# How long a receive that has timed out asks what its sources hold instead, and what is to be discarded is looked for.
_LAST_LOOK_S = 0.05


class RoleFetch:
    """One role of one request on this rank: what arrived, what is missing, and what went wrong for good."""

    def __init__(
        self,
        role: str,
        wanted: Sequence[tuple[PayloadId, Piece]],
        boxes: Boxes,
        *,
        plain: bool = True,
        forecast: Forecast | None = None,
    ) -> None:
        """`boxes` are what this rank holds of the request; on a `plain` route they differ from its peers' in heads.

        `forecast` is the receiver's, which tells what to prepare for before it is known.
        """
        self.role = role
        self.plain = plain
        self.request_id = wanted[0][0].transfer_id
        self.kv: ReceivedKV | None = None
        # What no further fetch can mend; kept rather than raised, since a rank in a group must still vote.
        self.failure: OmniKVError | None = None
        self._pieces = dict(wanted)
        self._boxes = boxes
        self._started = time.monotonic()
        self._forecast = forecast or Forecast()
        self._arrived: dict[PayloadId, Arrived] = {}
        self._prepared: dict[PayloadId, Prepared | None] = {}
        self._others: tuple[str, ...] = ()

    @property
    def missing(self) -> list[PayloadId]:
        """The payloads that another fetch may bring; none when the role is complete or failed."""
        if self.kv is not None or self.failure is not None:
            return []
        return [identity for identity in self._pieces if identity not in self._arrived]

    def prepare(self, identity: PayloadId, memory: memoryview, head: bytes) -> None:
        """Nothing; does ahead what `take` would do for a part that lies in `memory` and begins with `head` in the end.

        An empty one is not known, and foretold. In no memory nothing is done, and nothing kept.
        """
        if not memory:
            self._prepared.pop(identity, None)
            return
        head = head or self._forecast.head_of(identity)
        known = self._prepared.get(identity)
        if head and (known is None or not known.is_of(memory, head)):
            self._prepared[identity] = prepare_part(identity, self._pieces[identity], memory, head)

    def take(self, identity: PayloadId, outcome: Lease | OmniKVError) -> None:
        """Nothing; keeps a part that came, and puts the role together when it was the last; or keeps why it cannot."""
        if isinstance(outcome, OmniKVError):
            self.failure = outcome
            return
        with ExitStack() as unless_kept:
            unless_kept.enter_context(outcome)
            try:
                waited_s = time.monotonic() - self._started
                prepared = self._prepared.pop(identity, None)
                part = read_part(identity, self._pieces[identity], outcome, waited_s, prepared)
                self._arrived[identity] = part
                unless_kept.pop_all()
                self._forecast.note(identity, part.payload.header, part.received.nbytes)
                if len(self._arrived) == len(self._pieces):
                    parts = [self._arrived[wanted] for wanted in self._pieces]
                    self.kv = assemble(parts, self._boxes, self.request_id)
                    # The leases are the result's now.
                    self._arrived = {}
            except OmniKVError as error:
                self.failure = error

    def require(self) -> ReceivedKV:
        """The role's KV; the caller closes it.

        Raises:
            ReceiveTimeout: a part is still missing; what had arrived was given back.
            OmniKVError: the failure that was met; what had arrived was given back.
        """
        if self.kv is not None:
            kv, self.kv = self.kv, None
            return kv
        missing, words = self.missing, self.spell_missing()
        self.give_back()
        if self.failure is not None:
            raise self.failure
        raise ReceiveTimeout(
            f"request {self.request_id!r}: {words}; nothing was consumed",
            request_id=self.request_id,
            rank=missing[0].source_rank,
        )

    def spell_missing(self) -> str:
        """What is missing, in words."""
        ranks = [identity.source_rank for identity in self.missing]
        words = f"nothing from source rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} by the deadline"
        if self._others:
            others = ", ".join(map(repr, self._others))
            words += f"; for this rank there lies {others} instead: both sides must call a request by one id"
        return words

    def look_for_others(self, transport: Transport) -> None:
        """Nothing; where something is missing, asks what lies there under other names, for what will be said of it."""
        if self.missing:
            self._others = transport.others_ready(self.missing[0], deadline=time.monotonic() + _LAST_LOOK_S)

    def give_back(self) -> None:
        """Nothing; everything that arrived goes back to its sender, unconsumed. Idempotent."""
        # Forgotten once all were given back: where Ctrl-C comes in between, giving back again gives the others.
        if self.kv is not None:
            self.kv.give_back()
        for part in self._arrived.values():
            part.lease.release()
        self.kv, self._arrived, self._prepared = None, {}, {}

    def __enter__(self) -> RoleFetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


def gather(transport: Transport, fetches: Mapping[RoleFetch, bool], *, deadline: float) -> None:
    """Nothing; takes what comes for any of the roles until all is here or `deadline` (monotonic seconds).

    All parts of all roles are waited for at once. `fetches` maps each role to whether it is required: once a required
    one has failed, nothing is worth waiting for.
    """
    waiting = {identity: fetch for fetch in fetches for identity in fetch.missing}

    def prepare(identity: PayloadId, memory: memoryview, head: bytes) -> None:
        waiting[identity].prepare(identity, memory, head)

    with closing(transport.get_as_ready(list(waiting), deadline=deadline, preview=prepare)) as arrivals:
        for identity, outcome in arrivals:
            with ExitStack() as on_failure:
                if not isinstance(outcome, OmniKVError):
                    # Interrupted (Ctrl-C) before it was kept; giving back twice does nothing.
                    on_failure.callback(outcome.release)
                fetch = waiting[identity]
                fetch.take(identity, outcome)
                on_failure.pop_all()
            if fetch.failure is not None and fetches[fetch]:
                return


def discard_payloads(transport: Transport, identities: Sequence[PayloadId]) -> int:
    """How many of the payloads were here and are now consumed unread; not those that are absent or failed.

    They are waited for a little: one that was just given back, or whose answer is under way to a receive that ended,
    looks absent for a moment. A transport that is closed has none.
    """
    count = 0
    with (
        suppress(TransportError),
        closing(transport.get_as_ready(identities, deadline=time.monotonic() + _LAST_LOOK_S)) as arrivals,
    ):
        for _, outcome in arrivals:
            if not isinstance(outcome, OmniKVError):
                outcome.acknowledge()
                count += 1
    return count
