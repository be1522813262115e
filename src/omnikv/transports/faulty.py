"""A transport that goes wrong on purpose, over any other: it drops, delays, doubles, corrupts and dies, by a seed.

What happens to a payload follows from the seed, its identity and the call alone, so that a failing test fails again.
Dropped: a published payload never becomes readable, an acknowledgement is never told. Doubled: whatever may be said
once is said twice. Delayed: the call takes its time. Corrupted: a receiver sees a bit that nobody wrote. Dying: after
so many calls this end is gone without a word, and every call of it raises.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from omnikv.core.keys import PayloadId
from omnikv.errors import ConfigError, LocalProtocolError, OmniKVError, TransportError
from omnikv.transports.base import Capabilities, Endpoint, Lease, Preview, PutRequest, Slot, Transport
from omnikv.transports.registry import open_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often each fault happens, 0 to 1; `delay_s` is the longest delay, `die_after` how many calls succeed.

    Raises:
        ConfigError: a share is none.
    """

    seed: int = 0
    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 0.01
    die_after: int | None = None

    def __post_init__(self) -> None:
        for name in ("drop", "delay", "duplicate", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"faulty: {name} must be a share from 0 to 1, got {getattr(self, name)!r}")


class _Mischief:
    """Draws the faults of one end, and kills it."""

    def __init__(self, faults: Faults, die: Callable[[], None]) -> None:
        self._faults = faults
        self._die = die
        self._calls = 0
        self._lock = threading.Lock()
        self.is_dead = threading.Event()

    def draw(self, kind: str, call: str, payload: PayloadId | None) -> float:
        """A number from 0 to 1 that follows from all of it; small ones mean that the fault happens."""
        text = f"{self._faults.seed}|{kind}|{call}|{'' if payload is None else payload.encode()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / (1 << 56)

    def happens(self, kind: str, call: str, payload: PayloadId) -> bool:
        """Whether the fault `kind` befalls this call."""
        share: float = getattr(self._faults, kind)
        return self.draw(kind, call, payload) < share

    def begin(self, call: str, payload: PayloadId | None = None) -> None:
        """Nothing, after the delay that this call has.

        Raises:
            TransportError: this end has died.
        """
        with self._lock:
            self._calls += 1
            limit = self._faults.die_after
            dies = limit is not None and self._calls > limit and not self.is_dead.is_set()
            if dies:
                self.is_dead.set()
        if dies:
            self._die()
        if self.is_dead.is_set():
            raise TransportError(f"faulty: this end died after {self._faults.die_after} calls", transport="faulty")
        drawn = self.draw("delay", call, payload)
        if drawn < self._faults.delay:
            self.is_dead.wait(self._faults.delay_s * drawn / self._faults.delay)

    def tell(self, call: str, payload: PayloadId, action: Callable[[], None]) -> None:
        """Nothing; does `action` once, or twice where it is doubled."""
        action()
        if self.happens("duplicate", call, payload):
            with suppress(LocalProtocolError):
                action()


class FaultySlot(Slot):
    """A slot that may be published twice, late, or never."""

    def __init__(self, inner: Slot, payload: PayloadId, mischief: _Mischief) -> None:
        self._inner = inner
        self._payload = payload
        self._mischief = mischief
        self.sends_ahead = inner.sends_ahead
        self._was_published = False

    @property
    def buffer(self) -> memoryview:
        """The writable bytes of the payload."""
        return self._inner.buffer

    def written(self, begin: int, end: int) -> None:
        """Say that these bytes are final."""
        self._inner.written(begin, end)

    def publish(self) -> None:
        """Make the payload readable, unless that is lost on the way."""
        self._mischief.begin("publish", self._payload)
        if self._was_published:
            self._inner.publish()
        elif self._mischief.happens("drop", "publish", self._payload):
            self._inner.drop()
        else:
            self._was_published = True
            self._mischief.tell("publish", self._payload, self._inner.publish)

    def drop(self) -> None:
        """Give the room back unless the payload was published."""
        self._mischief.tell("drop", self._payload, self._inner.drop)


class FaultyLease(Lease):
    """A lease whose bytes may be damaged, and whose end may be said twice or never."""

    def __init__(self, inner: Lease, payload: PayloadId, mischief: _Mischief) -> None:
        self._inner = inner
        self._payload = payload
        self._mischief = mischief
        self._damaged: memoryview | None = None
        if mischief.happens("corrupt", "get", payload) and inner.buffer.nbytes:
            self._damaged = memoryview(bytearray(inner.buffer))
            at = int(mischief.draw("place", "get", payload) * self._damaged.nbytes)
            self._damaged[at] ^= 1 << (at % 8)

    @property
    def buffer(self) -> memoryview:
        """The payload's bytes, as far as they arrived well."""
        whole = self._inner.buffer
        return whole if self._damaged is None else self._damaged

    def acknowledge(self) -> None:
        """End the payload's life, unless that is lost on the way."""
        if not self._mischief.happens("drop", "acknowledge", self._payload):
            self._mischief.tell("acknowledge", self._payload, self._inner.acknowledge)

    def release(self) -> None:
        """Give the payload back unread."""
        self._mischief.tell("release", self._payload, self._inner.release)


class FaultyTransport(Transport):
    """The transport `inner`, opened with `options`, as `faults` have it (a `Faults`, or what makes one).

    Raises:
        ConfigError: no such transport, options or faults.
        TransportError: `inner` cannot start.
    """

    name: ClassVar[str] = "faulty"
    # Of whatever lies below, as little as may be relied on: what comes may be damaged.
    capabilities: ClassVar[Capabilities] = Capabilities(
        cross_process=False, cross_host=False, shared_memory=False, notices_peer_death=True
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        inner: str = "memory",
        faults: Faults | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        try:
            stated = faults if isinstance(faults, Faults) else Faults(**(faults or {}))
        except TypeError as error:
            raise ConfigError(f"faulty: faults must be fields of Faults, got {faults!r}") from error
        # Ends of one seed that did the same at the same time would hide what happens when only one of them does.
        self._mischief = _Mischief(replace(stated, seed=stated.seed * 2 + (endpoint.side == "target")), self._die)
        self._inner = open_transport(inner, endpoint, options)

    def reserve(self, payload: PayloadId, nbytes: int, *, num_readers: int | None = None) -> Slot:
        """Room for a payload of `nbytes`; see `Transport.reserve`."""
        (slot,) = self.reserve_all([PutRequest(payload, nbytes, num_readers)], deadline=0.0)
        return slot

    def reserve_all(self, requests: Sequence[PutRequest], *, deadline: float) -> list[Slot]:
        """Room for all the payloads or for none; see `Transport.reserve_all`."""
        self._mischief.begin("reserve", requests[0].payload if requests else None)
        slots = self._inner.reserve_all(requests, deadline=deadline)
        return [FaultySlot(slot, wanted.payload, self._mischief) for slot, wanted in zip(slots, requests, strict=True)]

    def get(self, payload: PayloadId, *, deadline: float) -> Lease | None:
        """A lease on the payload as soon as it is ready, or None; see `Transport.get`."""
        self._mischief.begin("get", payload)
        lease = self._inner.get(payload, deadline=deadline)
        return None if lease is None else FaultyLease(lease, payload, self._mischief)

    def get_as_ready(
        self, payloads: Sequence[PayloadId], *, deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, Lease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; see `Transport.get_as_ready`."""
        with closing(self._inner.get_as_ready(payloads, deadline=deadline, preview=preview)) as arrivals:
            for payload, outcome in arrivals:
                self._mischief.begin("get", payload)
                if isinstance(outcome, OmniKVError):
                    yield payload, outcome
                else:
                    yield payload, FaultyLease(outcome, payload, self._mischief)

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that this payload will not come."""
        self._mischief.begin("fail", payload)
        self._mischief.tell("fail", payload, lambda: self._inner.fail(payload, cause))

    def abort(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that nobody needs this payload any more."""
        self._mischief.begin("abort", payload)
        self._mischief.tell("abort", payload, lambda: self._inner.abort(payload, cause))

    def others_ready(self, payload: PayloadId, *, deadline: float) -> tuple[str, ...]:
        """Transfer ids that lie ready at the payload's source instead."""
        return self._inner.others_ready(payload, deadline=deadline)

    def announce(self, payloads: Sequence[PayloadId]) -> None:
        """Tell the senders that this receiver will come for these payloads."""
        self._mischief.begin("announce")
        self._inner.announce(payloads)

    def withdraw(self, payloads: Sequence[PayloadId]) -> None:
        """Take an announcement back."""
        self._mischief.begin("withdraw")
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

    def _die(self) -> None:
        self._inner.close()
