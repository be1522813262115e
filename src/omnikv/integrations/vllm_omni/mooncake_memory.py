"""The memory of a Mooncake connector: one pool on a device, registered with the engine, and payloads that lie in it."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping
from typing import Any, cast

import torch

from omnikv.errors import ConfigError, PutRejected, TransportError
from omnikv.integrations.vllm_omni.mooncake_pulls import GRACE_S
from omnikv.transports.landing import LandingPool, LandingRoom
from omnikv.transports.mooncake_engine import MooncakeEngine, mooncake_engine
from omnikv.transports.one_sided_engine import EngineFault

_NAME = "mooncake"
DEFAULT_POOL_NBYTES = 1 << 30
_ANY_HOST = ("", "auto", "*", "0.0.0.0", "::")


class PooledBuffer:
    """A payload in the connector's pool: `tensor` is its bytes, 1-D uint8, to be read until `release`."""

    def __init__(self, room: LandingRoom) -> None:
        self._room = room

    @property
    def tensor(self) -> torch.Tensor:
        """The payload's bytes, in the pool."""
        return cast(torch.Tensor, self._room.view)

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.tensor.numel()

    def as_tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The payload as a tensor of this type and shape, in the pool.

        Raises:
            ConfigError: it has not that many bytes.
        """
        if self.size != dtype.itemsize * torch.Size(shape).numel():
            raise ConfigError(f"a payload of {self.size} bytes is no {dtype} tensor of shape {shape}")
        return self.tensor.view(dtype).reshape(shape)

    def to_bytes(self) -> bytes:
        """A copy of the payload."""
        here = self.tensor.cpu()
        return ctypes.string_at(here.data_ptr(), here.numel())

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self._room.abandon()

    def __enter__(self) -> PooledBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PoolMemory:
    """The connector's engine and its pool: one stretch of memory on a device, registered whole.

    Raises:
        ConfigError: the pool cannot be had here.
        TransportUnavailable: the engine is not installed, or does not start.
        TransportError: it does not take the memory.
    """

    def __init__(self, host: str, config: Mapping[str, Any]) -> None:
        nbytes = int(config.get("memory_pool_size", DEFAULT_POOL_NBYTES))
        device = torch.device(config.get("memory_pool_device", "cpu"))
        if nbytes <= 0 or (device.type == "cuda" and not torch.cuda.is_available()):
            raise ConfigError(
                f"{_NAME}: a pool of {nbytes} bytes on {device} cannot be had here: correct memory_pool_size, or "
                "memory_pool_device (cpu works everywhere)"
            )
        devices = str(config.get("device_name") or os.environ.get("RDMA_DEVICE_NAME", ""))
        self.engine: MooncakeEngine = mooncake_engine(host, str(config.get("protocol", "rdma")), devices)
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self._pool = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        try:
            self.engine.register(self._pool.data_ptr(), nbytes)
        except EngineFault as fault:
            raise TransportError(
                f"{_NAME}: the engine does not take a pool of {nbytes} bytes on {device} ({fault}): lower "
                "memory_pool_size, or for locked memory raise `ulimit -l`",
                transport=_NAME,
            ) from fault
        # A tensor is cut and measured like a view, and may lie on a device, where there are no views.
        self.rooms = LandingPool(_NAME, cast(memoryview, self._pool), grace_s=GRACE_S)

    def take(self, nbytes: int, *, writer: Any, deadline: float) -> LandingRoom | None:
        """Room, or None where there is none by `deadline` (monotonic seconds), or never."""
        try:
            return self.rooms.take(nbytes, writer, deadline=deadline)
        except PutRejected:
            return None

    def address_of(self, room: LandingRoom) -> int:
        """Where the room lies."""
        return self._pool.data_ptr() + room.offset

    def copy_in(self, room: LandingRoom, payload: torch.Tensor) -> None:
        """Nothing; the payload is in the room, for an engine that asks no stream."""
        cast(torch.Tensor, room.view).copy_(payload)
        for tensor in (payload, self._pool):
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()

    def close(self) -> None:
        """Nothing; the engine knows this memory no more."""
        self.engine.unregister(self._pool.data_ptr())


def reachable_host(configured: Any) -> str:
    """The configured host, or the address by which this machine reaches others."""
    host = "auto" if configured is None else str(configured)
    if host.lower() not in _ANY_HOST:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the system only chooses the way.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
