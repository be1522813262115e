"""The thread that reads from one source: engines block where their network makes them, and only its own reads wait.

It begins reads in their order, has many under way at once and asks after each until it is over, well or badly. Nothing
else ends one: whoever gives a read up leaves its destination here until the engine is done with it. A read that ended
badly is tried again while its source is there, after the engine has met the source anew. The first try of a read says
to the source's engine that it went well, where engines have notices; if the source has not answered that in time, the
notice is in doubt.
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
# Where asking moves a read, it is asked after without a pause for so long after something began or ended; elsewhere
# asking takes time from the engine's own threads, and pauses are short as long as something began or ended lately.
EAGER_S = 0.001
LATELY_S = 0.1
PAUSE_S = 0.00005
LONGEST_PAUSE_S = 0.001
# How long a source takes at most to answer a notice, before it is taken for lost.
NOTICE_S = 0.2
# Nobody waits for what a source that is gone still owes.
GONE_PAUSE_S = 0.02


class Pull(Protocol):
    """One payload to be read: from `places` of its source into `local` here, `nbytes` in all, with a `notice` of it."""

    places: Sequence[Place]
    nbytes: int
    notice: bytes

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it."""

    @property
    def is_sound(self) -> bool:
        """Whether its source has answered, so that it expects no read any more."""

    @property
    def local(self) -> int:
        """Where it goes."""


P = TypeVar("P", bound=Pull)


class Puller(Generic[P]):
    """Reads from one source. `prepare` says whether a pull has room by now, and `done` what came of each, once, and
    whether the source's engine was told. `doubt` is called for what was, and was not answered in time.

    All three are called on the thread, without the lock, as is everything of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        prepare: Callable[[P], bool],
        done: Callable[[P, EngineFault | None, bool], None],
        doubt: Callable[[P], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._prepare = prepare
        self._done = done
        self._doubt = doubt
        self._broken = broken
        self._words: list[bytes] = []
        self._source: str | None = None
        self._inbox: deque[P | bytes] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._under_way: list[tuple[P, Reading, int]] = []
        self._again: list[tuple[float, P, int]] = []
        # When a read began or ended last.
        self._moved_at = 0.0
        # What the source's engine was told of, and until when the source ought to answer.
        self._told: deque[tuple[float, P]] = deque()
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
            while self._turn():
                self._move()
                self._pause()
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
                wait_s = max(0.0, self._told[0][0] - time.monotonic()) if self._told else None
                self._changed.wait_for(lambda: self._inbox or self._is_stopped, wait_s)
            items, self._inbox = self._inbox, deque()
        self._doubt_what_is_due()
        for item in items:
            if isinstance(item, bytes):
                self._words.append(item)
                self._meet([item])
            else:
                self._begin(item, 1)
        return not self._is_stopped or bool(self._under_way)

    def _doubt_what_is_due(self) -> None:
        now = time.monotonic()
        while self._told and (self._told[0][1].is_sound or self._told[0][0] <= now):
            wanted = self._told.popleft()[1]
            if not wanted.is_sound:
                self._doubt(wanted)

    def _move(self) -> None:
        """Nothing; asks after everything that is under way, and tries again what is due."""
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
                    self._went_well(wanted, tries)
                else:
                    self._under_way.append(under_way[index])
            except EngineFault as fault:  # noqa: PERF203
                self._failed(wanted, tries, fault)
        if len(self._under_way) < len(under_way):
            self._moved_at = time.monotonic()

    def _went_well(self, wanted: P, tries: int) -> None:
        has_notified = bool(self._notice_of(wanted, tries))
        if has_notified:
            self._told.append((time.monotonic() + NOTICE_S, wanted))
        self._done(wanted, None, has_notified)

    def _notice_of(self, wanted: P, tries: int) -> bytes:
        # What failed once may fail for a network that loses notices too.
        return wanted.notice if tries == 1 else b""

    def _begin(self, wanted: P, tries: int) -> None:
        if self._is_stopped or wanted.is_over:
            self._give_up(wanted)
            return
        if not self._prepare(wanted):
            return
        if self._source is None:
            self._failed(wanted, tries, EngineFault("meeting the source", "nothing that this engine understands"))
            return
        try:
            notice = self._notice_of(wanted, tries)
            reading = self._engine.start(self._source, wanted.local, wanted.places, notice)
        except EngineFault as fault:
            self._failed(wanted, tries, fault)
            return
        self._under_way.append((wanted, reading, tries))
        self._moved_at = time.monotonic()

    def _failed(self, wanted: P, tries: int, fault: EngineFault) -> None:
        if tries >= TRIES or self._is_stopped or wanted.is_over or wanted.is_sound:
            self._done(wanted, fault, False)
        else:
            self._log.info("a read of %d bytes failed (%s), trying again", wanted.nbytes, fault)
            self._again.append((time.monotonic() + RETRY_S * tries, wanted, tries + 1))

    def _meet(self, words: list[bytes]) -> None:
        try:
            for word in words:
                self._source = self._engine.learn(word)
        except EngineFault as fault:
            self._log.warning("the engine does not take what a source said of itself: %s", fault)

    def _pause(self) -> None:
        if not self._under_way and not self._again:
            return
        with self._changed:
            if self._is_stopped:
                self._changed.wait(GONE_PAUSE_S)
            elif not self._inbox:
                self._changed.wait(self._pause_s())

    def _pause_s(self) -> float:
        if not self._under_way:
            return RETRY_S / 10
        idle_s = time.monotonic() - self._moved_at
        if self._engine.needs_serving:
            return PAUSE_S if idle_s > EAGER_S else 0.0
        return LONGEST_PAUSE_S if idle_s > LATELY_S else PAUSE_S

    def _give_up_the_rest(self) -> None:
        for _, wanted, _ in self._again:
            self._give_up(wanted)
        self._again.clear()
        with self._changed:
            items, self._inbox = self._inbox, deque()
        for item in items:
            if not isinstance(item, bytes):
                self._give_up(item)

    def _give_up(self, wanted: P) -> None:
        self._done(wanted, EngineFault("reading", "given up"), False)
