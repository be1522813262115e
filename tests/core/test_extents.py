"""Room in a stretch of numbers: what is taken never overlaps, and what comes back is whole again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.extents import Extents
from omnikv.errors import ConfigError, LocalProtocolError

ALIGN = 64


def largest_hole(live, nbytes):
    edges = [0, *(edge for start, size in sorted(live.items()) for edge in (start, start + size)), nbytes]
    return max(end - start for start, end in zip(edges[::2], edges[1::2], strict=True))


@given(st.lists(st.one_of(st.integers(0, 5000), st.integers(-20, -1)), max_size=60), st.integers(1, 60))
def test_taken_room_never_overlaps_and_free_room_is_never_lost(moves, units):
    """A move of 0 or more takes so many bytes, a negative one gives the oldest but so many back."""
    extents = Extents(units * ALIGN, align_nbytes=ALIGN)
    live = {}
    for move in moves:
        if move >= 0:
            largest = largest_hole(live, extents.nbytes)
            offset = extents.take(move)
            assert (offset is not None) == (extents.round_up(move) <= largest)
            if offset is not None:
                assert offset % ALIGN == 0
                assert offset + move <= extents.nbytes
                live[offset] = extents.round_up(move)
        elif live:
            offset = list(live)[(-move - 1) % len(live)]
            del live[offset]
            extents.give(offset)
        ordered = sorted(live.items())
        assert all(start + size <= later for (start, size), (later, _) in pairwise(ordered))
        assert extents.free_nbytes == extents.nbytes - sum(live.values())
        assert extents.is_empty == (not live)
    for offset in live:
        extents.give(offset)
    assert extents.free_nbytes == extents.nbytes
    assert extents.take(extents.nbytes) == 0


@given(st.permutations(range(8)))
def test_holes_join_in_whatever_order_room_comes_back(order):
    extents = Extents(8 * ALIGN, align_nbytes=ALIGN)
    offsets = [extents.take(1) for _ in range(8)]
    assert extents.take(1) is None
    for index in order:
        extents.give(offsets[index])
    assert extents.take(8 * ALIGN) == 0


def test_the_smallest_hole_that_fits_is_used():
    extents = Extents(10 * ALIGN, align_nbytes=ALIGN)
    large, _, small, _ = (extents.take(units * ALIGN) for units in (4, 1, 2, 3))
    extents.give(large)
    extents.give(small)
    assert extents.take(2 * ALIGN) == small


def test_nothing_takes_room_too_so_that_every_payload_has_its_own_place():
    extents = Extents(2 * ALIGN, align_nbytes=ALIGN)
    assert [extents.take(0), extents.take(0), extents.take(0)] == [0, ALIGN, None]


def test_giving_back_twice_is_misuse():
    extents = Extents(ALIGN, align_nbytes=ALIGN)
    offset = extents.take(1)
    extents.give(offset)
    with pytest.raises(LocalProtocolError, match="no room is taken at offset 0"):
        extents.give(offset)


@pytest.mark.parametrize(("nbytes", "align"), [(0, 64), (100, 64), (-64, 64), (64, 0)])
def test_a_stretch_must_be_a_multiple_of_its_alignment(nbytes, align):
    with pytest.raises(ConfigError):
        Extents(nbytes, align_nbytes=align)
