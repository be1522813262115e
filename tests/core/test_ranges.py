"""Which bytes have come: each once, in any order, joined with their neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.ranges import ReceivedRanges
from omnikv.errors import RemoteProtocolError


@given(st.integers(1, 60).flatmap(lambda nbytes: st.tuples(st.just(nbytes), st.permutations(range(nbytes)))))
def test_bytes_in_any_order_become_whole_with_the_last_of_them(case):
    nbytes, order = case
    ranges = ReceivedRanges(nbytes)
    for at in order:
        assert not ranges.is_whole
        ranges.add(at, at + 1)
    assert ranges.is_whole
    assert (ranges._begins, ranges._ends) == ([0], [nbytes])


@given(st.lists(st.tuples(st.integers(-2, 40), st.integers(-2, 40)), max_size=20))
def test_a_range_is_taken_exactly_when_it_is_inside_and_new(wanted):
    ranges, have = ReceivedRanges(32), set()
    for begin, end in wanted:
        new = set(range(begin, end))
        if 0 <= begin < end <= 32 and not new & have:
            ranges.add(begin, end)
            have |= new
        else:
            with pytest.raises(RemoteProtocolError, match="announced"):
                ranges.add(begin, end)
        assert ranges.received_nbytes == len(have)
    assert ranges.is_whole == (len(have) == 32)
