"""What every transport between processes is made of: one role, one thread that keeps the links, and the calls on them.

A transport of this kind brings memory (a `Shelf` at the source, a `Window` at the target) and `Sockets`; see `shm` for
the shortest example.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from omnikv.core.messages import MAX_MESSAGE_NBYTES, PROTOCOL_VERSION, Hello
from omnikv.errors import ConfigError, TransportError
from omnikv.transports.base import Endpoint
from omnikv.transports.link_loop import LinkLoop, Sockets
from omnikv.transports.offers import Offers
from omnikv.transports.pairing import describe
from omnikv.transports.shelf import Shelf
from omnikv.transports.sided import SidedTransport
from omnikv.transports.wants import Wants
from omnikv.transports.window import Window


class PairTransport(SidedTransport):
    """Moves payloads of one rank to or from processes that it is connected to. `counters` counts trouble with peers.

    `shelf` is called at a source, `window` at a target, before anything comes over a link.

    Raises:
        ConfigError: the facts are too long for one message.
        TransportError: another process serves this rank, or the system refuses.
    """

    def __init__(
        self, endpoint: Endpoint, sockets: Sockets, *, shelf: Callable[[], Shelf[Any]], window: Callable[[], Window]
    ) -> None:
        super().__init__(endpoint)
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._offers: Offers[Any] | None = None
        role: Offers[Any] | Wants
        if endpoint.side == "source":
            role = self._source = self._offers = Offers(self.name, endpoint, shelf(), self._lock, self._require_open)
        else:
            role = self._target = Wants(self.name, endpoint, window(), self._lock, self._require_open)
        hello = _hello_of(self.name, endpoint, os.urandom(16).hex())
        self._loop = role.loop = LinkLoop(self.name, endpoint, hello, role, sockets, self._lock)
        self._loop.start()

    @property
    def counters(self) -> dict[str, int]:
        """How often each kind of trouble with a peer happened."""
        return self._loop.counters

    def close(self) -> None:
        """Stop serving, end the thread, give descriptors and memory back; views stay readable. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        self._loop.close()

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
    )
    nbytes = len(msgspec.msgpack.encode(hello))
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ConfigError(
            f"{name}: the facts of {describe(endpoint)} make a greeting of {nbytes} bytes, at most "
            f"{MAX_MESSAGE_NBYTES} fit; state a digest instead of the whole text"
        )
    return hello
