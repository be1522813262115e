"""Writes many tensors into their places; large sets on two threads, since one cannot saturate memory with gathers.

What lies on a device is queued there first, on a stream of its own (`tensors.lanes`), and moves while the host's
threads copy the rest.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar, cast

import torch

from omnikv.config import MAX_PACK_THREADS
from omnikv.tensors.kv import DeviceSource, Move, TensorSource
from omnikv.tensors.lanes import device_of, have_streams, own_lane

Job = tuple[TensorSource, torch.Tensor]

# From here on a second thread pays for its wake-up; below, a warm core is faster alone.
PARALLEL_NBYTES = 4 << 20
_HOST = torch.device("cpu")
_Item = TypeVar("_Item")
# Smaller moves take less time than letting another thread of the interpreter run, and waiting for it, would.
_SMALL_NBYTES = 64 << 10
_move_at_once = ctypes.PyDLL(None).memmove
_move_at_once.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_at_once.restype = None


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


# Hears of each tensor that is final.
Written = Callable[[torch.Tensor], None]
# Hears of each range of bytes that is final: where it begins and ends.
WrittenRange = Callable[[int, int], None]


def fill(jobs: Sequence[Job], threads: int | None = None, written: Written | None = None) -> None:
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
    if written is not None:
        for queued in on_device.values():
            for _, out in queued:
                written(out)


def move_all(moves: Sequence[Move], threads: int | None = None, written: WrittenRange | None = None) -> None:
    """Nothing; every move is then done.

    Threads as in `fill`. `written` hears of each large move that is done, where it begins and ends, from the thread
    that did it.
    """

    def move(queue: deque[Move]) -> None:
        for target, origin, nbytes in _taken_from(queue):
            if nbytes < _SMALL_NBYTES:
                _move_at_once(target, origin, nbytes)
                continue
            ctypes.memmove(target, origin, nbytes)
            if written is not None:
                written(target, target + nbytes)

    if threads is None:
        threads = _usual_threads(sum(nbytes for _, _, nbytes in moves))
    _share(deque(moves), move, threads)


def _copy(jobs: Sequence[Job], threads: int | None, written: Written | None) -> None:
    def write(queue: deque[Job]) -> None:
        # Grad mode is a thread's own.
        with torch.no_grad():
            for source, out in _taken_from(queue):
                source.write_into(out)
                if written is not None:
                    written(out)

    if threads is None:
        threads = _usual_threads(sum(out.nbytes for _, out in jobs))
    _share(deque(jobs), write, threads)


def _usual_threads(nbytes: int) -> int:
    return min(2, len(os.sched_getaffinity(0))) if nbytes >= PARALLEL_NBYTES else 1


def _share(queue: deque[_Item], work: Callable[[deque[_Item]], None], threads: int) -> None:
    """Empties the queue by `work`, in as many threads as there are items for."""
    helpers: list[Future[None]] = []
    try:
        for _ in range(min(threads, len(queue)) - 1):
            helper = PACKERS.submit(lambda: work(queue))
            if helper is not None:
                helpers.append(helper)
        work(queue)
    finally:
        _wait_out(queue, helpers)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


def _wait_out(queue: deque[_Item], helpers: Sequence[Future[None]]) -> None:
    """Nothing; no helper writes any more, as often as Ctrl-C comes meanwhile: the caller may reuse the memory then."""
    try:
        queue.clear()
        for helper in helpers:
            # Not begun: cancelled.
            if not helper.cancel():
                helper.exception()
    finally:
        if not all(helper.done() for helper in helpers):
            _wait_out(queue, helpers)


def _taken_from(queue: deque[_Item]) -> Iterator[_Item]:
    """The items that no other thread has taken, one at a time."""
    while True:
        try:
            item = queue.popleft()
        except IndexError:
            return
        yield item
