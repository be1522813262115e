"""Mutated payloads are read unchanged or refused: nothing else comes out, and no tensor ever differs in silence."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnikv.core.wire import Extension
from omnikv.errors import WireError
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.pack import KVCacheTransferData, decode_payload, plan_payload

SHAPES = [(3, 2, 4), None, (3, 2, 4), (0, 1, 1), (5, 1, 3)]
SETTINGS = settings(deadline=None, max_examples=400, derandomize=True)
# What JSON numbers, and what stands where one was wanted, do to readers.
VALUES = ["0", "-1", "1", "63", "64", "65", "2147483648", "9223372036854775807", "9223372036854775808", "1e999", "1.0"]
VALUES += ["NaN", "-Infinity", "true", "null", '"0"', "[]", "{}", "[[[[]]]]", "9" * 120, "-0"]
TOKEN = re.compile(rb'-?\d+|true|null|"[^"]*"|[\[\]{},:]')


def random_layers() -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    seeded = torch.Generator().manual_seed(7)
    return [
        shape and tuple(torch.randint(-128, 128, shape, dtype=torch.int8, generator=seeded) for _ in range(2))
        for shape in SHAPES
    ]


LAYERS = random_layers()


def ours(*, checksum: bool) -> bytes:
    sources = [pair and LayerSource(DenseSource(pair[0]), DenseSource(pair[1])) for pair in LAYERS]
    planned = plan_payload(
        request_id="r-1",
        layers=sources,
        block_ids=(1, 2),
        metadata={"seq_len": 3, "tp_head_slice": {"target_rank": 0}},
        extension=Extension(source_rank=1, target_rank=0, role="primary", attempt=0, heads=(0, 1)),
        checksum=checksum,
    )
    buffer = bytearray(planned.nbytes)
    planned.write_into(memoryview(buffer))
    return bytes(buffer)


def released() -> bytes:
    """As released engines write: no padding, no extension, no checksum."""
    payload = ours(checksum=True)
    start = 4 + int.from_bytes(payload[:4], "big")
    fields = json.loads(payload[4:start])
    header = json.dumps({name: fields[name] for name in ("rid", "bids", "meta", "td", "nl")}).encode()
    return len(header).to_bytes(4, "big") + header + payload[start:]


CHECKED, UNCHECKED, RELEASED = ours(checksum=True), ours(checksum=False), released()


def replace_token(payload: bytes, draw) -> bytes:
    """A value or a mark of the JSON replaced, the length put right so that it is the JSON that is tried."""
    start = 4 + int.from_bytes(payload[:4], "big")
    tokens = list(TOKEN.finditer(payload, 4, start))
    if not tokens:
        return payload
    token = draw(st.sampled_from(tokens))
    new = draw(st.sampled_from(VALUES)).encode() if draw(st.booleans()) else draw(st.sampled_from(tokens))[0]
    header = payload[4 : token.start()] + new + payload[token.end() : start]
    return len(header).to_bytes(4, "big") + header + payload[start:]


def flip(payload: bytes, draw) -> bytes:
    if not payload:
        return payload
    at = draw(st.integers(0, len(payload) - 1))
    return payload[:at] + bytes([payload[at] ^ draw(st.integers(1, 255))]) + payload[at + 1 :]


def cut(payload: bytes, draw) -> bytes:
    return payload[: draw(st.integers(0, len(payload)))]


def splice(payload: bytes, draw) -> bytes:
    """A piece of one payload put over, or between, the bytes of another."""
    donor = draw(st.sampled_from([CHECKED, UNCHECKED, RELEASED]))
    piece_at = draw(st.integers(0, len(donor)))
    piece = donor[piece_at : piece_at + draw(st.integers(0, 200))]
    at = draw(st.integers(0, len(payload)))
    keep_from = at + (len(piece) if draw(st.booleans()) else 0)
    return payload[:at] + piece + payload[keep_from:]


def grow(payload: bytes, draw) -> bytes:
    return payload + draw(st.binary(max_size=70))


MUTATIONS = [replace_token, flip, cut, splice, grow]


@st.composite
def mutated(draw, payload: bytes, kinds=tuple(MUTATIONS)) -> bytes:
    for mutate in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)):
        payload = mutate(payload, draw)
    return payload


def read(payload: bytes):
    """The decoded payload, or None if it was refused; anything else fails the test by itself."""
    try:
        return decode_payload(payload)
    except WireError:
        return None


def contents(decoded) -> list[list | None]:
    return [pair and [(tensor.dtype, tensor.tolist()) for tensor in pair] for pair in decoded.layers]


SENT = [pair and [(tensor.dtype, tensor.tolist()) for tensor in pair] for pair in LAYERS]


def test_the_payloads_that_are_mutated_are_right_themselves():
    for payload in (CHECKED, UNCHECKED, RELEASED):
        assert contents(decode_payload(payload)) == SENT


@SETTINGS
@given(mutated(CHECKED))
def test_x17_a_mutated_payload_with_a_checksum_never_gives_other_tensors(payload):
    decoded = read(payload)
    # Only a mutation that takes every mark of ours away makes it a released engine's payload, which proves nothing.
    if decoded is not None and decoded.header.scope is not None:
        assert contents(decoded) == SENT


@SETTINGS
@given(mutated(CHECKED))
def test_x17_a_receiver_that_wants_a_checksum_never_gets_other_tensors(payload):
    try:
        decoded = decode_payload(payload, require_checksum=True)
    except WireError:
        return
    assert decoded.header.scope is not None
    assert contents(decoded) == SENT


@SETTINGS
@given(mutated(UNCHECKED, kinds=(replace_token, cut, grow)))
def test_a_mutated_head_is_refused_even_where_data_is_not_checked(payload):
    decoded = read(payload)
    if decoded is not None and decoded.header.scope is not None:
        assert contents(decoded) == SENT


@SETTINGS
@given(mutated(RELEASED))
def test_a_mutated_payload_of_a_released_engine_gives_tensors_inside_of_it_or_an_error(payload):
    decoded = read(payload)
    if decoded is None:
        return
    tensors = [tensor for pair in decoded.layers if pair for tensor in pair]
    assert sum(tensor.nbytes for tensor in tensors) <= len(payload)
    assert len(decoded.layers) <= len(payload)


@settings(SETTINGS, max_examples=200)
@given(st.one_of(mutated(CHECKED), mutated(RELEASED)))
def test_a_device_payload_gets_the_same_answer_as_bytes(payload):
    from_bytes = read(payload)
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    if from_bytes is None:
        with pytest.raises(WireError):
            KVCacheTransferData.from_bytes_device(tensor)
    else:
        fields = KVCacheTransferData.from_bytes_device(tensor)
        blocks = zip(fields["layer_blocks"]["key_cache"], fields["layer_blocks"]["value_cache"], strict=True)
        again = [None if key is None else [(t.dtype, t.tolist()) for t in (key, value)] for key, value in blocks]
        assert repr(again) == repr(contents(from_bytes))
