"""What one thread of a target waits for, and what came of it. It belongs to whoever holds the transport's lock."""

from __future__ import annotations

from omnikv.core.keys import PayloadId
from omnikv.errors import OmniKVError
from omnikv.transports.bell import Bell
from omnikv.transports.links import Link
from omnikv.transports.window import PairLease, Preparation


class Ask:
    """One payload that is waited for: over which link it was asked for, and what came of it."""

    def __init__(self, number: int, payload: PayloadId, is_patient: bool, changed: Bell) -> None:
        self.number = number
        self.payload = payload
        self.is_patient = is_patient
        self.changed = changed
        self.link: Link | None = None
        self.lease: PairLease | None = None
        self.error: OmniKVError | None = None
        self.is_absent = False
        self.is_curious = False
        # Where the payload is being written, for whoever wants to know, until it was told.
        self.forming: Preparation | None = None
        # What is there instead, as far as its source said.
        self.others: tuple[str, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether the waiting thread may go on."""
        return self.lease is not None or self.error is not None or self.is_absent

    def pop_error(self) -> OmniKVError:
        """The error, no longer kept here: raised, it refers to the frame that refers to this ask."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def settle(
        self, *, lease: PairLease | None = None, error: OmniKVError | None = None, is_absent: bool = False
    ) -> None:
        """Nothing; wakes the waiting thread with its answer."""
        # Whoever waits looks once the lock is free, and is woken even if Ctrl-C comes in between.
        self.changed.ring()
        self.lease, self.error, self.is_absent = lease, error, is_absent
