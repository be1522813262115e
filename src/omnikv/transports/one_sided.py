"""What the transports share whose engine reads a payload where it lies at its source: one-sided, and without asking.

Theory of operation. The ends meet and prove themselves as those of `tcp` do (`proved_sockets`), and speak over that
link as over every transport. A source's payloads lie in memory that its engine knows (`one_sided_memory`). When one is
leased to a target, the source says where it lies; the target's engine reads it from there into memory that it knows in
turn (`one_sided_window`, `one_sided_puller`), over whatever network it owns. The lease pins the payload's room, and the
source confirms over the link that the lease still stands after the engine is done: an engine can tell that bytes came,
never whose they were by then. That it is done, the source hears from the target over the link, or sooner from its own
engine, where engines notify each other (`one_sided_shelf`).

An engine's calls may block, and cannot be called off. Each source's are made on a thread of its own, so one dead peer
delays no other; a deadline that passes leaves the read to that thread, and its destination to the engine until it is
done with it. The death of a peer is seen by the link, and by the engine's own code, which is kept in the error.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from omnikv.core.authentication import Claim
from omnikv.errors import ConfigError
from omnikv.transports.base import Endpoint
from omnikv.transports.links import Link
from omnikv.transports.one_sided_engine import Engine
from omnikv.transports.one_sided_loans import LentMemory
from omnikv.transports.one_sided_memory import RegisteredPool
from omnikv.transports.one_sided_messages import ToSourceOneSided, ToTargetOneSided
from omnikv.transports.one_sided_shelf import OneSidedShelf
from omnikv.transports.one_sided_window import OneSidedWindow
from omnikv.transports.pair import PairTransport
from omnikv.transports.pairing import describe
from omnikv.transports.proved_door import LaneCall
from omnikv.transports.proved_sockets import Meeting, ProvedSockets
from omnikv.transports.proved_stream import Stream
from omnikv.transports.shm_pool import Pool
from omnikv.transports.wants import Wants

# How long `close` waits for reads that the engine has not ended; what they write into stays until it has.
CLOSE_S = 2.0
# How many times longer than a peer takes to be given up its reads may still find their memory.
LINGER_TIMES = 4


class OneSidedTransport(PairTransport):
    """Moves payloads by the engine that `open_engine` gives. A subclass has `name` and `capabilities`.

    Raises:
        ConfigError: a setting is wrong, or an address beyond loopback has neither a secret nor TLS.
        TransportUnavailable: this is not Linux, or the engine is missing or does not start.
        TransportError: the address is taken, or the system refuses.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        meeting: Meeting,
        open_engine: Callable[[], Engine],
        *,
        pool_nbytes: int | None,
        landing_nbytes: int | None,
        segment_nbytes: int,
        lend: bool = False,
    ) -> None:
        if not isinstance(lend, bool):
            raise ConfigError(f"{self.name}: lend must be true or false, got {lend!r}")
        self.lends = lend and endpoint.side == "source"
        self._sockets = ProvedSockets(endpoint, meeting, self, to_source=ToSourceOneSided, to_target=ToTargetOneSided)
        is_source = endpoint.side == "source"
        setting, nbytes = ("pool_nbytes", pool_nbytes) if is_source else ("landing_nbytes", landing_nbytes)
        pool = Pool(nbytes, segment_nbytes, transport=self.name, setting=setting)
        self._engine = open_engine()
        linger_s = LINGER_TIMES * float(meeting.dead_after_s)
        self._memory = RegisteredPool(pool, self._engine, transport=self.name, linger_s=linger_s)
        self._lent = LentMemory(self._engine, transport=self.name, linger_s=linger_s)
        self._shelf: OneSidedShelf | None = None
        self._window: OneSidedWindow | None = None
        with ExitStack() as on_failure:
            on_failure.callback(self._never_mind)
            super().__init__(endpoint, self._sockets, shelf=self._open_shelf, window=self._open_window)
            on_failure.pop_all()

    @property
    def address(self) -> str:
        """Where this source may be called, "host:port"; a target listens nowhere and has the empty text."""
        return self._sockets.address

    @property
    def pool(self) -> Pool:
        """The memory of this end: a source's payloads, or what a target has received."""
        return self._memory.pool

    @property
    def engine(self) -> Engine:
        """The engine of this end."""
        return self._engine

    def census(self) -> dict[str, int]:
        """As every transport's; `lent` besides: how many payloads still hold their callers' memory, where it lends."""
        counts = super().census()
        return {**counts, "lent": self._lent.num_loans} if self.lends else counts

    def close(self) -> None:
        """Stop serving, end the threads, give descriptors and memory back; views stay readable. Idempotent."""
        if os.getpid() != self._pid:
            return
        was_closed = self._closed
        super().close()
        if not was_closed:
            self._let_go()

    def forget(self, link: Link) -> None:
        """Nothing; ends a link that took too long. Call with the lock."""
        self._loop.forget(link)

    def lane_up(self, stream: Stream, peer: Claim, call: LaneCall | None) -> None:
        """Nothing; ends a connection for payloads, which no end of this transport opens. Call with the lock."""
        self._loop.count("refused_lanes", f"a lane of {peer.side} rank {peer.rank}: {self.name} has none")
        stream.close()

    def let_go_of_lanes(self) -> None:
        """Nothing; there are none."""

    def _open_shelf(self) -> OneSidedShelf:
        thread_name = f"omnikv-{self.name}-serves-{self._endpoint.rank}"
        self._shelf = OneSidedShelf(self._memory, self._lent, self._engine, thread_name, self._lock, self._count)
        return self._shelf

    def _open_window(self) -> OneSidedWindow:
        self._window = OneSidedWindow(
            self.name, self._memory, self._engine, self._lock, self._wants_here, self._break_down
        )
        return self._window

    def _wants_here(self) -> Wants:
        assert isinstance(self._target, Wants)
        return self._target

    def _count(self, kind: str, text: str) -> None:
        self._loop.count(kind, text)

    def _never_mind(self) -> None:
        if self._shelf is not None:
            self._shelf.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._shelf is not None:
            self._shelf.join()
        if self._window is not None and not self._window.join(time.monotonic() + CLOSE_S):
            # The engine still writes into this memory, so it is kept for as long as the process lives.
            logging.getLogger(f"omnikv.{self.name}").warning(
                "%s: %s closes while its engine has not ended a read; its memory stays",
                self.name,
                describe(self._endpoint),
            )
            return
        is_read = self._shelf is not None and self._shelf.is_read
        self._lent.close(is_read=is_read)
        self._memory.close(is_read=is_read)
        self._engine.close()

    def _break_down(self, fault: BaseException) -> None:
        with self._lock:
            self._sockets.door.break_down(fault)
