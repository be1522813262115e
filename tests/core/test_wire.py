"""Heads are written aligned and readable by released engines, and read back as what was written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnikv.core.wire import (
    MAX_HEADER_BYTES,
    UNSEALED,
    Extension,
    Header,
    encode_head,
    require_identity,
    seal,
    split_digest,
)
from omnikv.core.wire_decode import decode, decode_head, head_nbytes
from omnikv.core.wire_spans import ALIGNMENT, ITEM_SIZES, lay_out
from omnikv.errors import ConfigError, WireError, WireReason

EXTENSION = Extension(source_rank=2, target_rank=1, role="cfg_text", attempt=3, heads=(4, 5))


def header(**changes) -> Header:
    spans, data_nbytes = lay_out([("key", 0, "bfloat16", (5, 2, 3)), ("value", 0, "bfloat16", (5, 2, 3))])
    fields = {
        "request_id": "r",
        "num_layers": 1,
        "spans": spans,
        "data_nbytes": data_nbytes,
        "block_ids": (7, 0),
        "metadata": {"seq_len": 5},
        "extension": EXTENSION,
        "scope": "all",
    }
    return Header(**(fields | changes))


def read_back(written: Header) -> Header:
    head = encode_head(written)
    return decode_head(head, len(head) + written.data_nbytes)


def test_a_head_is_read_back_as_it_was_written():
    assert read_back(header()) == header()


def test_a_head_ends_at_a_multiple_of_the_alignment_and_keeps_to_its_length():
    for length in range(1, 70):
        head = encode_head(header(request_id="r" * length))
        assert len(head) % ALIGNMENT == 0
        assert head_nbytes(head[:4], len(head) + 1000) == len(head)


def test_a_head_is_the_published_json_with_keys_that_released_readers_ignore():
    head = encode_head(header())
    fields = json.loads(head[4:])
    assert list(fields) == ["rid", "bids", "meta", "td", "nl", "omnikv", "ck"]
    assert fields["td"] == [
        {"n": "key_cache_0", "i": 0, "d": "bfloat16", "s": [5, 2, 3], "o": 0, "b": 60},
        {"n": "value_cache_0", "i": 0, "d": "bfloat16", "s": [5, 2, 3], "o": 64, "b": 60},
    ]
    assert fields["omnikv"] == {"v": 1, "n": 124, "src": 2, "dst": 1, "role": "cfg_text", "attempt": 3, "heads": [4, 5]}


def test_a_missing_layer_is_listed_as_released_engines_list_it():
    spans, data_nbytes = lay_out([("key", 1, "int8", (1,)), ("value", 1, "int8", (1,))])
    written = header(num_layers=2, spans=spans, data_nbytes=data_nbytes)
    listed = json.loads(encode_head(written)[4:])["td"]
    assert [entry for entry in listed if "x" in entry] == [
        {"n": "key_cache_0", "x": True},
        {"n": "value_cache_0", "x": True},
    ]
    assert read_back(written) == written


@pytest.mark.parametrize("request_id", ["a/b", "a_1", "two words", "ü中🙂", '"\\\n', "r" * 300])
def test_any_text_can_be_a_request_id(request_id):
    assert read_back(header(request_id=request_id)).request_id == request_id


def test_spans_are_aligned_and_leave_less_than_one_alignment_between_them():
    shapes = [(1,), (64,), (65,), (0, 3), (), (3, 7, 5)]
    spans, data_nbytes = lay_out(("key", layer, "float32", shape) for layer, shape in enumerate(shapes))
    end = 0
    for span in spans:
        assert span.offset % ALIGNMENT == 0
        assert 0 <= span.offset - end < ALIGNMENT
        end = span.offset + span.nbytes
    assert end == data_nbytes


def test_the_dtypes_are_the_published_ones_with_their_sizes():
    assert {"bool", "bfloat16", "complex128", "float8_e4m3fn", "float8_e5m2fnuz"} <= set(ITEM_SIZES)
    assert len(ITEM_SIZES) == 16


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (("key", 3, "float12", (1,)), "key of layer 3 has dtype float12"),
        (("value", 0, "int8", (1,) * 9), "at most 8 dimensions"),
        (("value", 0, "int8", (2**40, 2**40)), "bytes fit"),
        (("value", 0, "int8", (0, 2**40, 2**40)), "bytes fit"),
    ],
)
def test_a_tensor_that_a_payload_cannot_hold_is_refused_by_name(tensor, says):
    with pytest.raises(ConfigError, match=says):
        lay_out([tensor])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"request_id": ""}, "non-empty string"),
        ({"request_id": 7}, "non-empty string, got 7"),
        ({"request_id": "a\ud800"}, "lone surrogate"),
        ({"metadata": {"x": object()}}, "JSON"),
        ({"metadata": {"x": float("nan")}}, "JSON"),
        ({"metadata": {"x": 10**100}}, "digits"),
        ({"metadata": {1: "a", "1": "b"}}, "distinct"),
        ({"metadata": {(1, 2): "a"}}, "JSON"),
        ({"metadata": [1]}, "mapping"),
        ({"block_ids": ("a",)}, "integers"),
        ({"block_ids": (0.5,)}, "integers"),
        ({"block_ids": (2**63,)}, "64 bits"),
        ({"metadata": {"x": "y" * MAX_HEADER_BYTES}}, "send less metadata"),
    ],
)
def test_a_head_that_readers_would_refuse_is_not_written(changes, says):
    with pytest.raises(ConfigError, match=says):
        encode_head(header(**changes))


def test_metadata_that_contains_itself_is_refused():
    endless: dict = {}
    endless["again"] = endless
    with pytest.raises(ConfigError, match="JSON"):
        encode_head(header(metadata=endless))


def test_metadata_of_any_depth_is_written_or_refused():
    nested: list = []
    answers = set()
    for _ in range(1200):
        nested = [nested]
        try:
            encode_head(header(metadata={"x": nested}))
            answers.add("written")
        except ConfigError:
            answers.add("refused")
    # Python 3.12 and later allow a depth that this does not reach.
    assert "written" in answers


def test_tuples_and_number_keys_in_metadata_arrive_as_json_has_them():
    assert read_back(header(metadata={"pair": (1, 2), 3: None})).metadata == {"pair": [1, 2], "3": None}


def test_a_checksum_has_its_place_before_it_is_known():
    head = encode_head(header())
    digest = split_digest(head)
    assert (digest.scope, digest.hexdigest) == ("all", UNSEALED)
    sealed = seal(head, "0123456789abcdef" * 2)
    assert len(sealed) == len(head)
    assert split_digest(sealed).hexdigest == "0123456789abcdef" * 2
    assert seal(sealed, UNSEALED) == head


def test_a_head_without_a_place_for_a_checksum_is_not_sealed():
    with pytest.raises(ConfigError, match="checksum"):
        seal(b"\0\0\0\2{}", "0" * 32)
    with pytest.raises(ConfigError, match="checksum"):
        seal(encode_head(header()), "0" * 31)


def test_metadata_that_looks_like_a_checksum_is_not_taken_for_one():
    decoy = '"ck":"xxh3_128.all.' + "f" * 32 + '"}'
    head = encode_head(header(metadata={"note": decoy, "ck": "xxh3_128.all." + "f" * 32}, scope="header"))
    assert split_digest(head)[:2] == ("header", UNSEALED)


def test_x05_a_payload_for_another_rank_is_refused_with_both_ranks():
    with pytest.raises(WireError, match=r"target rank 1 .*this is rank 0") as caught:
        require_identity(header(), target_rank=0)
    assert caught.value.reason is WireReason.WRONG_RANK
    assert (caught.value.rank, caught.value.request_id) == (0, "r")


def test_x05_the_published_slice_stamp_counts_as_a_payloads_rank():
    stamped = header(extension=None, metadata={"tp_head_slice": {"applied": True, "target_rank": 3}})
    with pytest.raises(WireError) as caught:
        require_identity(stamped, target_rank=0)
    assert caught.value.reason is WireReason.WRONG_RANK
    require_identity(stamped, target_rank=3)
    require_identity(stamped)


def test_a_payload_that_states_no_rank_is_anyones():
    require_identity(header(extension=None), request_id="r", target_rank=5)


def test_a_payload_of_another_request_is_refused_with_both_ids():
    with pytest.raises(WireError, match="'r', expected 's'") as caught:
        require_identity(header(), request_id="s")
    assert caught.value.reason is WireReason.WRONG_REQUEST


def test_an_offset_points_at_the_broken_byte():
    head = encode_head(header())
    broken = head.replace(b'"bids"', b'"bid\xff"')
    with pytest.raises(WireError) as caught:
        decode_head(broken, len(broken))
    assert caught.value.offset == broken.index(b"\xff")
    unclosed = head.replace(b'"rid":', b'"rid";')
    with pytest.raises(WireError) as caught:
        decode_head(unclosed, len(unclosed))
    assert caught.value.offset == unclosed.index(b";")


plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ranks = st.none() | st.integers(0, 2**20)
headers = st.builds(
    lambda layers, **rest: header(num_layers=len(layers), **placed(layers), **rest),
    layers=st.lists(
        st.none() | st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 9), max_size=8)), max_size=4
    ),
    request_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    block_ids=st.lists(st.integers(-1, 2**40)).map(tuple),
    metadata=st.dictionaries(st.text(), plain_json, max_size=3),
    extension=st.builds(
        Extension,
        source_rank=ranks,
        target_rank=ranks,
        attempt=ranks,
        role=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        heads=st.lists(st.integers(0, 2**20), max_size=4).map(tuple),
    ),
    scope=st.sampled_from(["all", "header"]),
)


def placed(layers):
    spans, data_nbytes = lay_out(
        (kind, layer, dtype, tuple(shape))
        for kind in ("key", "value")
        for layer, entry in enumerate(layers)
        if entry is not None
        for dtype, shape in [entry]
    )
    return {"spans": spans, "data_nbytes": data_nbytes}


@settings(deadline=None, max_examples=150)
@given(headers)
def test_whatever_is_written_is_read_back_equal(written):
    assert read_back(written) == written


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: len(tail).to_bytes(4, "big") + tail))
def test_any_bytes_give_a_header_or_a_wire_error(payload):
    try:
        answer = decode(payload)
    except WireError as error:
        answer = error.reason
    assert isinstance(answer, Header | WireReason)
