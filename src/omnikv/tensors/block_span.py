"""Which blocks hold a request's tokens: checked against every layer's pool, and as runs of neighbouring blocks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from omnikv.core.layout import is_count
from omnikv.errors import ConfigError
from omnikv.tensors.kv import head_runs
from omnikv.tensors.layouts import BlockViews

# `(first token in the output, first token in the blocks laid end to end, how many)`.
TokenRun: TypeAlias = "tuple[int, int, int]"

_IDS_SHOWN = 8
# So few copies cost less than setting one gather up; and runs of so many blocks are as fast as a gather can be.
_FEW_RUNS = 4
_LONG_RUN_BLOCKS = 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Where the tokens of a request lie: whole blocks, then `rest_tokens` at the start of one more."""

    num_tokens: int
    block_size: int
    # The blocks that hold tokens, in order; surplus ones left out.
    block_ids: tuple[int, ...]
    # The stretches of neighbouring blocks, in order; the last one ends with the last token.
    runs: tuple[TokenRun, ...]
    # Whether copying run by run is no slower than gathering block by block.
    is_in_few_runs: bool
    _indices: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def whole_blocks(self) -> int:
        return self.num_tokens // self.block_size

    @property
    def rest_tokens(self) -> int:
        return self.num_tokens % self.block_size

    @property
    def last_block(self) -> int:
        return self.block_ids[-1]

    def index_on(self, device: torch.device) -> torch.Tensor:
        """The ids of the whole blocks, on `device`; moved there once."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.block_ids[: self.whole_blocks], dtype=torch.int64).to(device)
        return self._indices[device]

    def as_blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """The whole blocks of `[tokens, ...]`, as a view `[whole_blocks, block_size, ...]`."""
        whole = tokens.narrow(0, 0, self.whole_blocks * self.block_size)
        # Splitting a dimension is always possible as a view, whatever the strides.
        return whole.view(self.whole_blocks, self.block_size, *tokens.shape[1:])

    def rest_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the whole blocks of `[tokens, ...]`, as a view."""
        return tokens.narrow(0, self.whole_blocks * self.block_size, self.rest_tokens)


def plan_span(block_ids: Sequence[int], num_tokens: int, layers: Sequence[BlockViews]) -> TokenSpan:
    """Where `num_tokens` of a request lie in these layers' blocks, which `block_ids` name in order.

    Raises:
        ConfigError: `num_tokens` is not positive or more than the blocks hold; a block id is no number, not in a
            layer's pool, or comes twice.
    """
    block_size = layers[0][0].shape[1]
    if not is_count(num_tokens):
        raise ConfigError(f"num_tokens must be a positive number of tokens, got {num_tokens!r}")
    ids = _checked_ids(block_ids)
    lowest, highest = min(ids, default=0), max(ids, default=0)
    for number, (key, _) in enumerate(layers):
        if lowest < 0 or highest >= key.shape[0]:
            outside = [block for block in ids if not 0 <= block < key.shape[0]]
            raise ConfigError(
                f"block ids {_some(outside)} are outside the {key.shape[0]} blocks of layer {number}; "
                "nothing was copied: pass the ids that this request owns"
            )
    if num_tokens > len(ids) * block_size:
        raise ConfigError(
            f"{num_tokens} tokens do not fit {len(ids)} blocks of {block_size} tokens "
            f"({len(ids) * block_size}); pass every block of the request or fewer tokens"
        )
    used = ids[: -(-num_tokens // block_size)]
    runs = _token_runs(used, num_tokens, block_size)
    is_in_few_runs = len(runs) <= max(_FEW_RUNS, len(used) // _LONG_RUN_BLOCKS)
    return TokenSpan(
        num_tokens=num_tokens, block_size=block_size, block_ids=used, runs=runs, is_in_few_runs=is_in_few_runs
    )


def _token_runs(block_ids: tuple[int, ...], num_tokens: int, block_size: int) -> tuple[TokenRun, ...]:
    runs = ((at * block_size, block_ids[at] * block_size, length * block_size) for at, length in head_runs(block_ids))
    return tuple((at, start, min(length, num_tokens - at)) for at, start, length in runs)


def _checked_ids(block_ids: Sequence[int]) -> tuple[int, ...]:
    try:
        ids = tuple(operator.index(block) for block in block_ids)
    except TypeError as error:
        shown = _some(block_ids) if isinstance(block_ids, Sequence) else repr(block_ids)
        raise ConfigError(f"block ids must be whole numbers, got {shown}") from error
    if len(set(ids)) < len(ids):
        twice = sorted(block for block, times in Counter(ids).items() if times > 1)
        raise ConfigError(f"block ids {_some(twice)} come more than once; a request owns each of its blocks once")
    return ids


def _some(ids: Sequence[object]) -> str:
    """The first few of `ids` as text, for a message."""
    shown = ", ".join(str(block) for block in ids[:_IDS_SHOWN])
    return f"[{shown}{', ...' if len(ids) > _IDS_SHOWN else ''}]"
