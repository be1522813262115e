"""The transport within one process: threads hand payloads over through memory that they share anyway.

Theory of operation. All endpoints of one edge meet in one exchange, a table of the open sources and targets under one
lock. A payload is a block of memory in its source's ledger; a lease is a view of that same block, so
nothing is copied. Every change (a publication, an end, an acknowledgement, an endpoint that opens or closes) wakes
the waiting threads, which look again: nothing polls. There is no thread here, so what expires is freed by whoever calls
or waits next. This is the reference that the conformance suite is written against, and the transport of tests and of
stages that live in one process.
"""

from __future__ import annotations

from typing import ClassVar

from omnikv.transports.base import Capabilities, Endpoint
from omnikv.transports.memory_source import MemorySource
from omnikv.transports.memory_target import MemoryTarget
from omnikv.transports.pairing import require_size
from omnikv.transports.sided import SidedTransport


class MemoryTransport(SidedTransport):
    """Moves payloads between threads of one process.

    `pool_nbytes` bounds what a source holds at once; None means no bound.

    Raises:
        ConfigError: the rank is already served in this process, or `pool_nbytes` is negative.
    """

    name: ClassVar[str] = "memory"
    capabilities: ClassVar[Capabilities] = Capabilities(
        cross_process=False, cross_host=False, shared_memory=True, notices_peer_death=True
    )

    def __init__(self, endpoint: Endpoint, *, pool_nbytes: int | None = None) -> None:
        if pool_nbytes is not None:
            require_size(self.name, "pool_nbytes", pool_nbytes, at_least=0)
        super().__init__(endpoint)
        self._end: MemorySource | MemoryTarget
        if endpoint.side == "source":
            self._end = self._source = MemorySource(endpoint, pool_nbytes)
        else:
            self._end = self._target = MemoryTarget(endpoint)

    def close(self) -> None:
        """Leave the exchange; a source's payloads are lost, a target's leases go back. Idempotent."""
        self._end.close()
