"""A head's list of tensors is read once for each text of it; whatever a head says, it says the same when read whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnikv.core import wire_decode
from omnikv.core.wire import PREFIX_NBYTES, Header, encode_head
from omnikv.core.wire_decode import decode_head
from omnikv.core.wire_spans import lay_out
from omnikv.errors import WireError

LIST = '"td":[{"n":"key_cache_0","x":true},{"n":"value_cache_0","x":true}]'
OTHER_LIST = '"td":[]'
REST = '"omnikv":{"v":1,"n":0},"ck":"xxh3_128.header.' + "0" * 32 + '"'
SEAL = '"ck":"xxh3_128.header.' + "1" * 32 + '"'


def framed(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(PREFIX_NBYTES, "big") + raw


def read(head: bytes) -> Header | tuple[str, str]:
    try:
        return decode_head(head, len(head))
    except WireError as error:
        return str(error.reason), str(error)


def read_both_ways(text: str | bytes) -> Header | tuple[str, str]:
    """What the head says, after checking that its list read apart and the head read whole agree."""
    head = framed(text)
    first, again = read(head), read(head)
    kept, wire_decode._MAX_KEPT_NBYTES = wire_decode._MAX_KEPT_NBYTES, 0
    try:
        whole = read(head)
    finally:
        wire_decode._MAX_KEPT_NBYTES = kept
    assert first == again == whole
    return whole


def spelled(*, rid="r", meta="{}", listed=LIST, between="", nl="1", rest=REST, lead="") -> str:
    return f'{{{lead}"rid":{json.dumps(rid)},"bids":[],"meta":{meta},{listed}{between},"nl":{nl},{rest}}}'


def test_a_plain_head_is_read_apart_and_whole_alike():
    assert isinstance(read_both_ways(spelled()), Header)


@pytest.mark.parametrize(
    "text",
    [
        spelled(rid=LIST + ',"nl":1'),
        spelled(rid='x"td":['),
        spelled(meta=f'{{"a":1,{LIST},"nl":1}}'),
        spelled(meta=f'{{"note":{json.dumps(LIST)}}}'),
        spelled(meta=f'{{"inner":{{{OTHER_LIST},"nl":3}}}}'),
        spelled(between=',"extra":{"nested":[1]}'),
        spelled(meta=f'{{"n":{wire_decode._LIST_MARK}}}'),
        spelled(meta='{"ck":"xxh3_128.header.' + "1" * 32 + '"}'),
        spelled(rest='"more":1,' + REST),
        spelled() + "   ",
    ],
)
def test_a_text_that_looks_like_the_list_changes_nothing(text):
    assert isinstance(read_both_ways(text), Header)


@pytest.mark.parametrize(
    "text",
    [
        spelled(listed=f'"td":{wire_decode._LIST_MARK}', meta=f'{{{LIST},"nl":1}}'),
        spelled(listed='"td":null', meta=f'{{{LIST},"nl":1}}'),
        spelled(between="," + LIST),
        spelled(lead=LIST + ","),
        spelled(nl="2"),
        spelled(nl="true"),
        spelled(listed=LIST.replace("td", 't\\"td')),
        spelled(listed=LIST.replace("true", "1")),
        spelled(listed=LIST[:-1]),
        spelled(listed='"td":[' + "[" * 2000 + "]" * 2000 + "]"),
        spelled(rest=""),
        spelled(rest='"rid":"other",' + REST),
        spelled(rest=REST + ',"meta":{}'),
        spelled(rest=REST + ',"bids":[7]'),
        spelled(rest=REST.replace('"n":0', f'"n":{wire_decode._LIST_MARK}')),
        spelled(rest=REST + "," + REST),
        spelled(rest='"omnikv":null,' + REST),
        spelled(rest=SEAL),
        spelled() + "\f",
        spelled(rest='"omnikv":null') + "\f",
        spelled(rest='"omnikv":null') + "\v ",
    ],
)
def test_a_head_without_one_proper_list_is_refused_for_the_same_reason(text):
    assert isinstance(read_both_ways(text), tuple)


def test_the_same_list_in_a_payload_of_another_size_is_refused():
    spans, nbytes = lay_out((kind, 0, "int8", (100,)) for kind in ("key", "value"))
    head = encode_head(Header(request_id="r", num_layers=1, spans=spans, data_nbytes=nbytes))
    assert decode_head(head, len(head) + nbytes).spans == spans
    longer = encode_head(Header(request_id="r", num_layers=1, spans=spans, data_nbytes=nbytes + 64))
    with pytest.raises(WireError, match="belong to no tensor"):
        decode_head(longer, len(longer) + nbytes + 64)


def test_requests_of_one_shape_share_their_list_and_nothing_else():
    spans, nbytes = lay_out((kind, 0, "int8", (8,)) for kind in ("key", "value"))
    heads = [
        encode_head(Header(request_id=name, num_layers=1, spans=spans, data_nbytes=nbytes, metadata={"name": name}))
        for name in ("first", "second")
    ]
    first, second = (decode_head(head, len(head) + nbytes) for head in heads)
    assert first.spans is second.spans
    assert [(found.request_id, found.metadata["name"]) for found in (first, second)] == [
        ("first",) * 2,
        ("second",) * 2,
    ]
    assert first.metadata is not second.metadata


MARKS = ["[", "]", "{", "}", '"', "\\", ",", "1", "9" * 30, "null", '"td":', ',"nl":1', '"meta":', '"omnikv":']
SPACES = [" ", "\t", "\n", "\f", "\v", "\xa0", "é", "\ud800"]
pieces = st.sampled_from([LIST, OTHER_LIST, REST, SEAL, SEAL + "}", *MARKS, *SPACES])


@settings(deadline=None, max_examples=300)
@given(
    st.lists(pieces, max_size=12).map("".join),
    st.sampled_from(["rid", "meta", "between", "lead", "rest"]),
    st.sampled_from(["", "", " ", "\f", "}", SEAL + "}"]),
)
def test_no_place_of_a_list_makes_the_two_readings_differ(text, where, end):
    read_both_ways(spelled(**{where: text}) + end)


@settings(deadline=None, max_examples=300)
@given(st.lists(pieces, max_size=12).map("".join), st.sampled_from([bytes([255]), bytes([195]), bytes(1)]), st.data())
def test_bytes_that_are_no_text_are_refused_alike(text, wrong, data):
    raw = spelled(rest=text).encode("utf-8", "surrogatepass")
    at = data.draw(st.integers(0, len(raw)))
    read_both_ways(raw[:at] + wrong + raw[at:])
