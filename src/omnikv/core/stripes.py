"""Where stripes meet: runs of equal length at equal distances, compared without being listed one by one.

Everything a plan needs of two ranks' tokens is the intersection of their stripes, which is stripes again. Where one of
the two is so much finer that many of its runs lie in one run of the other, each such run gives a stripe, and one for a
run that is cut at either end; else the runs of one common period are met one by one, and what comes out repeats.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from omnikv.core.tokens import Stripe, Stripes
from omnikv.errors import TopologyError


def meet(one: Stripes, other: Stripes) -> Stripes:
    """The positions that both hold, stripe of `one` by stripe of `other`."""
    if len(one) == len(other) == 1:
        return tuple(_meet(one[0], other[0]))
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
