"""The transport between processes of one host: payloads lie in shared memory, small messages say where.

Theory of operation. A source owns a pool of memfd segments that it touches once and reuses for life (`shm_pool`). Every
rank listens at an abstract Unix address that both stages compute from user, edge, side and rank (`shm_address`), and
knocks on its peers when it opens; since each listens before it knocks, whoever comes second meets the other, and nobody
polls. Over a connection (`shm_door`, `shm_loop`, `shm_link`) both say Hello with their identity and facts and judge the
other's; only the same user may speak. A target then sends Want; the source answers Ready at once or when the payload is
published, straight from the publishing thread, or Failed. Before the first Ready in a segment its descriptor travels
over the connection, once; the target maps it and reads the payload in place (`shm_target`). Ack ends the payload's life
at the source (`shm_source`, with the table of `ledger`), Return makes it ready again, and so does the end of the
connection. When several connections of one pair come up, the target uses the first whose greeting ends and closes the
others; the source answers on whichever it was asked.

A source that dies closes its connection: waiting gets fail at once, while data that is leased already stays readable,
because the reader's mapping keeps the memory alive. Nothing has a name in a file system, so a kill leaves nothing
behind and a restart works at once.

Both stages must share the network namespace (abstract addresses belong to one) and the user. A forked child has no use
of its parent's transport: it closes its copies of the descriptors, and every call raises.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Sequence
from typing import ClassVar

from omnikv.core.keys import PayloadId
from omnikv.core.messages import MAX_MESSAGE_NBYTES, PROTOCOL_VERSION, Hello
from omnikv.errors import ConfigError, OmniKVError, TransportError, TransportUnavailable
from omnikv.transports.base import Capabilities, Endpoint, Transport
from omnikv.transports.pairing import describe, require_payload, require_size
from omnikv.transports.shm_link import encode
from omnikv.transports.shm_loop import LinkLoop
from omnikv.transports.shm_pool import DEFAULT_SEGMENT_NBYTES, Pool
from omnikv.transports.shm_source import ShmSlot, ShmSource
from omnikv.transports.shm_target import ShmLease, ShmTarget


class ShmTransport(Transport):
    """Moves payloads between processes of one host and user, through a pool of shared memory.

    `pool_nbytes` bounds a source's pool (None: 2 GiB, or half of the memory allowed where that is less), which grows by
    `segment_nbytes` or by a payload's size where that is more; a target ignores both. `counters` counts what went wrong
    with peers, by kind.

    Raises:
        ConfigError: a size is wrong, or the facts are too long for one message.
        TransportUnavailable: this is not Linux.
        TransportError: another process serves this rank, or the system refuses.
    """

    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        cross_process=True, cross_host=False, shared_memory=True, notices_peer_death=True
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        pool_nbytes: int | None = None,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise TransportUnavailable(f"shm: needs Linux, this is {sys.platform}", transport=self.name)
        self._endpoint = endpoint
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._pool = Pool(pool_nbytes, segment_nbytes)
        self._source: ShmSource | None = None
        self._target: ShmTarget | None = None
        role: ShmSource | ShmTarget
        if endpoint.side == "source":
            role = self._source = ShmSource(endpoint, self._pool, self._lock, self._require_open)
        else:
            role = self._target = ShmTarget(endpoint, self._lock, self._require_open)
        hello = _hello_of(endpoint, os.urandom(16).hex())
        self._loop = role.loop = LinkLoop(endpoint, hello, role, self._lock)
        self._loop.start()

    @property
    def counters(self) -> dict[str, int]:
        """How often each kind of trouble with a peer happened."""
        return self._loop.counters

    @property
    def pool(self) -> Pool:
        """The source's memory; a target's stays empty."""
        return self._pool

    def reserve(self, payload: PayloadId, nbytes: int) -> ShmSlot:
        """Room for a payload of `nbytes`, to be written in place and published.

        Raises:
            PutRejected: no room (`retryable` when room can come back), or `payload` is already live here.
            ConfigError: the payload is not this source's, or `nbytes` is negative.
            TransportError: this transport is closed.
        """
        source = self._as_source(payload)
        require_size(self.name, "a payload's size", nbytes, at_least=0)
        return source.reserve(payload, nbytes)

    def get(self, payload: PayloadId, *, deadline: float) -> ShmLease | None:
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
    ) -> Generator[tuple[PayloadId, ShmLease | OmniKVError], None, None]:
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

    def _as_source(self, payload: PayloadId) -> ShmSource:
        require_payload(self.name, self._endpoint, payload, "source")
        assert self._source is not None
        return self._source

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                f"shm: {describe(self._endpoint)} was opened by process {self._pid} and does not work in its forked "
                "child; open a transport there",
                transport=self.name,
            )
        if self._closed or self._loop.has_ended:
            ended_by = self._loop.ended_by
            why = "is closed" if ended_by is None else f"has ended by an error that nobody foresaw: {ended_by!r}"
            raise TransportError(f"shm: {describe(self._endpoint)} {why}", transport=self.name) from ended_by


def _hello_of(endpoint: Endpoint, incarnation: str) -> Hello:
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
    )
    nbytes = len(encode(hello))
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ConfigError(
            f"shm: the facts of {describe(endpoint)} make a greeting of {nbytes} bytes, at most {MAX_MESSAGE_NBYTES} "
            "fit; state a digest instead of the whole text"
        )
    return hello
