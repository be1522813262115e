"""The calls of a transport whose work is done by one of two roles: a source's, or a target's."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from omnikv.core.keys import PayloadId
from omnikv.errors import ConfigError, OmniKVError
from omnikv.transports.base import Endpoint, Lease, Preview, PutRequest, Slot, Transport
from omnikv.transports.pairing import describe, require_payload, require_put


class SourceRole(Protocol):
    """What a source does of a transport's calls, with payloads that are its own."""

    def reserve_all(self, requests: Sequence[PutRequest], deadline: float) -> list[Slot]: ...
    def fail(self, payload: PayloadId, cause: str) -> None: ...
    def abort(self, payload: PayloadId, cause: str) -> None: ...
    def drain(self, deadline: float) -> int: ...
    def wait_until_free(self, payload: PayloadId, deadline: float) -> bool: ...
    def census(self) -> dict[str, int]: ...


class TargetRole(Protocol):
    """What a target does of a transport's calls, with payloads that are its own."""

    def get_as_ready(
        self, payloads: Sequence[PayloadId], deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, Lease | OmniKVError], None, None]: ...
    def others_ready(self, payload: PayloadId, deadline: float) -> tuple[str, ...]: ...
    def announce(self, payloads: Sequence[PayloadId]) -> None: ...
    def withdraw(self, payloads: Sequence[PayloadId]) -> None: ...


class SidedTransport(Transport):
    """Checks what it is asked for and passes it to its role. A subclass sets `_source` or `_target`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._source: SourceRole | None = None
        self._target: TargetRole | None = None

    def reserve(self, payload: PayloadId, nbytes: int, *, num_readers: int | None = None) -> Slot:
        """Room for a payload of `nbytes`, to be written in place and published.

        Raises:
            PutRejected: no room (`retryable` when room can come back), or `payload` is already live here.
            ConfigError: the payload is not this source's, or `nbytes` is negative.
            TransportError: this transport is closed.
        """
        (slot,) = self.reserve_all([PutRequest(payload, nbytes, num_readers)], deadline=0.0)
        return slot

    def reserve_all(self, requests: Sequence[PutRequest], *, deadline: float) -> list[Slot]:
        """Room for all the payloads or for none, in their order, as soon as it is there.

        Raises:
            PutRejected: no room by `deadline` (`retryable`), never enough room, or a payload is already live here.
            ConfigError: a payload is not this source's, or a size or number of readers is none.
            TransportError: this transport is closed.
        """
        for wanted in requests:
            require_put(self.name, self._endpoint, wanted)
        return self._source.reserve_all(requests, deadline) if self._source is not None and requests else []

    def get(self, payload: PayloadId, *, deadline: float) -> Lease | None:
        """A lease on the payload as soon as it is ready, or None when it is still absent at `deadline`.

        Raises:
            ProducerFailed: the sender failed it, or its connection ended and it has not come back.
            Aborted: the sender called the request off, or `withdraw` was called here meanwhile.
            Expired: the payload's time to live is over.
            AlreadyConsumed: this reader has used it, or is none of its readers.
            ConnectError: the pair is refused: facts or identity differ, or the peer runs as another user.
            ConfigError: the payload is not this target's.
            TransportError: this transport is closed.
        """
        _, outcome = next(self.get_as_ready([payload], deadline=deadline), (payload, None))
        if isinstance(outcome, OmniKVError):
            raise outcome
        return outcome

    def get_as_ready(
        self, payloads: Sequence[PayloadId], *, deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, Lease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not.

        `preview` as in `Transport.get_as_ready`.

        Raises:
            ConfigError: a payload is not this target's.
            TransportError: this transport is closed.
        """
        yield from self._as_target(payloads).get_as_ready(payloads, deadline, preview)

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that this payload will not come, with the cause in words; idempotent.

        Raises:
            ConfigError: the payload is not this source's.
            TransportError: this transport is closed.
        """
        self._as_source(payload).fail(payload, cause)

    def abort(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that nobody needs this payload any more, and free its room; idempotent.

        Raises:
            ConfigError: the payload is not this source's.
            TransportError: this transport is closed.
        """
        self._as_source(payload).abort(payload, cause)

    def others_ready(self, payload: PayloadId, *, deadline: float) -> tuple[str, ...]:
        """Transfer ids that lie ready for this target at the payload's source instead, most alike first, a few.

        Raises:
            ConfigError: the payload is not this target's.
            TransportError: this transport is closed.
        """
        return self._as_target([payload]).others_ready(payload, deadline)

    def announce(self, payloads: Sequence[PayloadId]) -> None:
        """Tell the senders that this receiver will come for these payloads, so that they do not expire; idempotent.

        Raises:
            ConfigError: a payload is not this target's, or too many are announced.
            TransportError: this transport is closed.
        """
        self._as_target(payloads).announce(payloads)

    def withdraw(self, payloads: Sequence[PayloadId]) -> None:
        """Take an announcement back; a `get` of this receiver that waits for one of them raises `Aborted`.

        Raises:
            ConfigError: a payload is not this target's.
        """
        self._as_target(payloads).withdraw(payloads)

    def census(self) -> dict[str, int]:
        """How many payloads stand where at this source, and how many lives have ended in which way since it opened."""
        return {} if self._source is None else self._source.census()

    def drain(self, *, deadline: float) -> int:
        """How many published payloads still have their room once none has, or `deadline` passes."""
        return 0 if self._source is None else self._source.drain(deadline)

    def wait_until_free(self, payloads: Sequence[PayloadId], *, deadline: float) -> bool:
        """Whether all the payloads have ended and nobody writes or reads them, once that is so or `deadline` passes.

        Raises:
            ConfigError: a payload is not this source's.
        """
        return all(self._as_source(payload).wait_until_free(payload, deadline) for payload in payloads)

    def _as_source(self, payload: PayloadId) -> SourceRole:
        require_payload(self.name, self._endpoint, payload, "source")
        assert self._source is not None
        return self._source

    def _as_target(self, payloads: Sequence[PayloadId]) -> TargetRole:
        for payload in payloads:
            require_payload(self.name, self._endpoint, payload, "target")
        if self._target is None:
            raise ConfigError(f"{self.name}: only a target may announce, this is {describe(self._endpoint)}")
        return self._target
