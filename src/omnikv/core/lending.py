"""What a sender says of a payload that partly stays where its caller keeps it: its spans, and the memory of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# What one message holds, whatever the addresses and sizes.
MAX_SPANS = 3200


class Span(NamedTuple):
    """A stretch of a payload: lent, it lies at the address `start` of this process; else so far into its room."""

    is_lent: bool
    start: int
    nbytes: int


class Memory(NamedTuple):
    """A caller's memory: it stays while `owner` is held; `is_gone` tells later whether it does no longer exist."""

    address: int
    nbytes: int
    owner: object
    is_gone: Callable[[], bool]


class Loan(NamedTuple):
    """A payload's `spans`, which make it up one after another, and the memory in which its lent ones lie."""

    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]
