"""Payloads that stay in an engine's paged caches: only their head, and what is cut too finely, is written anywhere.

What stays is named by its runs of bytes, in the payload's order. The caches must then not change until the payload has
ended, so there is no checksum over the data: nobody reads it here. Dense tensors are written as always, for each
request brings others, which a network's engine would have to learn of each time; caches are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from omnikv.core.lending import MAX_SPANS, Loan, Memory, Span
from omnikv.core.wire_spans import TensorSpan
from omnikv.errors import ConfigError
from omnikv.tensors.blocks import BlockSource
from omnikv.tensors.fill import WrittenRange, fill
from omnikv.tensors.kv import TensorSource
from omnikv.tensors.pack import PayloadPlan, sealed_head
from omnikv.tensors.unpack import MAX_ITEM_SIZE, contiguous_bytes, torch_dtype

# Shorter runs take an engine longer to name than to have copied.
LEAST_RUN_NBYTES = 4096


class LentPayload:
    """A payload of `plan` that is in part lent, as `loan` says; `nbytes` are to be written, by `write_into`."""

    def __init__(self, plan: PayloadPlan) -> None:
        """Lends what can be, as far as `MAX_SPANS` go.

        Raises:
            ConfigError: the plan has a checksum over the data, which nobody reads here.
        """
        if plan.header.scope == "all":
            raise ConfigError(
                "a lent payload is not read at its source, so it can have no checksum; leave checksum out"
            )
        # Where it will lie is not known before it is lent.
        self.head = b""
        spans = plan.header.spans
        if 1 + 2 * len(spans) > MAX_SPANS:
            raise ConfigError(f"{len(spans)} tensors are more than can be lent; send without the option lend")
        self._head = sealed_head(plan.header)
        # After the head, as many zeros as the widest gap between tensors takes; then what is not lent.
        self._zeros = _round_up(len(self._head))
        self.nbytes = self._packed_at = self._zeros + _round_up(_widest_gap(spans))
        self._packed: list[tuple[TensorSource, TensorSpan, int]] = []
        self.loan = self._lend(plan)

    def _lend(self, plan: PayloadPlan) -> Loan:
        parts = [Span(False, 0, len(self._head))]
        memory: dict[tuple[int, int], Memory] = {}
        end, left = 0, MAX_SPANS - 1 - 2 * len(plan.header.spans)
        for source, span in zip(plan.sources, plan.header.spans, strict=True):
            if span.offset > end:
                parts.append(Span(False, self._zeros, span.offset - end))
            end = span.offset + span.nbytes
            runs = _runs_of(source)
            if runs is not None and isinstance(source, BlockSource) and len(runs) <= left:
                left -= len(runs)
                parts += [Span(True, *run) for run in runs]
                lent = _memory_of(source.blocks)
                memory[lent.address, lent.nbytes] = lent
            elif span.nbytes:
                parts.append(Span(False, self.nbytes, span.nbytes))
                self._packed.append((source, span, self.nbytes))
                self.nbytes += _round_up(span.nbytes)
        return Loan(tuple(parts), tuple(memory.values()))

    def write_into(self, buffer: memoryview, threads: int | None = None, written: WrittenRange | None = None) -> None:
        """Nothing; `buffer`, writable and `nbytes` long, then holds what is not lent. `written` hears of nothing.

        Raises:
            Exception: what a tensor's source raises.
        """
        room = torch.frombuffer(contiguous_bytes(buffer), dtype=torch.uint8)
        room[len(self._head) : self._packed_at].zero_()
        buffer[: len(self._head)] = self._head
        places = [room[at : at + span.nbytes].view(torch_dtype(span)).view(span.shape) for _, span, at in self._packed]
        fill([(source, out) for (source, _, _), out in zip(self._packed, places, strict=True)], threads)


def _runs_of(source: TensorSource) -> list[tuple[int, int]] | None:
    """The source's bytes as runs, or None where it is written in another order, or they are too short."""
    runs = source.runs() if isinstance(source, BlockSource) else None
    if not runs or sum(nbytes for _, nbytes in runs) < LEAST_RUN_NBYTES * len(runs):
        return None
    return runs


def _widest_gap(spans: Sequence[TensorSpan]) -> int:
    ends = (0, *(span.offset + span.nbytes for span in spans))
    return max((span.offset - end for end, span in zip(ends, spans, strict=False)), default=0)


def _memory_of(tensor: torch.Tensor) -> Memory:
    storage = tensor.untyped_storage()
    return Memory(storage.data_ptr(), storage.nbytes(), tensor, _weak(storage).expired)


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // MAX_ITEM_SIZE) * MAX_ITEM_SIZE
