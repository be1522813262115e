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

    def write_into(self, out: torch.Tensor) -> None:
        at = 0
        for stripe in self._rows:
            source = striped(self._tensor, stripe)
            target = _in_turns(out.narrow(0, at, stripe.size), stripe)
            for head, length in head_runs(self._heads):
                target.narrow(2, head, length).copy_(source.narrow(2, self._heads[head], length))
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
    at = 0
    for stripe in (Stripe.of(0, out.shape[0]),) if rows is None else rows:
        source = _in_turns(tensor.narrow(0, at, stripe.size), stripe)
        target = striped(out, stripe)
        for head, length in head_runs(head_positions):
            target.narrow(2, head_positions[head], length).copy_(source.narrow(2, head, length))
        at += stripe.size


def striped(tensor: torch.Tensor, stripe: Stripe) -> torch.Tensor:
    """The rows of a stripe as a view `[times, length, ...]`."""
    rows = tensor.narrow(0, stripe.start, stripe.stop - stripe.start)
    if stripe.times == 1:
        return rows.unsqueeze(0)
    return rows.unfold(0, stripe.length, stripe.stride).movedim(-1, 1)


def _in_turns(packed: torch.Tensor, stripe: Stripe) -> torch.Tensor:
    """The stripe's rows, one after another in `packed`, as a view `[times, length, ...]`."""
    # Splitting a dimension is always possible as a view, whatever the strides.
    return packed.view(stripe.times, stripe.length, *packed.shape[1:])
