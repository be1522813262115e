"""What a transport is: the smallest interface that the handoff needs, with capabilities as data.

A transport moves opaque payloads between two ranks. The sender *reserves* room, writes the payload straight into it and
*publishes* it; the receiver *leases* it, reads it in place and *acknowledges* it. Until then nothing is consumed: a
lease that is released without an acknowledgement leaves the payload where it was. One object serves one rank on one
edge, for both directions of use: a source reserves, a target gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Literal, NamedTuple

from omnikv.core.keys import Edge, PayloadId
from omnikv.core.lending import Loan
from omnikv.errors import ConfigError, OmniKVError

Side = Literal["source", "target"]

# Each reader is a process that a source knocks on and remembers for every payload.
MAX_READERS = 64
DEFAULT_PAYLOAD_TTL_S = 300.0
# How many payloads a target may have announced at one source, and how many it may be asking it for.
MAX_ASKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do, for the layers above to choose by."""

    cross_process: bool
    cross_host: bool
    # The payload never leaves memory that both peers map, so no medium can damage it on the way.
    shared_memory: bool
    # A receiver learns of a dead sender when it dies, not at its deadline.
    notices_peer_death: bool
    # `get` never blocks past its deadline; one that may is called on threads of its own (`bounded`).
    keeps_deadlines: bool = True


class Seat(NamedTuple):
    """Which process of a stage: its rank, and which of the rank's readers it is (a source is its rank's only one)."""

    rank: int
    reader: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}, reader {self.reader}" if self.reader else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Which rank of which stage a transport object serves, and which ranks of the other stage it deals with.

    `facts` are texts that both peers must state alike (the route, for one); a transport compares them when two peers
    meet and refuses the pair in plain words when they differ. Several processes may serve one target rank, each as
    another `reader`, counted from 0; a source says how many there are (`num_readers`), and each gets every payload. A
    payload expires at its source when nobody was interested in it for `payload_ttl_s`, which may be infinite.

    Raises:
        ConfigError: there is no such reader, or `payload_ttl_s` is no time.
    """

    edge: Edge
    side: Side
    rank: int
    peer_ranks: tuple[int, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    reader: int = 0
    num_readers: int = 1
    payload_ttl_s: float = DEFAULT_PAYLOAD_TTL_S

    def __post_init__(self) -> None:
        if not (isinstance(self.num_readers, int) and 1 <= self.num_readers <= MAX_READERS):
            raise ConfigError(f"num_readers must be 1 to {MAX_READERS}, got {self.num_readers!r}")
        last = MAX_READERS - 1 if self.side == "target" else 0
        if not (isinstance(self.reader, int) and 0 <= self.reader <= last):
            raise ConfigError(f"reader must be 0 to {last} at a {self.side}, got {self.reader!r}")
        is_time = isinstance(self.payload_ttl_s, (int, float)) and not isinstance(self.payload_ttl_s, bool)
        if not is_time or not self.payload_ttl_s > 0:
            raise ConfigError(f"payload_ttl_s must be a number of seconds above 0, got {self.payload_ttl_s!r}")

    @property
    def seat(self) -> Seat:
        """This end's own seat."""
        return Seat(self.rank, self.reader)

    def deals_with(self, seat: Seat) -> bool:
        """Whether a peer at `seat` is let in; a reader that is not declared is, to be told that nothing is for it."""
        most = MAX_READERS if self.side == "source" else 1
        return seat.rank in self.peer_ranks and seat.reader < most

    def peers(self) -> list[Seat]:
        """The seats of all peers that this end knows of."""
        readers = self.num_readers if self.side == "source" else 1
        return [Seat(rank, reader) for rank in self.peer_ranks for reader in range(readers)]


# Hears in which memory a payload is being written and how it will begin; or, with no beginning, in which memory it is
# likely to come; or, with no memory at all, that it had better let go of what it was shown.
Preview = Callable[[PayloadId, memoryview, bytes], None]


class PutRequest(NamedTuple):
    """Room that is wanted for one payload; `num_readers` of its target rank's will read it (None: all that it has).

    `head` is how it will begin, for receivers that wait to prepare by; empty where that is not known yet.
    """

    payload: PayloadId
    nbytes: int
    num_readers: int | None = None
    head: bytes = b""


class Slot(AbstractContextManager["Slot"]):
    """Room for one payload at its sender. Publishing hands it over; leaving the context otherwise drops it."""

    # Whether bytes can travel before the payload is published: only then is it worth the time to call `written`.
    sends_ahead: bool = False

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The writable bytes of the payload, exactly as many as were reserved; valid until published or dropped."""

    def written(self, begin: int, end: int) -> None:
        """Say that these bytes of the buffer are final, while others are still to be written. May be called or not.

        A transport that sends bytes can have them on their way before the rest is there; nobody reads any of them
        before the payload is published. Any thread may call this, once for each byte.
        """

    def lend(self, loan: Loan) -> None:
        """The payload is what `loan` says, partly of this buffer and partly of its caller's memory, not the buffer.

        Call once, before `publish`. The memory must stay as it is until `Transport.wait_until_free` says that nobody
        reads the payload.

        Raises:
            ConfigError: the transport does not lend (`Transport.lends`).
            TransportError: its engine does not take the memory.
        """
        raise ConfigError("this transport copies what it sends; lend=True is an option of nixl")

    @abstractmethod
    def publish(self) -> None:
        """Make the payload readable by its receiver and wake it. Call once.

        Raises:
            LocalProtocolError: already published or dropped, or failed or aborted while it was written.
        """

    @abstractmethod
    def drop(self) -> None:
        """Give the room back unless it was published; idempotent."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()


class Lease(AbstractContextManager["Lease"]):
    """A payload that this receiver may read. The sender keeps it until it is acknowledged."""

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The payload's bytes, in the transport's memory: valid until acknowledged or released, never to be written."""

    @abstractmethod
    def acknowledge(self) -> None:
        """End the payload's life: it was used, the sender may reuse its room. Idempotent; nothing after `release`."""

    @abstractmethod
    def release(self) -> None:
        """Give the payload back unread: the same `get` finds it again. Idempotent; nothing after `acknowledge`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Transport(ABC):
    """Moves payloads of one rank on one edge. Safe to use from several threads; close it to free what it holds."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    # Whether senders are to lend what they send (`Slot.lend`), as they were told by an option.
    lends: bool = False

    @abstractmethod
    def reserve(self, payload: PayloadId, nbytes: int) -> Slot:
        """Room for a payload of `nbytes`, to be written in place and published.

        Raises:
            PutRejected: no room (`retryable` when room can come back), or `payload` is already live here.
            TransportError: this transport is closed.
        """

    def reserve_all(self, requests: Sequence[PutRequest], *, deadline: float) -> list[Slot]:
        """Room for all the payloads or for none, in their order, as soon as it is there.

        Until `deadline` (monotonic seconds) it waits for room to be freed, first come first served. This default does
        not wait, and knows of one reader only.

        Raises:
            PutRejected: no room by `deadline` (`retryable`), never enough room, or a payload is already live here.
            TransportError: this transport is closed.
        """
        with ExitStack() as on_failure:
            slots = [on_failure.enter_context(self.reserve(wanted.payload, wanted.nbytes)) for wanted in requests]
            on_failure.pop_all()
        return slots

    @abstractmethod
    def get(self, payload: PayloadId, *, deadline: float) -> Lease | None:
        """A lease on the payload as soon as it is ready, or None when it is still absent at `deadline`.

        `deadline` is on the monotonic clock, in seconds; one that has passed asks once and returns at once.

        Raises:
            ProducerFailed: the sender said that it failed, or it is known to have died.
            Aborted: the sender called the request off, or `withdraw` was called here meanwhile.
            Expired: the payload's time to live is over.
            AlreadyConsumed: this reader has used it, or is none of its readers.
            ConnectError: the peer refuses this pair (its facts differ, or it runs as another user).
            TransportError: the payload is there but cannot be read, or this transport is closed.
        """

    def get_as_ready(
        self, payloads: Sequence[PayloadId], *, deadline: float, preview: Preview | None = None
    ) -> Generator[tuple[PayloadId, Lease | OmniKVError], None, None]:
        """Each payload with its lease, or with the error that `get` would raise, as soon as either is known.

        Ends when all were given or at `deadline`; what is absent by then is not given. Closing it early gives up the
        rest. `preview` may be called meanwhile, by this generator, to prepare for a payload that is waited for: with
        the memory in which it is being written, and its head; or, before that is known, with the memory in which it
        is likely to come, and no head; or with empty memory, once what was shown may be given up: a view kept for the
        rest of a long wait would hold it here. Nothing of it may be used before the payload itself comes. This default
        never does, and asks for one after the other; a transport that can wait for several at once overrides it, so
        that one sender's failure is known although another's payload is still waited for.
        """
        for payload in payloads:
            outcome = self._get_or_error(payload, deadline)
            if outcome is not None:
                yield payload, outcome

    def _get_or_error(self, payload: PayloadId, deadline: float) -> Lease | OmniKVError | None:
        try:
            return self.get(payload, deadline=deadline)
        except OmniKVError as error:
            return error

    def others_ready(self, payload: PayloadId, *, deadline: float) -> tuple[str, ...]:
        """Transfer ids that lie ready for this target at the payload's source instead, most alike first, a few.

        For messages: where both sides call one request by different names, neither would ever see the other's (D24).
        Known by `deadline` or not; this default knows of none.
        """
        return ()

    @abstractmethod
    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that this payload will not come, with the cause in words; idempotent."""

    def abort(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that nobody needs this payload any more, and free its room; idempotent."""
        self.fail(payload, cause)

    def announce(self, payloads: Sequence[PayloadId]) -> None:  # noqa: B027
        """Tell the senders that this receiver will come for these payloads, so that they do not expire; idempotent.

        Holds until the payload was acknowledged or has ended, `withdraw`, or the end of the connection. This default
        does nothing, as is right where nothing expires.
        """

    def withdraw(self, payloads: Sequence[PayloadId]) -> None:  # noqa: B027
        """Take an announcement back; a `get` of this receiver that waits for one of them raises `Aborted`.

        This default does nothing: such a `get` ends by its deadline.
        """

    def census(self) -> dict[str, int]:
        """How many payloads stand where at this source, and how many lives have ended in which way since it opened."""
        return {}

    @abstractmethod
    def drain(self, *, deadline: float) -> int:
        """How many published payloads still have their room once none has, or `deadline` (monotonic seconds) passes.

        One has it until it is acknowledged by all of its readers, or has ended otherwise and nobody reads it any more.
        """

    def wait_until_free(self, payloads: Sequence[PayloadId], *, deadline: float) -> bool:
        """Whether all the payloads have ended and nobody writes or reads them, once that is so or `deadline` passes.

        Monotonic seconds; one that has passed asks at once. A payload that was never sent is free. What a payload was
        made of is its caller's again then, where the transport lends. This default waits for all of this source's.
        """
        return self.drain(deadline=deadline) == 0

    @abstractmethod
    def close(self) -> None:
        """Stop serving and free what is held; payloads not acknowledged are lost to receivers. Idempotent."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
