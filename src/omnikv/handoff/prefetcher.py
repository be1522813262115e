"""Fetching the next request's KV in the background, on one thread that this object owns.

`omnikv.core.prefetch` says what each event leads to; this shell holds the lock, the queue, the outcomes and the thread.
Only one request is kept in flight: submitting or taking one discards the others, because an engine that moves on to
another request has no more use for them. What is discarded goes back to its sender where the connector takes it back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from omnikv.core.prefetch import Effect, Event, Kind, Phase, Table, step
from omnikv.errors import PayloadLost, ReceiveTimeout

logger = logging.getLogger("omnikv.prefetch")


class Prefetched(Protocol):
    """What a fetch came to, whole or not, with whatever it took from the connector."""

    @property
    def is_consumed(self) -> bool:
        """Whether something was taken that the connector does not take back."""

    def give_back(self) -> bool:
        """Whether nothing stays here; returns what came to its senders."""


_Outcome = TypeVar("_Outcome", bound=Prefetched)
_CAPACITY = 8


@dataclass(frozen=True, slots=True)
class _Job(Generic[_Outcome]):
    request_id: str
    fetch: Callable[[], _Outcome | None]
    device: torch.device | None


class Prefetcher(Generic[_Outcome]):
    """Fetches one request at a time; close it to join its thread, which starts with the first request.

    A `fetch` gives what it came to, or None when there is nothing to go on with. Whatever it raises is logged and
    counts as nothing, so that the taker fetches for itself; so does what still ran when this process was forked.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._table = Table()
        self._queue: deque[_Job[_Outcome]] = deque()
        self._outcomes: dict[str, _Outcome] = {}
        # Discarded, and to be given back once the lock is free: a connector takes its time.
        self._unused: list[_Outcome] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stream: Any = None

    def __contains__(self, request_id: str) -> bool:
        """Whether a fetch of this request is queued, runs, or has an outcome to take."""
        return self._table.phase(request_id) in (Phase.QUEUED, Phase.RUNNING, Phase.READY)

    def submit(self, request_id: str, fetch: Callable[[], _Outcome | None], device: torch.device | None = None) -> bool:
        """Whether a fetch of this request is under way afterwards; other requests are discarded.

        `fetch` runs on the background thread, its copies to a CUDA `device` on a stream of their own.
        """
        with self._giving_back(), self._changed:
            self._revive()
            self._discard_all(keep=request_id)
            if self._closed or len(self._queue) >= _CAPACITY:
                return False
            if Effect.ENQUEUE in self._step(Kind.SUBMIT, request_id):
                self._queue.append(_Job(request_id, fetch, device))
                self._start_thread()
                self._changed.notify_all()
            return True

    def take(self, request_id: str, *, deadline: float) -> _Outcome | None:
        """What the request's fetch came to, once it has ended, and the caller's from now on; None when there is none.

        Other requests are discarded.

        Raises:
            ReceiveTimeout: the fetch still runs at `deadline` (monotonic seconds); it may be taken later.
            PayloadLost: the payload was taken from the connector and is gone.
        """
        with self._giving_back(), self._changed:
            self._revive()
            self._discard_all(keep=request_id)
            while Effect.AWAIT in (effects := self._step(Kind.TAKE, request_id)):
                self._await(request_id, deadline)
            outcome = self._outcomes.pop(request_id, None) if Effect.DELIVER in effects else None
        if Effect.REPORT_LOSS in effects:
            raise PayloadLost(
                f"the prefetched KV of request {request_id!r} was discarded before it was asked for again",
                request_id=request_id,
            )
        return outcome

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Whether no fetch is queued or runs any more, at the latest after `timeout_s`; outcomes stay to be taken."""
        with self._changed:
            self._revive()
            return self._changed.wait_for(
                lambda: not self._table.having(Phase.QUEUED, Phase.RUNNING, Phase.ORPHANED),
                None if timeout_s is None else _waitable(timeout_s),
            )

    def close(self) -> None:
        """Discard everything and join the thread; a fetch that runs is waited for. Idempotent."""
        with self._giving_back(), self._changed:
            self._closed = True
            self._discard_all(keep=None)
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _step(self, kind: Kind, request_id: str, *, consumed: bool = False) -> tuple[Effect, ...]:
        self._table, effects = step(self._table, Event(kind, request_id, consumed))
        if Effect.UNQUEUE in effects:
            self._queue = deque(job for job in self._queue if job.request_id != request_id)
        if Effect.DROP in effects:
            dropped = self._outcomes.pop(request_id, None)
            if dropped is not None:
                self._unused.append(dropped)
        return effects

    def _await(self, request_id: str, deadline: float) -> None:
        has_ended = self._changed.wait_for(
            lambda: self._table.phase(request_id) is not Phase.RUNNING, _waitable(deadline - time.monotonic())
        )
        if not has_ended:
            raise ReceiveTimeout(
                f"KV of request {request_id!r} is still being prefetched: the deadline passed", request_id=request_id
            )

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Gives back, after the block, what was discarded in it; to be entered without the lock."""
        try:
            yield
        finally:
            with self._changed:
                unused, self._unused = self._unused, []
            for outcome in unused:
                outcome.give_back()

    def _discard_all(self, *, keep: str | None) -> None:
        for request_id in self._table.having(Phase.QUEUED, Phase.RUNNING, Phase.READY):
            if request_id != keep:
                logger.debug("discarding the prefetch of request %s", request_id)
                self._step(Kind.DISCARD, request_id)

    def _revive(self) -> None:
        if self._thread is None or self._thread.is_alive() or self._closed:
            return
        # A forked child has none of its parent's threads.
        self._thread = None
        for request_id in self._table.having(Phase.RUNNING, Phase.ORPHANED):
            self._step(Kind.FINISH, request_id)
        if self._queue:
            self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            # A daemon, so that an owner who forgot to close cannot keep the interpreter from ending.
            self._thread = threading.Thread(target=self._work, name="omnikv-kv-prefetch", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                job = self._queue.popleft()
                self._step(Kind.START, job.request_id)
            outcome = self._run(job)
            with self._giving_back(), self._changed:
                if outcome is not None:
                    self._outcomes[job.request_id] = outcome
                consumed = outcome is not None and outcome.is_consumed
                self._step(Kind.FINISH, job.request_id, consumed=consumed)
                self._changed.notify_all()

    def _run(self, job: _Job[_Outcome]) -> _Outcome | None:
        try:
            with self._copy_stream(job.device):
                return job.fetch()
        # edge: the top of a background thread; what is raised here reaches nobody, and a hook may even ask to exit.
        except BaseException:
            logger.exception("the prefetch of request %s failed", job.request_id)
            return None

    @contextmanager
    def _copy_stream(self, device: torch.device | None) -> Iterator[None]:
        """Makes copies to a CUDA device run on a stream of their own, finished when the block ends."""
        if device is None or device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()


def _waitable(seconds: float) -> float:
    """The time as a condition takes it: not negative, no more than threads can wait, and no time where it is none."""
    return min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else 0.0
