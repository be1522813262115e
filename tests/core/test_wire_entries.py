"""A list whose layers are alike is read by its first entries, and says what reading every entry says."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnikv.core.wire import parse_json
from omnikv.core.wire_entries import read_alike, read_list
from omnikv.core.wire_spans import ENTRIES_KEY, ITEM_SIZES, KINDS, MAX_INTEGER, lay_out, spell_entries
from omnikv.errors import WireError


def alike(num_layers, *kinds):
    """The list of layers whose keys are the first of `kinds` and whose values are the last, and the data's size."""
    named = itertools.product(zip(KINDS, (kinds[0], kinds[-1]), strict=True), range(num_layers))
    spans, nbytes = lay_out((kind, layer, *what) for (kind, what), layer in named)
    return spell_entries(num_layers, spans), spans, nbytes


def in_full(text, num_layers):
    """What reading every entry says: the spans, or None where it is no such list."""
    try:
        fields = parse_json(f"{{{text}}}")
        return read_list(fields[ENTRIES_KEY], num_layers).spans if list(fields) == [ENTRIES_KEY] else None
    except (ValueError, RecursionError, WireError):
        return None


kinds = st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 300), max_size=5).map(tuple))


@given(st.integers(1, 12), st.lists(kinds, min_size=1, max_size=2))
def test_what_we_spell_is_read_by_its_first_entries(num_layers, both):
    text, spans, nbytes = alike(num_layers, *both)
    assert read_alike(text, num_layers) == (num_layers, spans, nbytes)
    assert in_full(text, num_layers) == spans


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 4), st.lists(kinds, min_size=1, max_size=2), st.data())
def test_whatever_differs_is_read_in_full_or_says_the_same(num_layers, both, data):
    text, _, _ = alike(num_layers, *both)
    start = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(
        st.sampled_from(["", "0", "1", "9", " ", "[", "]", "{", "}", ",", '"', "-", ".", "e", "true", "null"])
    )
    changed = text[:start] + put + text[start + data.draw(st.integers(0, 2)) :]
    stated = data.draw(st.integers(0, 5))
    found = read_alike(changed, stated)
    assert found is None or found.spans == in_full(changed, stated)


TWO = alike(2, ("float16", (3, 1, 2)))[0]


@pytest.mark.parametrize(
    ("text", "num_layers"),
    [
        (TWO, 1),
        (TWO, 3),
        (TWO, 0),
        (TWO, MAX_INTEGER),
        (TWO.replace('"o":0', '"o":64'), 2),
        (TWO.replace('"i":1,', ""), 2),
        (TWO.replace('"i":1,"d":"float16"', '"i":1,"d":"bfloat16"'), 2),
        (TWO.replace("[3,1,2]", "[3, 1,2]", 1), 2),
        (TWO.replace('{"n":"key_cache_0"', '{"n":"key_cache_0","n":"key_cache_0"'), 2),
        (TWO + ',"td":[]', 2),
        (alike(2, ("float16", (3, 1, 2)))[0].replace("key_cache_1", "key_cache_01"), 2),
        (alike(1 << 14, ("int8", ()))[0], 1 << 14),
        (alike(2, ("int8", (MAX_INTEGER,)))[0], 2),
        ("", 1),
    ],
)
def test_a_list_that_is_not_plainly_alike_is_left_to_be_read_in_full(text, num_layers):
    assert read_alike(text, num_layers) is None


def test_missing_layers_and_layers_of_several_kinds_are_spelled_and_left_to_be_read_in_full():
    shapes = {0: (4, 1, 2), 2: (2, 1, 2)}
    spans, _ = lay_out((kind, layer, "int8", shape) for kind in KINDS for layer, shape in shapes.items())
    text = spell_entries(3, spans)
    assert '{"n":"key_cache_1","x":true}' in text
    assert in_full(text, 3) == spans
    assert read_alike(text, 3) is None
    assert in_full(spell_entries(3, spans[::-1]), 3) == spans
