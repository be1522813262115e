"""Some rows of tensors `[tokens, kv_heads, ...]`: what a rank that shares tokens sends, and where it is written.

Rows are stripes (`omnikv.core.tokens`), each of which is one strided view `[times, length, kv_heads, ...]`: thousands
of interleaved tokens move in one copy.
"""

from __future__ import annotations

import torch

from omnikv.core.boxes import HeadIds
from omnikv.core.tokens import Stripe, Stripes, count
from omnikv.tensors.kv import TensorSource, head_runs


class RowSource:
    """A source over some rows and heads of a tensor `[tokens, kv_heads, ...]`; keeps a reference, copies later."""

    __slots__ = ("_heads", "_rows", "_tensor", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor, rows: Stripes, head_positions: HeadIds) -> None:
        self._tensor = tensor.detach()
        self._rows = rows
        self._heads = head_positions
        self.dtype = tensor.dtype
        self.shape = (count(rows), len(head_positions), *tensor.shape[2:])

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self._tensor.device

    def write_into(self, out: torch.Tensor) -> None:
        self._write(out, non_blocking=False)

    def queue_into(self, out: torch.Tensor) -> None:
        """As `write_into`, but `out` is filled when the device's current stream has come to it."""
        self._write(out, non_blocking=True)

    def _write(self, out: torch.Tensor, *, non_blocking: bool) -> None:
        at = 0
        for stripe in self._rows:
            source, target = striped(self._tensor, stripe), _in_turns(out, at, stripe)
            for head, length in head_runs(self._heads):
                part = source.narrow(2, self._heads[head], length)
                target.narrow(2, head, length).copy_(part, non_blocking=non_blocking)
            at += stripe.size


class GatheredRows:
    """A source over some rows of another source, which is written whole first: it can only be read as a whole."""

    __slots__ = ("_rows", "_whole", "dtype", "shape")

    def __init__(self, whole: TensorSource, rows: Stripes) -> None:
        self._whole = whole
        self._rows = rows
        self.dtype = whole.dtype
        self.shape = (count(rows), *whole.shape[1:])

    def write_into(self, out: torch.Tensor) -> None:
        whole = torch.empty(self._whole.shape, dtype=self.dtype, device=out.device)
        self._whole.write_into(whole)
        RowSource(whole, self._rows, tuple(range(whole.shape[1]))).write_into(out)


def write_rows(out: torch.Tensor, tensor: torch.Tensor, rows: Stripes | None, head_positions: HeadIds) -> None:
    """Nothing; `tensor` is then in these rows (None: all of them) and heads of `out`, in their order."""
    if rows is None:
        _write_heads(out, tensor, head_positions, axis=1)
        return
    at = 0
    for stripe in rows:
        _write_heads(striped(out, stripe), _in_turns(tensor, at, stripe), head_positions, axis=2)
        at += stripe.size


def _write_heads(out: torch.Tensor, tensor: torch.Tensor, positions: HeadIds, *, axis: int) -> None:
    runs = head_runs(positions)
    if len(runs) == 1:
        out.narrow(axis, positions[0], len(positions)).copy_(tensor)
        return
    for at, length in runs:
        out.narrow(axis, positions[at], length).copy_(tensor.narrow(axis, at, length))


def striped(tensor: torch.Tensor, stripe: Stripe) -> torch.Tensor:
    """The rows of a stripe as a view `[times, length, ...]`."""
    rows = tensor.narrow(0, stripe.start, stripe.stop - stripe.start)
    if stripe.times == 1:
        return rows.unsqueeze(0)
    return rows.unfold(0, stripe.length, stripe.stride).movedim(-1, 1)


def _in_turns(packed: torch.Tensor, at: int, stripe: Stripe) -> torch.Tensor:
    """The stripe's rows, one after another in `packed` from row `at` on, as a view `[times, length, ...]`."""
    # Splitting a dimension is always possible as a view, whatever the strides.
    return packed.narrow(0, at, stripe.size).view(stripe.times, stripe.length, *packed.shape[1:])
