"""Keeps deadlines for a transport whose `get` blocks for as long as it likes.

Each `get` runs on a thread of its own and is waited for until the caller's deadline. One that is given up may still
come: what it brings then is given back at once, so that the source keeps no claim of a receiver that has gone (D17). A
second `get` of a payload whose first one is still inside the backend waits for that one instead of piling up threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence

from omnikv.core.keys import PayloadId
from omnikv.errors import OmniKVError, TransportError
from omnikv.transports.base import Capabilities, Lease, Preview, PutRequest, Slot, Transport
from omnikv.transports.bell import Bell

# How many calls may be inside of a backend at once; each holds a thread until it comes back.
MAX_CALLS = 256
# How long a last look, at or after its deadline, may take.
LAST_LOOK_S = 0.05


class _Call:
    """One `get` inside of the backend, and what came of it."""

    def __init__(self) -> None:
        self.outcome: Lease | OmniKVError | None = None
        self.is_over = False
        self.waiters = 0


class BoundedTransport(Transport):
    """`inner`, with every `get` bounded by its deadline; everything else is passed on."""

    name = "bounded"
    capabilities = Capabilities(cross_process=False, cross_host=False, shared_memory=False, notices_peer_death=False)

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        # What it says of itself, but for the deadlines.
        self.name = inner.name  # type: ignore[misc]
        self.capabilities = inner.capabilities  # type: ignore[misc]
        self._lock = threading.Lock()
        self._changed = Bell(self._lock)
        self._calls: dict[PayloadId, _Call] = {}

    def reserve(self, payload: PayloadId, nbytes: int) -> Slot:
        """Room for a payload of `nbytes`; see `Transport.reserve`."""
        return self._inner.reserve(payload, nbytes)

    def reserve_all(self, requests: Sequence[PutRequest], *, deadline: float) -> list[Slot]:
        """Room for all the payloads or for none; see `Transport.reserve_all`."""
        return self._inner.reserve_all(requests, deadline=deadline)

    def get(self, payload: PayloadId, *, deadline: float) -> Lease | None:
        """A lease on the payload as soon as it is ready, or None at `deadline`, whatever the backend does.

        Raises:
            OmniKVError: as `inner` does, or too many calls are inside of it.
        """
        _, outcome = next(self.get_as_ready([payload], deadline=deadline), (payload, None))
        if isinstance(outcome, OmniKVError):
            raise outcome
        return outcome

    def get_as_ready(
        self, payloads: Sequence[PayloadId], *, deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, Lease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not."""
        waiting = {payload: self._begin(payload, deadline) for payload in payloads}
        until = max(deadline, time.monotonic() + LAST_LOOK_S)
        try:
            while waiting:
                known = self._changed.wait_for(
                    lambda: next((payload for payload, call in waiting.items() if call.is_over), None), until
                )
                if known is None:
                    return
                outcome = self._take(waiting[known])
                del waiting[known]
                if outcome is not None:
                    yield known, outcome
        finally:
            for call in waiting.values():
                late = self._leave(call)
                if late is not None:
                    late.release()

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that this payload will not come."""
        self._inner.fail(payload, cause)

    def abort(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that nobody needs this payload any more."""
        self._inner.abort(payload, cause)

    def others_ready(self, payload: PayloadId, *, deadline: float) -> tuple[str, ...]:
        """Transfer ids that lie ready at the payload's source instead."""
        return self._inner.others_ready(payload, deadline=deadline)

    def announce(self, payloads: Sequence[PayloadId]) -> None:
        """Tell the senders that this receiver will come for these payloads."""
        self._inner.announce(payloads)

    def withdraw(self, payloads: Sequence[PayloadId]) -> None:
        """Take an announcement back."""
        self._inner.withdraw(payloads)

    def census(self) -> dict[str, int]:
        """How many payloads stand where at this source."""
        return self._inner.census()

    def drain(self, *, deadline: float) -> int:
        """How many published payloads still have their room once none has, or `deadline` passes."""
        return self._inner.drain(deadline=deadline)

    def wait_until_free(self, payloads: Sequence[PayloadId], *, deadline: float) -> bool:
        """Whether all the payloads have ended and nobody writes or reads them."""
        return self._inner.wait_until_free(payloads, deadline=deadline)

    def close(self) -> None:
        """Close what lies below. Idempotent."""
        self._inner.close()

    def _begin(self, payload: PayloadId, deadline: float) -> _Call:
        with self._lock:
            call = self._calls.get(payload)
            if call is None and len(self._calls) >= MAX_CALLS:
                call = _Call()
                call.is_over = True
                call.outcome = TransportError(
                    f"{self.name}: {MAX_CALLS} calls are inside of the backend and have not come back; it may hang",
                    transport=self.name,
                )
            elif call is None:
                call = self._calls[payload] = _Call()
                # A daemon, so that a call that never comes back cannot keep the interpreter from ending.
                threading.Thread(
                    target=self._run, args=(payload, call, deadline), name=f"omnikv-{self.name}-get", daemon=True
                ).start()
            call.waiters += 1
            return call

    def _run(self, payload: PayloadId, call: _Call, deadline: float) -> None:
        outcome: Lease | OmniKVError | None
        try:
            outcome = self._inner.get(payload, deadline=deadline)
        except OmniKVError as error:
            outcome = error
        except Exception as error:  # edge: top of a background thread; the waiting caller is told  # noqa: BLE001
            outcome = TransportError(f"{self.name}: get failed: {type(error).__name__}: {error}", transport=self.name)
            outcome.__cause__ = error
        with self._lock:
            del self._calls[payload]
            call.is_over = True
            is_wanted = call.waiters > 0
            call.outcome = outcome if is_wanted else None
            self._changed.ring()
        if not is_wanted and isinstance(outcome, Lease):
            outcome.release()

    def _take(self, call: _Call) -> Lease | OmniKVError | None:
        with self._lock:
            call.waiters -= 1
            outcome, call.outcome = call.outcome, None
            return outcome

    def _leave(self, call: _Call) -> Lease | None:
        """The lease that came just as the last one who waited for it left."""
        with self._lock:
            call.waiters -= 1
            outcome, call.outcome = (call.outcome, None) if not call.waiters else (None, call.outcome)
            return outcome if isinstance(outcome, Lease) else None
