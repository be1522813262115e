"""A sender's table of its payloads: the one place that knows what is live and who may read it.

Theory of operation. An identity is free, or live in one of three states:

    free --reserve--> RESERVED --publish--> READY --lease--> LEASED --acknowledge--> free
                         |                    ^                |
                         '--drop--> free      '---give_back----'

A failure is kept beside the states: whoever asks for a failed identity is told the cause instead of waiting. Failing a
READY payload ends its life. One that is still being written keeps its room until its writer is done with it, and one
that is leased stays readable for its holder: room that somebody touches is never handed out again.
Reserving a failed identity again takes the failure back. Failures are remembered for the latest `MAX_FAILURES`
identities, so that a sender that only ever fails does not grow.

The table does no I/O and takes no lock: its owner calls it under its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from omnikv.core.keys import PayloadId
from omnikv.core.messages import spell_reason
from omnikv.errors import LocalProtocolError, ProducerFailed, PutRejected

MAX_FAILURES = 4096

Room = TypeVar("Room")


class PayloadState(enum.Enum):
    """Where a payload stands at its sender; `GONE` marks a record whose identity is free again."""

    RESERVED = "reserved"
    READY = "ready"
    LEASED = "leased"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Entry(Generic[Room]):
    """One live payload: its state, its room once it has one, and the holder of its lease."""

    payload: PayloadId
    nbytes: int
    room: Room | None = None
    state: PayloadState = PayloadState.RESERVED
    lease: int = 0
    holder: Hashable = None
    history: list[str] = field(default_factory=lambda: ["reserve"])


class Ledger(Generic[Room]):
    """The live payloads of one sender; `free` is called with the room of each payload whose life ends."""

    def __init__(self, transport: str, free: Callable[[Room], None]) -> None:
        self._transport = transport
        self._free = free
        self._live: dict[PayloadId, Entry[Room]] = {}
        self._leased: dict[int, Entry[Room]] = {}
        self._failures: dict[PayloadId, str] = {}
        self._next_lease = 1
        # Counted rather than looked for: `drain` asks after every acknowledgement.
        self._published = 0

    @property
    def unacknowledged(self) -> int:
        """How many payloads are published and not acknowledged."""
        return self._published

    def reserve(self, payload: PayloadId, nbytes: int) -> Entry[Room]:
        """A new record for `payload`, without room yet.

        Raises:
            PutRejected: the identity is already live.
        """
        live = self._live.get(payload)
        if live is not None:
            raise PutRejected(
                f"{self._transport}: payload {payload.encode()} is already live ({live.state.value}); acknowledge or "
                "fail it first, or send it as a new attempt",
                already_live=True,
                transport=self._transport,
                request_id=payload.transfer_id,
                key=payload.encode(),
                rank=payload.source_rank,
            )
        self._failures.pop(payload, None)
        entry: Entry[Room] = Entry(payload, nbytes)
        self._live[payload] = entry
        return entry

    def publish(self, entry: Entry[Room]) -> None:
        """Nothing; the payload may be leased from now on.

        Raises:
            LocalProtocolError: it was published, dropped or failed before; a failed one ends here.
        """
        failure = self._failures.get(entry.payload) if entry.state is PayloadState.RESERVED else None
        if failure is not None:
            self._end(entry, f"fail ({failure})")
        if entry.state is not PayloadState.RESERVED:
            raise LocalProtocolError(
                f"{self._transport}: payload {entry.payload.encode()} cannot be published: it went through "
                f"{', '.join(entry.history)}; reserve it again",
                history=tuple(entry.history),
                request_id=entry.payload.transfer_id,
            )
        entry.history.append("publish")
        entry.state = PayloadState.READY
        self._published += 1

    def drop(self, entry: Entry[Room]) -> None:
        """Nothing; ends the life of a payload that was not published, and does nothing to any other."""
        if entry.state is PayloadState.RESERVED:
            self._end(entry, "drop")

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Nothing; whoever asks for `payload` is told `cause`, and its room is free once nobody writes or reads it."""
        self._failures.pop(payload, None)
        self._failures[payload] = spell_reason(cause)
        while len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        entry = self._live.get(payload)
        if entry is not None and entry.state is PayloadState.READY:
            self._end(entry, "fail")

    def failure(self, payload: PayloadId) -> str | None:
        """Why `payload` will not come, or None."""
        return self._failures.get(payload)

    def lease(self, payload: PayloadId, holder: Hashable) -> Entry[Room] | None:
        """The payload's record, leased to `holder` under a new number, or None when it is not there to be read.

        Raises:
            ProducerFailed: the payload was failed.
        """
        cause = self._failures.get(payload)
        if cause is not None:
            raise producer_failed(payload, cause)
        entry = self._live.get(payload)
        if entry is None or entry.state is not PayloadState.READY:
            return None
        entry.history.append("lease")
        entry.state = PayloadState.LEASED
        entry.lease, entry.holder = self._next_lease, holder
        self._leased[entry.lease] = entry
        self._next_lease += 1
        return entry

    def acknowledge(self, lease: int, holder: Hashable) -> PayloadId | None:
        """The payload whose life ended, or None when `holder` holds no such lease (any more)."""
        entry = self._held(lease, holder)
        if entry is None:
            return None
        self._end(entry, "acknowledge")
        return entry.payload

    def give_back(self, lease: int, holder: Hashable) -> PayloadId | None:
        """The payload that can be leased again, or None when `holder` holds no such lease or it has failed since."""
        entry = self._held(lease, holder)
        if entry is None:
            return None
        del self._leased[lease]
        if entry.payload in self._failures:
            self._end(entry, "fail")
            return None
        entry.history[2:] = ["give_back"]
        entry.state, entry.lease, entry.holder = PayloadState.READY, 0, None
        return entry.payload

    def leave(self, holder: Hashable) -> list[PayloadId]:
        """The payloads that can be leased again now that `holder` is gone."""
        leases = [lease for lease, entry in self._leased.items() if entry.holder == holder]
        back = [self.give_back(lease, holder) for lease in leases]
        return [payload for payload in back if payload is not None]

    def clear(self) -> None:
        """Nothing; ends every life, as a sender does that closes."""
        for entry in list(self._live.values()):
            self._end(entry, "close")
        self._failures.clear()

    def _held(self, lease: int, holder: Hashable) -> Entry[Room] | None:
        entry = self._leased.get(lease)
        return entry if entry is not None and entry.holder == holder else None

    def _end(self, entry: Entry[Room], event: str) -> None:
        self._leased.pop(entry.lease, None)
        self._live.pop(entry.payload, None)
        entry.history.append(event)
        self._published -= entry.state is not PayloadState.RESERVED
        entry.state = PayloadState.GONE
        room, entry.room = entry.room, None
        if room is not None:
            self._free(room)


def producer_failed(payload: PayloadId, cause: str) -> ProducerFailed:
    """The error that tells a receiver why `payload` will not come."""
    return ProducerFailed(
        f"the sender failed {payload.encode()}: {cause}",
        request_id=payload.transfer_id,
        key=payload.encode(),
        rank=payload.source_rank,
    )
