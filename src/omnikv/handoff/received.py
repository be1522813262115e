"""What a receive gives: one role of one request's KV on this rank, and who holds the memory under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from omnikv.core.reshard import HeadIds
from omnikv.errors import LocalProtocolError
from omnikv.tensors.kv import LayerKV
from omnikv.tensors.quantised import in_dtype
from omnikv.transports.base import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPiece:
    """What came from one source rank: global head ids and the payload's size.

    `waited_s` is how long after the receive began it was here.
    """

    source_rank: int
    heads: HeadIds
    nbytes: int
    waited_s: float


class ReceivedKV:
    """One request's KV on this rank: `layers`, `metadata`, and which rank sent what.

    `layers` are this rank's, ascending; `layer_ids` are their numbers in the model. `num_tokens` is the whole
    request's; a rank of a context-parallel stage holds its share of them.

    A layer that came from one sender is a view on the transport's memory (`owns_memory` is False if any is), which may
    be read and not written (a write can end the process): read it, or `detach`, before `close`, which lets the sender
    reuse that memory. Others were merged into memory of their own. Close it, or use it as a context manager;
    `give_back` returns the payloads unconsumed instead.
    """

    def __init__(
        self,
        *,
        request_id: str,
        layers: list[LayerKV],
        layer_ids: Sequence[int],
        num_tokens: int,
        metadata: dict[str, Any],
        sources: tuple[ReceivedPiece, ...],
        leases: Sequence[Lease],
        owns_memory: bool,
    ) -> None:
        self.request_id = request_id
        self._layers: list[LayerKV] | None = layers
        self.layer_ids = tuple(layer_ids)
        self.num_tokens = num_tokens
        self.metadata = metadata
        self.sources = sources
        self.owns_memory = owns_memory
        self._leases = list(leases)

    @property
    def layers(self) -> list[LayerKV]:
        """This rank's layers, ascending.

        Raises:
            LocalProtocolError: their memory is the sender's again, after `close` or `give_back`.
        """
        if self._layers is None:
            raise LocalProtocolError(
                f"the KV of request {self.request_id!r} was closed or given back, and its memory is the sender's "
                "again; read it before, or detach it",
                request_id=self.request_id,
            )
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes received, headers included."""
        return sum(piece.nbytes for piece in self.sources)

    def detach(self, dtype: torch.dtype | None = None) -> None:
        """Copy the tensors into memory of their own, unless they are, and let the senders reuse theirs.

        With a `dtype` of 16 or 32 bits, in that dtype: floats convert, and 8-bit ones are scaled back, their scales
        (`tensors.quantised`) used up.

        Raises:
            ConfigError: a layer does not convert into `dtype`.
            HandoffError: a value is beyond what float16 holds. Nothing was let go of, in either case.
        """
        if dtype is not None:
            self._layers = in_dtype(self.layers, dtype, copy=not self.owns_memory)
            if len(self.layers) < len(self.layer_ids):
                # Each layer was two entries, its values and its scales.
                self.layer_ids = tuple(entry // 2 for entry in self.layer_ids[::2])
        elif not self.owns_memory:
            self._layers = [LayerKV(layer.key.clone(), layer.value.clone()) for layer in self.layers]
        self.owns_memory = True
        self._end(consumed=True)

    def close(self) -> None:
        """Tell the senders that the payloads were used; views on them end here. Idempotent."""
        if not self.owns_memory:
            self._layers = None
        self._end(consumed=True)

    def give_back(self) -> None:
        """Return the payloads unconsumed, so that the same receive finds them again; the tensors end here."""
        self._layers = None
        self._end(consumed=False)

    def _end(self, *, consumed: bool) -> None:
        # Forgotten once all have ended: where Ctrl-C comes in between, ending again ends the others.
        for lease in self._leases:
            if consumed:
                lease.acknowledge()
            else:
                lease.release()
        self._leases = []

    def __enter__(self) -> ReceivedKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
