"""Where the ends of one edge meet within a process, and who is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omnikv.core.keys import Edge
from omnikv.transports.base import Seat
from omnikv.transports.bell import Bell

if TYPE_CHECKING:
    from omnikv.transports.memory_source import MemorySource
    from omnikv.transports.memory_target import MemoryTarget


class Exchange:
    """The open ends of one edge. `lock` guards everything in it, the ends' own tables included."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.lock = threading.Lock()
        self.changed = Bell(self.lock)
        self.sources: dict[Seat, MemorySource] = {}
        self.targets: dict[Seat, MemoryTarget] = {}


_exchanges: dict[Edge, Exchange] = {}
_exchanges_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """A child shares no memory with its parent's ends, and may find the lock held by a thread that it has not."""
    global _exchanges_lock
    _exchanges_lock = threading.Lock()
    _exchanges.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextmanager
def entering(edge: Edge) -> Iterator[Exchange]:
    """The exchange of `edge`, locked, for an end that enters it."""
    with _exchanges_lock:
        exchange = _exchanges.setdefault(edge, Exchange(edge))
        with exchange.lock:
            yield exchange


@contextmanager
def leaving(exchange: Exchange) -> Iterator[None]:
    """Nothing; the exchange is locked for an end that leaves it, and goes with its last one."""
    with _exchanges_lock, exchange.lock:
        yield
        if not exchange.sources and not exchange.targets and _exchanges.get(exchange.edge) is exchange:
            del _exchanges[exchange.edge]
