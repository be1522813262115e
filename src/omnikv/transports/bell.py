"""How threads wait for something to change under a transport's lock, and survive being interrupted.

A `threading.Condition` releases the lock and takes it again inside of `wait`. An exception that arrives in between, as
Ctrl-C does in a main thread, can leave that to be undone twice: the lock is then released under another thread that
holds it, and the transport is broken for everybody. Here a waiting thread holds no lock while it sleeps: it looks under
the lock, and sleeps on a queue of its own, which the interpreter implements without Python code in between.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Found = TypeVar("Found")

# A wait longer than this is cut into pieces: the platform's locks refuse an endless timeout.
LONGEST_WAIT_S = 3600.0


class Bell:
    """Wakes the threads that wait for what `lock` guards."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._sleepers: set[queue.SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Nothing; whoever waits looks again. Call with the lock."""
        for sleeper in self._sleepers:
            # One ring that was not heard yet is enough.
            if sleeper.empty():
                sleeper.put(None)

    def wait_for(self, look: Callable[[], Found | None], deadline: float) -> Found | None:
        """What `look` finds, or None when it finds nothing by `deadline`, on the monotonic clock in seconds.

        `look` is called at least once, and with the lock; call this without it.
        """
        with self._lock:
            found = look()
        if found is not None or time.monotonic() >= deadline:
            return found
        sleeper: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            with self._lock:
                self._sleepers.add(sleeper)
                found = look()
            while found is None and (remaining_s := deadline - time.monotonic()) > 0:
                with suppress(queue.Empty):
                    sleeper.get(timeout=min(remaining_s, LONGEST_WAIT_S))
                with self._lock:
                    found = look()
            return found
        finally:
            with self._lock:
                self._sleepers.discard(sleeper)
