"""Which tokens of a request a rank holds: a share, declared before the number of tokens is known.

A share becomes *stripes* once a request's tokens are counted: runs of equal length at equal distances, so that a rank
of an interleaved stage holds one small value rather than thousands of ranges. Everything a plan needs of shares is the
intersection of two stripes, which is stripes again: within one common period the runs are met one by one, and what
comes out repeats.

Whether two shares can meet at all is told for every number of tokens at once, so that both ends know who deals with
whom before the first request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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


def meet(one: Stripes, other: Stripes) -> Stripes:
    """The positions that both hold, stripe of `one` by stripe of `other`."""
    others = sorted(other)
    starts = [stripe.start for stripe in others]
    # How far those up to each reach: an interleaved share may come as thousands of stripes, of which few are near.
    reaches = list(accumulate((stripe.stop for stripe in others), max))
    return tuple(
        found
        for a in one
        for b in others[bisect_right(reaches, a.start) : bisect_left(starts, a.stop)]
        for found in _meet(a, b)
    )


def _meet(a: Stripe, b: Stripe) -> Iterator[Stripe]:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    if start >= stop:
        return
    fine, coarse = sorted((a, b), key=lambda stripe: (stripe.times == 1, stripe.stride))
    # Met either within each run of the coarse one, or within one common period; whichever is told in fewer stripes.
    period = math.lcm(fine.stride, coarse.stride)
    in_a_period = period // coarse.stride * max(1, coarse.length // fine.stride)
    if coarse.times == 1 or (stop - start) // coarse.stride <= in_a_period:
        for run in _runs_between(coarse, start, stop):
            yield from _within(fine, *run)
        return
    for run_start, run_stop in _meet_runs(a, b, start, min(stop, start + period)):
        length = run_stop - run_start
        times = (stop - run_start - length) // period + 1
        yield Stripe(run_start, length, period if times > 1 else length, times)
        rest = run_start + times * period
        if rest < stop:
            yield Stripe.of(rest, stop)


def _within(stripe: Stripe, start: int, stop: int) -> Iterator[Stripe]:
    """What of the stripe lies between: its whole runs as one stripe, and one that is cut at either end."""
    first = max(0, -((stripe.start - start) // stripe.stride))
    if first:
        end = stripe.start + (first - 1) * stripe.stride + stripe.length
        if end > start:
            yield Stripe.of(start, min(end, stop))
    at = stripe.start + first * stripe.stride
    whole = max(0, min(stripe.times - first, (stop - at - stripe.length) // stripe.stride + 1))
    if whole:
        yield Stripe(at, stripe.length, stripe.stride if whole > 1 else stripe.length, whole)
    at += whole * stripe.stride
    if first + whole < stripe.times and at < stop:
        yield Stripe.of(at, stop)


def _meet_runs(a: Stripe, b: Stripe, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs from `start` to before `stop` that lie in both."""
    others = _runs_between(b, start, stop)
    other = next(others, None)
    for low, high in _runs_between(a, start, stop):
        while other is not None and other[0] < high:
            if low < other[1]:
                yield max(low, other[0]), min(high, other[1])
            if other[1] > high:
                break
            other = next(others, None)


def _runs_between(stripe: Stripe, start: int, stop: int) -> Iterator[tuple[int, int]]:
    first = max(0, (start - stripe.start) // stripe.stride)
    for at in range(first, stripe.times):
        low = stripe.start + at * stripe.stride
        if low >= stop:
            return
        low, high = max(low, start), min(low + stripe.length, stop)
        if low < high:
            yield low, high


def rows_of(inner: Stripes, outer: Stripes) -> Stripes:
    """Where the positions of `inner` lie among those of `outer`, counted in the order in which a rank holds them.

    `inner` must come from `meet` with `outer`: then each of its stripes lies in one stripe of `outer`, within a single
    run of it or repeating with a multiple of its period.
    """
    return tuple(_rows(stripe, outer) for stripe in inner)


def _rows(inner: Stripe, outer: Stripes) -> Stripe:
    before = 0
    for stripe in outer:
        if stripe.start <= inner.start and inner.stop <= stripe.stop:
            turns, offset = divmod(inner.start - stripe.start, stripe.stride)
            start = before + turns * stripe.length + offset
            if offset + inner.stop - inner.start <= stripe.length:
                return inner._replace(start=start)
            if offset + inner.length <= stripe.length:
                return inner._replace(start=start, stride=inner.stride // stripe.stride * stripe.length)
        before += stripe.size
    raise TopologyError(f"{inner} lies in none of {list(outer)}")


def count(stripes: Iterable[Stripe]) -> int:
    """How many positions the stripes hold."""
    return sum(stripe.size for stripe in stripes)


def is_everything(rows: Stripes, num_rows: int) -> bool:
    """Whether `rows` are the rows 0 to before `num_rows`, in order."""
    return rows == (Stripe.of(0, num_rows),)


def first_gap(needed: Stripes, held: Sequence[Stripes]) -> tuple[int, int] | None:
    """The first run of `needed` positions that none of `held` has, or None."""
    # One run after another, and no further than the gap: an interleaved share has more of them than need be kept.
    covered = _merged_runs(stripe for stripes in held for stripe in meet(needed, stripes))
    run = next(covered, None)
    for start, stop in _merged_runs(needed):
        while start < stop:
            while run is not None and run[1] <= start:
                run = next(covered, None)
            if run is None or run[0] > start:
                return start, stop if run is None else min(stop, run[0])
            start = run[1]
    return None


def _merged_runs(stripes: Iterable[Stripe]) -> Iterator[tuple[int, int]]:
    return heapq.merge(*(stripe.runs() for stripe in stripes))
