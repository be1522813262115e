"""Copies from a device into host memory, on a stream of their own beside the engine's.

The gather runs on the device, after what the engine had queued on its current stream when it sent; its result goes
straight into the place where it is to lie. That is a direct transfer where the host memory is pinned, as a pool's is
(`pin`), and one through the driver's own buffer elsewhere. Whoever queues waits for the lane before anybody may read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from omnikv.tensors.borrow import address_of
from omnikv.tensors.kv import DeviceSource, TensorSource

_STREAMED: tuple[Any, ...] = (torch.cuda, torch.xpu)


def have_streams() -> bool:
    """Whether a device with streams is in use in this process."""
    return any(backend.is_initialized() for backend in _STREAMED)


def device_of(source: TensorSource) -> torch.device | None:
    """Where the source lies, as far as it says."""
    device: torch.device | None = getattr(source, "device", None)
    return device


@contextmanager
def own_lane(device: torch.device, jobs: Sequence[tuple[DeviceSource, torch.Tensor]]) -> Iterator[None]:
    """Queues all jobs on the lane of `device`; they are done when the block is left, however it is."""
    backend, lane = getattr(torch, device.type), _lane_of(device)
    lane.wait_stream(backend.current_stream(device))
    try:
        with torch.no_grad(), backend.stream(lane):
            for source, out in jobs:
                source.queue_into(out)
        yield
    finally:
        lane.synchronize()


def pin(view: memoryview) -> bool:
    """Whether `view`, whole pages, is now pinned for direct transfers: until `unpin`, which must come before it goes.

    False where no CUDA device is in use yet, or it refuses; transfers are then slower and no less right.
    """
    cuda: Any = torch.cuda
    return cuda.is_initialized() and int(cuda.cudart().cudaHostRegister(address_of(view), view.nbytes, 0)) == 0


def unpin(view: memoryview) -> None:
    """Nothing; undoes `pin`."""
    cuda: Any = torch.cuda
    cuda.cudart().cudaHostUnregister(address_of(view))


@functools.lru_cache(maxsize=64)
def _lane_of(device: torch.device) -> Any:
    return getattr(torch, device.type).Stream(device)
