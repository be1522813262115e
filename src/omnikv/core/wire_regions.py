"""How a payload says which regions of a request it carries, where its heads alone do not tell.

A region is spelled `[[first layer, end], [heads], [[start, length, stride, times], ...]]`, in the order in which the
payload's pairs follow one another: region by region, and within one layer by layer. A reader that takes the i-th pair
for layer i would be wrong, so such payloads are of format version 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnikv.core.boxes import Region, Span
from omnikv.core.tokens import Stripe
from omnikv.errors import WireError, WireReason


def spell_regions(regions: Sequence[Region]) -> list[Any]:
    """The regions as JSON values."""
    return [[list(layers), list(heads), [list(stripe) for stripe in tokens]] for layers, heads, tokens in regions]


def read_regions(value: object, largest: int) -> tuple[Region, ...]:
    """The regions that `spell_regions` gave as `value`, one or more; no number in them is above `largest`.

    Raises:
        WireError: `value` is no list of regions.
    """
    try:
        return tuple(_read_region(entry, largest) for entry in _list(value, at_least=1))
    except ValueError as error:
        raise WireError(f"omnikv.regions must be a list of regions: {error}", reason=WireReason.HEADER_FIELD) from error


def _read_region(value: object, largest: int) -> Region:
    layers, heads, tokens = _list(value, 3)
    start, stop = _integers(layers, largest, 2)
    stripes = tuple(_read_stripe(stripe, largest) for stripe in _list(tokens))
    if start >= stop:
        raise ValueError(f"layers {start} to {stop} are none")
    return Region(Span(start, stop), _integers(heads, largest), stripes)


def _read_stripe(value: object, largest: int) -> Stripe:
    stripe = Stripe(*_integers(value, largest, 4))
    if stripe.length < 1 or stripe.times < 1 or stripe.stride < stripe.length or stripe.stop > largest:
        raise ValueError(f"{stripe} is no stripe of positions")
    return stripe


def _integers(value: object, largest: int, length: int | None = None) -> tuple[int, ...]:
    items = _list(value, length)
    if any(type(item) is not int or not 0 <= item <= largest for item in items):
        raise ValueError(f"integers from 0 to {largest} are expected")
    return tuple(items)


def _list(value: object, length: int | None = None, *, at_least: int = 0) -> list[Any]:
    if not isinstance(value, list) or len(value) < at_least or (length is not None and len(value) != length):
        raise ValueError(f"a list of {f'{at_least} or more' if length is None else length} is expected")
    return value
