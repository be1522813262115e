"""The thread that reads from one source: engines block where their network makes them, and only its own reads wait.

It begins reads in their order, has many under way at once and asks after each until it is over, well or badly. Nothing
else ends one: whoever gives a read up leaves its destination here until the engine is done with it. A read that ended
badly is tried again while its source is there, after the engine has met the source anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from omnikv.transports.one_sided_engine import Engine, EngineFault, Place, Reading

TRIES = 3
RETRY_S = 0.05
# As long as something came lately, reads are asked after at once; then with pauses that grow.
EAGER_S = 0.001
PAUSE_S = 0.00005
LONGEST_PAUSE_S = 0.001
# Nobody waits for what a source that is gone still owes.
GONE_PAUSE_S = 0.02


class Pull(Protocol):
    """One payload to be read: from `places` of its source into `local` here, `nbytes` in all."""

    places: Sequence[Place]
    nbytes: int

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it."""

    @property
    def local(self) -> int:
        """Where it goes."""


P = TypeVar("P", bound=Pull)


class Puller(Generic[P]):
    """Reads from one source. `prepare` says whether a pull has room by now, and `done` what came of each, once.

    Both are called on the thread, without the lock, as is everything of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        prepare: Callable[[P], bool],
        done: Callable[[P, EngineFault | None], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._prepare = prepare
        self._done = done
        self._broken = broken
        self._words: list[bytes] = []
        self._source: str | None = None
        self._inbox: deque[P | bytes] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._under_way: list[tuple[P, Reading, int]] = []
        self._again: list[tuple[float, P, int]] = []
        self._log = logging.getLogger(f"omnikv.{name}")
        self._thread = threading.Thread(target=self._run, name=f"omnikv-{name}", daemon=True)
        self._thread.start()

    def learn(self, word: bytes) -> None:
        """Nothing; the engine hears this of the source before the next read."""
        self._put(word)

    def pull(self, wanted: P) -> None:
        """Nothing; reads it in its turn."""
        self._put(wanted)

    def stop(self) -> None:
        """Nothing; the source is gone: what is under way ends, nothing else begins."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def join(self, deadline: float) -> bool:
        """Whether the thread has ended by `deadline` (monotonic seconds). Call after `stop`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _put(self, item: P | bytes) -> None:
        with self._changed:
            self._inbox.append(item)
            self._changed.notify()

    def _run(self) -> None:
        try:
            moved_at = time.monotonic()
            while self._turn():
                if self._move():
                    moved_at = time.monotonic()
                self._pause(time.monotonic() - moved_at)
            self._give_up_the_rest()
        except Exception as error:  # edge: top of the thread; the transport ends, and whoever waits is told  # noqa: BLE001
            self._broken(error)
        finally:
            if self._source is not None:
                self._engine.forget(self._source)

    def _turn(self) -> bool:
        """Whether to go on; takes what has come in, and sleeps while there is nothing to do."""
        with self._changed:
            if not self._under_way and not self._again:
                self._changed.wait_for(lambda: self._inbox or self._is_stopped)
            items, self._inbox = self._inbox, deque()
        for item in items:
            if isinstance(item, bytes):
                self._words.append(item)
                self._meet([item])
            else:
                self._begin(item, 1)
        return not self._is_stopped or bool(self._under_way)

    def _move(self) -> bool:
        """Whether something ended; asks after everything that is under way, and tries again what is due."""
        now = time.monotonic()
        due = [entry for entry in self._again if entry[0] <= now or self._is_stopped or entry[1].is_over]
        for entry in due:
            self._again.remove(entry)
            self._meet(self._words)
            self._begin(entry[1], entry[2])
        under_way, self._under_way = self._under_way, []
        for index, (wanted, reading, tries) in enumerate(under_way):
            try:
                if reading.poll():
                    self._done(wanted, None)
                else:
                    self._under_way.append(under_way[index])
            except EngineFault as fault:  # noqa: PERF203
                self._failed(wanted, tries, fault)
        return bool(due) or len(self._under_way) < len(under_way)

    def _begin(self, wanted: P, tries: int) -> None:
        if self._is_stopped or wanted.is_over:
            self._done(wanted, EngineFault("reading", "given up"))
            return
        if not self._prepare(wanted):
            return
        if self._source is None:
            self._failed(wanted, tries, EngineFault("meeting the source", "nothing that this engine understands"))
            return
        try:
            reading = self._engine.start(self._source, wanted.local, wanted.places)
        except EngineFault as fault:
            self._failed(wanted, tries, fault)
            return
        self._under_way.append((wanted, reading, tries))

    def _failed(self, wanted: P, tries: int, fault: EngineFault) -> None:
        if tries >= TRIES or self._is_stopped or wanted.is_over:
            self._done(wanted, fault)
        else:
            self._log.info("a read of %d bytes failed (%s), trying again", wanted.nbytes, fault)
            self._again.append((time.monotonic() + RETRY_S * tries, wanted, tries + 1))

    def _meet(self, words: list[bytes]) -> None:
        try:
            for word in words:
                self._source = self._engine.learn(word)
        except EngineFault as fault:
            self._log.warning("the engine does not take what a source said of itself: %s", fault)

    def _pause(self, idle_s: float) -> None:
        if not self._under_way and not self._again:
            return
        with self._changed:
            if self._is_stopped:
                self._changed.wait(GONE_PAUSE_S)
            elif not self._inbox and self._under_way and idle_s > EAGER_S:
                is_long = idle_s > EAGER_S * 100 and not self._engine.needs_serving
                self._changed.wait(LONGEST_PAUSE_S if is_long else PAUSE_S)
            elif not self._inbox and not self._under_way:
                self._changed.wait(RETRY_S / 10)

    def _give_up_the_rest(self) -> None:
        for _, wanted, _ in self._again:
            self._done(wanted, EngineFault("reading", "given up"))
        self._again.clear()
        with self._changed:
            items, self._inbox = self._inbox, deque()
        for item in items:
            if not isinstance(item, bytes):
                self._done(item, EngineFault("reading", "given up"))
