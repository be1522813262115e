"""Which tokens of a request a rank holds: a share, declared before the number of tokens is known.

A share becomes *stripes* once a request's tokens are counted: runs of equal length at equal distances, so that a rank
of an interleaved stage holds one small value rather than thousands of ranges (`omnikv.core.stripes`).

Whether two shares can meet at all is told for every number of tokens at once, so that both ends know who deals with
whom before the first request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from omnikv.errors import TopologyError


class Stripe(NamedTuple):
    """`times` runs of `length` positions, the first at `start`, each further one `stride` after the one before."""

    start: int
    length: int
    stride: int
    times: int

    @classmethod
    def of(cls, start: int, stop: int) -> Stripe:
        """The one run from `start` to before `stop`."""
        return cls(start, stop - start, stop - start, 1)

    @property
    def size(self) -> int:
        return self.length * self.times

    @property
    def stop(self) -> int:
        return self.start + self.stride * (self.times - 1) + self.length

    def runs(self) -> Iterator[tuple[int, int]]:
        """`(start, stop)` of each run, ascending."""
        for start in range(self.start, self.start + self.stride * self.times, self.stride):
            yield start, start + self.length


Stripes: TypeAlias = "tuple[Stripe, ...]"


def are_integers(*values: object) -> bool:
    """Whether each of them is an int; a bool is none."""
    return all(type(value) is int for value in values)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Some of `num_chunks` consecutive chunks that a request is cut into, as equal as can be.

    Chunk `i` ends before token `ceil((i + 1) * tokens / num_chunks)`. One chunk of one is every token; chunk `r` of `n`
    is context-parallel rank `r`; chunks `r` and `2n - 1 - r` of `2n` are its share where work is balanced by zigzag.
    An engine that pads requests to full chunks counts the padding as tokens.

    Raises:
        TopologyError: no chunk, or one that is not there or comes twice or out of order.
    """

    num_chunks: int = 1
    chunks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        chunks = tuple(self.chunks) if isinstance(self.chunks, Sequence) else ()
        # A list would be another share than the tuple, and have no hash.
        object.__setattr__(self, "chunks", chunks)
        ascending = are_integers(self.num_chunks, *chunks) and all(a < b for a, b in pairwise(chunks))
        if not chunks or not ascending or chunks[0] < 0 or chunks[-1] >= self.num_chunks:
            raise TopologyError(
                f"chunks must be one or more of {self.num_chunks!r} that are counted from 0, ascending, got "
                f"{list(chunks)}"
            )

    def stripes(self, num_tokens: int) -> Stripes:
        """The tokens of this share in a request of `num_tokens`."""
        runs: list[tuple[int, int]] = []
        for chunk in self.chunks:
            start, stop = (-(-at * num_tokens // self.num_chunks) for at in (chunk, chunk + 1))
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return tuple(Stripe.of(*run) for run in runs if run[0] < run[1])


@dataclass(frozen=True, slots=True)
class Cyclic:
    """Every `num_ranks`-th block of `block_tokens` tokens, beginning with block `rank`: interleaved sequences.

    Raises:
        TopologyError: no block, or no such rank.
    """

    block_tokens: int
    num_ranks: int
    rank: int

    def __post_init__(self) -> None:
        sizes = (self.block_tokens, self.num_ranks, self.rank)
        if not are_integers(*sizes) or self.block_tokens < 1 or not 0 <= self.rank < self.num_ranks:
            raise TopologyError(
                f"blocks of {self.block_tokens!r} tokens cannot be dealt to rank {self.rank!r} of {self.num_ranks!r}"
            )

    @property
    def period(self) -> int:
        return self.block_tokens * self.num_ranks

    def stripes(self, num_tokens: int) -> Stripes:
        """The tokens of this share in a request of `num_tokens`."""
        start = self.rank * self.block_tokens
        whole, rest = divmod(max(0, num_tokens - start), self.period)
        if self.num_ranks == 1:
            return (Stripe.of(0, num_tokens),) if num_tokens else ()
        full = whole + (rest >= self.block_tokens)
        stride = self.period if full > 1 else self.block_tokens
        stripes = [Stripe(start, self.block_tokens, stride, full)] if full else []
        if 0 < rest < self.block_tokens:
            last = start + whole * self.period
            stripes.append(Stripe.of(last, last + rest))
        return tuple(stripes)


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last `num_tokens` tokens of a request, or all of a shorter one: what sliding-window attention keeps.

    Raises:
        TopologyError: fewer than one token.
    """

    num_tokens: int

    def __post_init__(self) -> None:
        if not are_integers(self.num_tokens) or self.num_tokens < 1:
            raise TopologyError(f"a window keeps at least 1 token, got {self.num_tokens!r}")

    def stripes(self, num_tokens: int) -> Stripes:
        """The tokens of this share in a request of `num_tokens`."""
        return (Stripe.of(max(0, num_tokens - self.num_tokens), num_tokens),) if num_tokens else ()


@dataclass(frozen=True, slots=True)
class State:
    """No tokens: one state of fixed size, as recurrent and convolution layers keep. It counts as one position, 0."""

    def stripes(self, num_tokens: int) -> Stripes:
        """One position, however many tokens."""
        return (Stripe.of(0, 1),)


TokenShare: TypeAlias = "Chunks | Cyclic | LastTokens | State"

ALL_TOKENS = Chunks()


def may_meet(one: TokenShare, other: TokenShare) -> bool:
    """Whether the two have a token in common for some number of tokens."""
    if isinstance(one, State) or isinstance(other, State):
        return one == other
    if isinstance(one, Chunks) and isinstance(other, Chunks):
        return any(
            a * other.num_chunks < (b + 1) * one.num_chunks and b * one.num_chunks < (a + 1) * other.num_chunks
            for a in one.chunks
            for b in other.chunks
        )
    if isinstance(one, Cyclic) and isinstance(other, Cyclic):
        # Every multiple of `step` is how far two of their blocks are apart, beyond the first two.
        step = math.gcd(one.period, other.period)
        apart = (one.rank * one.block_tokens - other.rank * other.block_tokens) % step
        return apart < other.block_tokens or step - apart < one.block_tokens
    return True


def telling_count(shares: Iterable[TokenShare]) -> int:
    """A number of tokens that tells for every other: shares that cover what they must there do so everywhere.

    Each chunk is then a whole number of common periods, one of which no window reaches. Chunks that meet end to end
    there do so everywhere, because their ends are rounded alike; blocks that are dealt out within one period are dealt
    out in all of them. A request that is no longer than a window is another case (`without_windows`): ask for both.
    """
    distinct = set(shares)
    chunks = math.lcm(*(share.num_chunks for share in distinct if isinstance(share, Chunks)))
    period = math.lcm(*(share.period for share in distinct if isinstance(share, Cyclic)))
    window = max((share.num_tokens for share in distinct if isinstance(share, LastTokens)), default=0)
    return chunks * period * (window // period + 2 if window else 1)


def without_windows(share: TokenShare) -> TokenShare:
    """The share as it is in a request that is no longer than its window."""
    return ALL_TOKENS if isinstance(share, LastTokens) else share


def count(stripes: Iterable[Stripe]) -> int:
    """How many positions the stripes hold."""
    return sum(stripe.size for stripe in stripes)


def is_everything(rows: Stripes, num_rows: int) -> bool:
    """Whether `rows` are the rows 0 to before `num_rows`, in order."""
    return rows == (Stripe.of(0, num_rows),)
