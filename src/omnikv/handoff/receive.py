"""The receiving half of a handoff: every payload that a rank needs is leased, checked and put together.

Nothing is consumed here. What arrived stays leased while the rest is waited for, over as many rounds as it takes, so a
round fetches only what is missing; a set that turns out incomplete, broken or not agreed upon is given back whole and
can be asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from omnikv.core.keys import PayloadId
from omnikv.core.reshard import Piece
from omnikv.errors import HandoffError, OmniKVError, ReceiveTimeout, TransportError
from omnikv.handoff.assemble import Arrived, assemble, read_part
from omnikv.handoff.received import ReceivedKV
from omnikv.transports.base import Transport


class RoleFetch:
    """One role of one request on this rank: what arrived, what is missing, and what went wrong for good."""

    def __init__(
        self, transport: Transport, role: str, wanted: Sequence[tuple[PayloadId, Piece]], num_target_heads: int
    ) -> None:
        self.role = role
        self.request_id = wanted[0][0].transfer_id
        self.kv: ReceivedKV | None = None
        self.failure: OmniKVError | None = None
        self._transport = transport
        self._wanted = list(wanted)
        self._num_target_heads = num_target_heads
        self._arrived: dict[int, Arrived] = {}

    @property
    def missing_ranks(self) -> list[int]:
        """The source ranks whose parts are not here yet."""
        return [piece.source_rank for _, piece in self._wanted if piece.source_rank not in self._arrived]

    def fetch(self, *, deadline: float) -> None:
        """Nothing; takes what comes until `deadline` (monotonic seconds) and puts it together once it is complete.

        An error that no further fetch can mend is kept in `failure` rather than raised: a rank in a group must still
        vote. Complete or failed fetches do nothing.
        """
        if self.kv is not None or self.failure is not None:
            return
        try:
            for identity, piece in self._wanted:
                if piece.source_rank not in self._arrived:
                    self._take(identity, piece, deadline)
            if not self.missing_ranks:
                parts = [self._arrived[piece.source_rank] for _, piece in self._wanted]
                self.kv = assemble(parts, self._num_target_heads, self.request_id)
                # The leases are the result's now.
                self._arrived = {}
        except OmniKVError as error:
            self.failure = error

    def require(self) -> ReceivedKV:
        """The role's KV; the caller closes it.

        Raises:
            ReceiveTimeout: a part is still missing; what had arrived was given back.
            OmniKVError: the failure that `fetch` met; what had arrived was given back.
        """
        if self.kv is not None:
            kv, self.kv = self.kv, None
            return kv
        missing = self.missing_ranks
        self.give_back()
        if self.failure is not None:
            raise self.failure
        raise ReceiveTimeout(
            f"request {self.request_id!r}: {self.spell_missing(missing)}; nothing was consumed",
            request_id=self.request_id,
            rank=missing[0],
        )

    def spell_missing(self, ranks: Sequence[int]) -> str:
        """What is missing, in words."""
        return f"nothing from source rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} by the deadline"

    def give_back(self) -> None:
        """Nothing; everything that arrived goes back to its sender, unconsumed. Idempotent."""
        kv, self.kv = self.kv, None
        if kv is not None:
            kv.give_back()
        arrived, self._arrived = self._arrived, {}
        for part in arrived.values():
            part.lease.release()

    def __enter__(self) -> RoleFetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def _take(self, identity: PayloadId, piece: Piece, deadline: float) -> None:
        started = time.monotonic()
        lease = self._transport.get(identity, deadline=deadline)
        if lease is None:
            return
        part = None
        try:
            part = read_part(identity, piece, lease, time.monotonic() - started)
            self._arrived[piece.source_rank] = part
        finally:
            if part is None:
                lease.release()


def discard_payload(transport: Transport, identity: PayloadId) -> bool:
    """Whether the payload was here and is now consumed unread; False when it is absent or its sender is gone."""
    try:
        lease = transport.get(identity, deadline=time.monotonic())
    except (HandoffError, TransportError):
        return False
    if lease is None:
        return False
    lease.acknowledge()
    return True
