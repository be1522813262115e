"""Regions in a payload's head: what a part is, read back exactly, and refused where it makes no sense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.boxes import Region, Span
from omnikv.core.tokens import Stripe
from omnikv.core.wire import Extension, Header, encode_head
from omnikv.core.wire_decode import decode
from omnikv.core.wire_regions import read_regions, spell_regions
from omnikv.core.wire_spans import MAX_INTEGER
from omnikv.errors import WireError, WireReason

small = st.integers(0, 1 << 40)
stripes = st.builds(
    lambda start, length, gap, times: Stripe(start, length, length + gap, times),
    small,
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 20),
    st.integers(1, 1 << 20),
)
regions = st.builds(
    lambda start, layers, heads, tokens: Region(Span(start, start + layers), tuple(heads), tuple(tokens)),
    small,
    st.integers(1, 100),
    st.lists(small, max_size=4),
    st.lists(stripes, max_size=4),
)


@given(st.lists(regions, min_size=1, max_size=4).map(tuple))
def test_regions_come_back_from_json_as_they_were(listed):
    assert read_regions(json.loads(json.dumps(spell_regions(listed))), MAX_INTEGER) == listed


def payload(**keywords):
    extension = Extension(source_rank=0, target_rank=0, role="primary", attempt=0, heads=(1,), **keywords)
    return encode_head(Header(request_id="r", num_layers=0, spans=(), data_nbytes=0, extension=extension))


REGION = Region(Span(4, 6), (1,), (Stripe(0, 2, 4, 8),))


def test_a_payload_that_names_its_regions_is_of_version_2_and_others_stay_as_they_were():
    named, plain = payload(num_tokens=31, regions=(REGION,)), payload()
    assert json.loads(named[4:])["omnikv"]["v"] == 2
    assert json.loads(plain[4:])["omnikv"] == {
        "v": 1, "n": 0, "src": 0, "dst": 0, "role": "primary", "attempt": 0, "heads": [1],
    }  # fmt: skip
    assert decode(named).extension.regions == (REGION,)
    assert decode(named).extension.num_tokens == 31
    assert decode(plain).extension.regions == ()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        [[]],
        [[[0, 1], [0]]],
        [[[0], [0], []]],
        [[[1, 1], [0], []]],
        [[[-1, 1], [0], []]],
        [[[0, 1.0], [0], []]],
        [[[0, 1], [True], []]],
        [[[0, 1], 0, []]],
        [[[0, 1], [0], [[0, 1, 1]]]],
        [[[0, 1], [0], [[0, 0, 1, 1]]]],
        [[[0, 1], [0], [[0, 2, 1, 1]]]],
        [[[0, 1], [0], [[0, 1, 1, 0]]]],
        [[[0, 1], [0], [[MAX_INTEGER, 1, 1, 1]]]],
        [[[0, 1], [0], [[0, 1, MAX_INTEGER, MAX_INTEGER]]]],
        [[[0, MAX_INTEGER + 1], [0], []]],
    ],
)
def test_what_is_no_region_is_refused(value):
    with pytest.raises(WireError, match=r"omnikv\.regions must be a list of regions") as caught:
        read_regions(value, MAX_INTEGER)
    assert caught.value.reason is WireReason.HEADER_FIELD


def test_a_version_2_without_regions_is_refused():
    spelled = payload(num_tokens=31, regions=(REGION,)).replace(b'"regions"', b'"legions"')
    with pytest.raises(WireError, match=r"omnikv\.regions"):
        decode(spelled)
