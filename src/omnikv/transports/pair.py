"""What every transport between processes is made of: one role, one thread that keeps the links, and the calls on them.

A transport of this kind brings memory (a `Shelf` at the source, a `Window` at the target) and `Sockets`; see `shm` for
the shortest example.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from omnikv.core.keys import PayloadId
from omnikv.core.messages import MAX_MESSAGE_NBYTES, PROTOCOL_VERSION, Hello
from omnikv.errors import ConfigError, OmniKVError, TransportError
from omnikv.transports.base import Endpoint, Transport
from omnikv.transports.link_loop import LinkLoop, Sockets
from omnikv.transports.offers import Offers, PairSlot, Shelf
from omnikv.transports.pairing import describe, require_payload, require_size
from omnikv.transports.wants import PairLease, Wants, Window


class PairTransport(Transport):
    """Moves payloads of one rank to or from processes that it is connected to. `counters` counts trouble with peers.

    `shelf` is called at a source, `window` at a target, before anything comes over a link.

    Raises:
        ConfigError: the facts are too long for one message.
        TransportError: another process serves this rank, or the system refuses.
    """

    def __init__(
        self, endpoint: Endpoint, sockets: Sockets, *, shelf: Callable[[], Shelf[Any]], window: Callable[[], Window]
    ) -> None:
        self._endpoint = endpoint
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._source: Offers[Any] | None = None
        self._target: Wants | None = None
        role: Offers[Any] | Wants
        if endpoint.side == "source":
            role = self._source = Offers(self.name, endpoint, shelf(), self._lock, self._require_open)
        else:
            role = self._target = Wants(self.name, endpoint, window(), self._lock, self._require_open)
        hello = _hello_of(self.name, endpoint, os.urandom(16).hex())
        self._loop = role.loop = LinkLoop(self.name, endpoint, hello, role, sockets, self._lock)
        self._loop.start()

    @property
    def counters(self) -> dict[str, int]:
        """How often each kind of trouble with a peer happened."""
        return self._loop.counters

    def reserve(self, payload: PayloadId, nbytes: int) -> PairSlot:
        """Room for a payload of `nbytes`, to be written in place and published.

        Raises:
            PutRejected: no room (`retryable` when room can come back), or `payload` is already live here.
            ConfigError: the payload is not this source's, or `nbytes` is negative.
            TransportError: this transport is closed.
        """
        source = self._as_source(payload)
        require_size(self.name, "a payload's size", nbytes, at_least=0)
        return source.reserve(payload, nbytes)

    def get(self, payload: PayloadId, *, deadline: float) -> PairLease | None:
        """A lease on the payload as soon as it is ready, or None when it is still absent at `deadline`.

        Raises:
            ProducerFailed: the sender failed it, or its connection ended while this call waited.
            ConnectError: the pair is refused: facts or identity differ, or the peer runs as another user.
            ConfigError: the payload is not this target's.
            TransportError: this transport is closed.
        """
        _, outcome = next(self.get_as_ready([payload], deadline=deadline), (payload, None))
        if isinstance(outcome, OmniKVError):
            raise outcome
        return outcome

    def get_as_ready(
        self, payloads: Sequence[PayloadId], *, deadline: float
    ) -> Generator[tuple[PayloadId, PairLease | OmniKVError], None, None]:
        """Each payload with its lease or its error, as soon as either is known; what is absent at `deadline` is not.

        Raises:
            ConfigError: a payload is not this target's.
            TransportError: this transport is closed.
        """
        for payload in payloads:
            require_payload(self.name, self._endpoint, payload, "target")
        assert self._target is not None
        yield from self._target.get_as_ready(payloads, deadline)

    def fail(self, payload: PayloadId, cause: str) -> None:
        """Tell the receiver that this payload will not come, with the cause in words; idempotent.

        Raises:
            ConfigError: the payload is not this source's.
            TransportError: this transport is closed.
        """
        self._as_source(payload).fail(payload, cause)

    def drain(self, *, deadline: float) -> int:
        """How many published payloads are still not acknowledged once all are, or `deadline` passes."""
        return 0 if self._source is None else self._source.drain(deadline)

    def close(self) -> None:
        """Stop serving, end the thread, give descriptors and memory back; views stay readable. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        self._loop.close()

    def _as_source(self, payload: PayloadId) -> Offers[Any]:
        require_payload(self.name, self._endpoint, payload, "source")
        assert self._source is not None
        return self._source

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                f"{self.name}: {describe(self._endpoint)} was opened by process {self._pid} and does not work in its "
                "forked child; open a transport there",
                transport=self.name,
            )
        if self._closed or self._loop.has_ended:
            ended_by = self._loop.ended_by
            why = "is closed" if ended_by is None else f"has ended by an error that nobody foresaw: {ended_by!r}"
            raise TransportError(f"{self.name}: {describe(self._endpoint)} {why}", transport=self.name) from ended_by


def _hello_of(name: str, endpoint: Endpoint, incarnation: str) -> Hello:
    hello = Hello(
        version=PROTOCOL_VERSION,
        namespace=endpoint.edge.namespace,
        from_stage=endpoint.edge.from_stage,
        to_stage=endpoint.edge.to_stage,
        replica=endpoint.edge.replica,
        side=endpoint.side,
        rank=endpoint.rank,
        pid=os.getpid(),
        incarnation=incarnation,
        facts=dict(endpoint.facts),
        reader=endpoint.reader,
        num_readers=endpoint.num_readers,
    )
    nbytes = len(msgspec.msgpack.encode(hello))
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ConfigError(
            f"{name}: the facts of {describe(endpoint)} make a greeting of {nbytes} bytes, at most "
            f"{MAX_MESSAGE_NBYTES} fit; state a digest instead of the whole text"
        )
    return hello
