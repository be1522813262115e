"""The one shape that KV has between stages: a key and a value tensor a layer, `[tokens, kv_heads, head_dim]`."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import torch

from omnikv.core.hashed import Hashed


class LayerKV(NamedTuple):
    """One layer's key and value, each `[tokens, kv_heads, head_dim]`."""

    key: torch.Tensor
    value: torch.Tensor


class TensorSource(Protocol):
    """A tensor that can be written into room given to it, in one pass: dense, or still scattered over paged blocks."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def write_into(self, out: torch.Tensor) -> None:
        """Fill `out`, a contiguous tensor of this shape, and of this dtype or one that a copy converts into."""


class DeviceSource(TensorSource, Protocol):
    """A source that lies on a device, and can leave its copy to that device's current stream."""

    @property
    def device(self) -> torch.device: ...

    def queue_into(self, out: torch.Tensor) -> None:
        """As `write_into`, but `out` is filled only when the current stream of `device` has come to it."""


# Bytes that move as they are: `(to this address, from that address, how many)`, both in this process.
Move: TypeAlias = "tuple[int, int, int]"


class HostSource(TensorSource, Protocol):
    """A source that may lie in host memory in so few pieces that naming them is the fastest way to read it."""

    def add_moves(self, address: int, moves: list[Move]) -> bool:
        """Whether `moves` now has those that fill a place of this dtype at `address` too; False where it takes more."""


class LayerSource(NamedTuple):
    """One layer's key and value, as sources still to be written."""

    key: TensorSource
    value: TensorSource


class LayerSources(tuple[LayerSource, ...]):
    """All layers of a payload; what follows from them is worked out once for all payloads that they go into."""

    @cached_property
    def in_order(self) -> tuple[TensorSource, ...]:
        """All keys, then all values, as released engines write them."""
        return (*(layer.key for layer in self), *(layer.value for layer in self))

    @cached_property
    def kinds(self) -> Hashed[tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and the shape of each source, in that order."""
        return Hashed((source.dtype, source.shape) for source in self.in_order)


class DenseSource:
    """A source over a tensor `[tokens, kv_heads, head_dim]` or some heads of it; keeps a reference, copies later."""

    __slots__ = ("_parts", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor, head_positions: tuple[int, ...] | None = None) -> None:
        """`head_positions` index dimension 1; None takes the tensor whole."""
        tensor = tensor.detach()
        self.dtype = tensor.dtype
        if head_positions is None or head_positions == tuple(range(tensor.shape[1])):
            self.shape = tuple(tensor.shape)
            self._parts = [(0, tensor)]
            return
        self.shape = (tensor.shape[0], len(head_positions), *tensor.shape[2:])
        # Runs of neighbouring heads move in one strided copy each.
        self._parts = [(at, tensor.narrow(1, head_positions[at], length)) for at, length in head_runs(head_positions)]

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self._parts[0][1].device

    def add_moves(self, address: int, moves: list[Move]) -> bool:
        """As `HostSource`."""
        tensor = self._parts[0][1]
        if len(self._parts) > 1 or not is_plain(tensor):
            return False
        moves.append((address, tensor.data_ptr(), tensor.nbytes))
        return True

    def write_into(self, out: torch.Tensor) -> None:
        self._write(out, non_blocking=False)

    def queue_into(self, out: torch.Tensor) -> None:
        """As `write_into`, but `out` is filled when the device's current stream has come to it."""
        self._write(out, non_blocking=True)

    def _write(self, out: torch.Tensor, *, non_blocking: bool) -> None:
        for at, part in self._parts:
            place = out if part.shape == out.shape else out.narrow(1, at, part.shape[1])
            place.copy_(part, non_blocking=non_blocking)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are the bytes that lie, one after another, at its address in host memory."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return False
    # Values that are stored conjugated or negated are complex ones, or parts of such, which are not contiguous unless
    # there is one. The question lets other threads of the interpreter run, so it is not asked of every tensor.
    if tensor.dtype.is_complex or tensor.numel() == 1:
        return not tensor.is_conj() and not tensor.is_neg()
    return True


def head_runs(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    """`(start, length)` of each run of consecutive values in `positions`, in order."""
    runs: list[tuple[int, int]] = []
    for at, position in enumerate(positions):
        if at and position == positions[at - 1] + 1:
            start, length = runs[-1]
            runs[-1] = (start, length + 1)
        else:
            runs.append((at, 1))
    return runs
