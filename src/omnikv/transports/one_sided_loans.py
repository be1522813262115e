"""Callers' memory that an engine knows: registered when it is first lent, and found again every time after.

A cache of registrations, keyed by where the memory begins. One that nobody lends any more stays until its memory is
gone, its place is needed, or the transport closes: engines keep their caches, so each is registered once. The memory
itself is held while it is lent, and for a while more (`linger_s`, seen to at the next loan) where a peer that was given
up may still be reading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from omnikv.core.lending import Memory
from omnikv.errors import PutRejected, TransportError
from omnikv.transports.one_sided_engine import Engine, EngineFault

MAX_REGISTERED = 1024
# In a transport's life, for its targets remember each: caches are made once, and who makes more has each copied.
MAX_EVER = 4096

# As `one_sided_memory` keeps what a closed transport may be sending from.
_kept: list[object] = []


class Registered:
    """Memory that the engine knows; `word` is what peers must learn of it."""

    def __init__(self, memory: Memory, word: bytes) -> None:
        self.address = memory.address
        self.nbytes = memory.nbytes
        self.word = word
        self.is_gone: Callable[[], bool] = memory.is_gone
        self.num_loans = 0
        self.owner: object | None = None
        self.held_until = 0.0


class LentMemory:
    """What callers lend, known to `engine`. Any thread may call it."""

    def __init__(self, engine: Engine, *, transport: str, linger_s: float) -> None:
        self._engine = engine
        self._transport = transport
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_loans = 0
        self._num_ever = 0
        # The one that was lent longest ago comes first.
        self._known: dict[int, Registered] = {}

    @property
    def num_loans(self) -> int:
        """How many loans are not over."""
        return self._num_loans

    def hold(self, wanted: Sequence[Memory]) -> list[Registered]:
        """All of this memory as one loan: the engine knows it, and it stays until `let_go`.

        Raises:
            PutRejected: some of it is lent now as a smaller stretch; `retryable`.
            TransportError: closed, or the engine does not take it.
        """
        held: list[Registered] = []
        with ExitStack() as on_failure:
            on_failure.callback(self.let_go, held, is_read=False)
            with self._lock:
                self._num_loans += 1
                self._tidy(time.monotonic())
                for memory in wanted:
                    known = self._find(memory) or self._register(memory)
                    known.num_loans += 1
                    known.owner = memory.owner
                    held.append(known)
                    self._known[memory.address] = self._known.pop(memory.address)
            on_failure.pop_all()
        return held

    def let_go(self, held: Sequence[Registered], *, is_read: bool) -> None:
        """Nothing; the loan is over, though a peer that was given up may still read where `is_read`."""
        until = time.monotonic() + self._linger_s if is_read else 0.0
        with self._lock:
            self._num_loans -= 1
            for known in held:
                known.num_loans -= 1
                known.held_until = max(known.held_until, until)
                if not known.num_loans and not known.held_until:
                    known.owner = None

    def close(self, *, is_read: bool) -> None:
        """Nothing; the engine knows none of it any more. What a peer may be reading is held for good."""
        with self._lock:
            self._is_closed = True
            if is_read:
                _kept.extend(known.owner for known in self._known.values() if known.owner is not None)
            for known in self._known.values():
                self._engine.unregister(known.address)
            self._known.clear()

    def _tidy(self, now: float) -> None:
        """Lets go of what was held long enough, and has the engine forget what is gone or beyond what is kept."""
        idle = [known for known in self._known.values() if not known.num_loans]
        for known in idle:
            if known.held_until <= now:
                known.owner, known.held_until = None, 0.0
                if known.is_gone() or len(self._known) >= MAX_REGISTERED:
                    self._forget(known)

    def _find(self, memory: Memory) -> Registered | None:
        known = self._known.get(memory.address)
        if known is None or (known.nbytes >= memory.nbytes and not known.is_gone()):
            return known
        if known.num_loans or known.held_until:
            raise PutRejected(
                f"{self._transport}: {known.nbytes} bytes at {known.address:#x} are lent now, and {memory.nbytes} "
                "there can be only once that has ended; send again then",
                retryable=True,
                transport=self._transport,
            )
        self._forget(known)
        return None

    def _forget(self, known: Registered) -> None:
        del self._known[known.address]
        self._engine.unregister(known.address)

    def _register(self, memory: Memory) -> Registered:
        if self._is_closed:
            raise TransportError(f"{self._transport}: it is closed, and lends nothing", transport=self._transport)
        if self._num_ever >= MAX_EVER:
            raise TransportError(
                f"{self._transport}: {MAX_EVER} different caches were lent, as many as targets are told of: make the "
                "caches once, or send without the option lend",
                transport=self._transport,
            )
        try:
            known = Registered(memory, self._engine.register(memory.address, memory.nbytes))
        except EngineFault as fault:
            raise TransportError(
                f"{self._transport}: the engine does not take {memory.nbytes} bytes of a cache that is lent ({fault}): "
                "for locked memory, raise `ulimit -l`, or send without the option lend",
                transport=self._transport,
            ) from fault
        self._num_ever += 1
        self._known[memory.address] = known
        return known
