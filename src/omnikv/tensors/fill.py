"""Writes many tensors into their places; large sets on two threads, since one cannot saturate memory with gathers."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from omnikv.tensors.kv import TensorSource

Job = tuple[TensorSource, torch.Tensor]

# From here on a second thread pays for its wake-up; below, a warm core is faster alone.
PARALLEL_NBYTES = 4 << 20
_MAX_HELPERS = 2
_STREAMED: tuple[Any, ...] = (torch.cuda, torch.xpu)


def fill(jobs: Sequence[Job]) -> None:
    """Nothing; each source has then written itself into its tensor, which nothing here touches any more.

    The caller's thread works too and takes whatever no helper has begun, so a busy or forked-away pool delays nobody.

    Raises:
        Exception: whatever a source raised; the other places may then hold anything.
    """
    queue = deque(jobs)
    helper = _start_helper(queue) if _worth_sharing(jobs) else None
    if helper is None:
        _work(queue)
        return
    try:
        _work(queue)
    finally:
        queue.clear()
        # Not begun: cancelled. Begun: it must have ended before the caller may reuse the memory.
        begun = not helper.cancel()
        if begun:
            wait((helper,))
    if begun:
        helper.result()


def _worth_sharing(jobs: Sequence[Job]) -> bool:
    if len(jobs) < 2 or sum(out.nbytes for _, out in jobs) < PARALLEL_NBYTES:
        return False
    # Streams are a thread's own: a helper would not wait for kernels that the caller's stream still runs.
    if any(backend.is_initialized() for backend in _STREAMED):
        return False
    return len(os.sched_getaffinity(0)) > 1


def _work(queue: deque[Job]) -> None:
    # Grad mode is a thread's own as well.
    with torch.no_grad():
        while True:
            try:
                source, out = queue.popleft()
            except IndexError:
                return
            source.write_into(out)


def _start_helper(queue: deque[Job]) -> Future[None] | None:
    try:
        return _pool().submit(_work, queue)
    except RuntimeError:
        # The interpreter is shutting down and takes no new work.
        return None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_HELPERS, thread_name_prefix="omnikv-pack")


# A forked child has the pool but not its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
