"""Writes many tensors into their places; large sets on two threads, since one cannot saturate memory with gathers.

What lies on a device is queued there first, on a stream of its own (`tensors.lanes`), and moves while the host's
threads copy the rest.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import cast

import torch

from omnikv.config import MAX_PACK_THREADS
from omnikv.tensors.kv import DeviceSource, TensorSource
from omnikv.tensors.lanes import device_of, have_streams, own_lane

Job = tuple[TensorSource, torch.Tensor]

# From here on a second thread pays for its wake-up; below, a warm core is faster alone.
PARALLEL_NBYTES = 4 << 20
_HOST = torch.device("cpu")


class PackingThreads:
    """The threads that help callers of `fill`, shared by all of a process. They start when first needed; `close` ends
    them, and the next need starts others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """The call of `work` in a thread, once one is free; None where the interpreter ends and takes no new work."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_PACK_THREADS - 1, thread_name_prefix="omnikv-pack")
            try:
                return self._pool.submit(work)
            except RuntimeError:
                return None

    def close(self) -> None:
        """Nothing; ends the threads once they have written what they began. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def forget(self) -> None:
        """Nothing; in a forked child, which has no such threads."""
        self._lock, self._pool = threading.Lock(), None


PACKERS = PackingThreads()
os.register_at_fork(after_in_child=PACKERS.forget)


Written = Callable[[torch.Tensor], None]


def no_one(out: torch.Tensor) -> None:
    """Who hears of each tensor where nobody asked to."""


def fill(jobs: Sequence[Job], threads: int | None = None, written: Written = no_one) -> None:
    """Nothing; each source has then written itself into its tensor, which nothing here touches any more.

    At most `threads` threads copy, the caller's among them; None takes two where the jobs are large and there are two
    cores. The caller takes whatever no helper has begun, so busy helpers delay nobody. `written` hears of each tensor
    once it is final, from the thread that wrote it.

    Raises:
        Exception: whatever a source raised; the other places may then hold anything.
    """
    if not have_streams():
        _copy(jobs, threads, written)
        return
    on_host: list[Job] = []
    on_device: dict[torch.device, list[tuple[DeviceSource, torch.Tensor]]] = {}
    for source, out in jobs:
        device = device_of(source)
        if device is not None and device.type != "cpu" and out.is_cpu:
            on_device.setdefault(device, []).append((cast(DeviceSource, source), out))
        else:
            on_host.append((source, out))
    with ExitStack() as until_written:
        for device, queued in on_device.items():
            until_written.enter_context(own_lane(device, queued))
        # Streams are a thread's own: a helper would not wait for kernels that the caller's stream still runs.
        may_share = all(device_of(source) == _HOST for source, _ in on_host)
        _copy(on_host, threads if may_share else 1, written)
    for queued in on_device.values():
        for _, out in queued:
            written(out)


def _copy(jobs: Sequence[Job], threads: int | None, written: Written) -> None:
    if threads is None:
        is_large = sum(out.nbytes for _, out in jobs) >= PARALLEL_NBYTES
        threads = min(2, len(os.sched_getaffinity(0))) if is_large else 1
    _work_with(min(threads, len(jobs)) - 1, deque(jobs), written)


def _work_with(num_helpers: int, queue: deque[Job], written: Written) -> None:
    helpers = [PACKERS.submit(lambda: _work(queue, written)) for _ in range(num_helpers)]
    begun: list[Future[None]] = []
    try:
        _work(queue, written)
    finally:
        queue.clear()
        # Not begun: cancelled. Begun: it must have ended before the caller may reuse the memory.
        begun = [helper for helper in helpers if helper is not None and not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


def _work(queue: deque[Job], written: Written) -> None:
    # Grad mode is a thread's own as well.
    with torch.no_grad():
        while True:
            try:
                source, out = queue.popleft()
            except IndexError:
                return
            source.write_into(out)
            written(out)
