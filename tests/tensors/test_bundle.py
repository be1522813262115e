"""Values and tensors come back as they were, and what is no bundle is refused."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnikv.errors import ConfigError, RemoteProtocolError
from omnikv.tensors.bundle import pack, unpack
from omnikv.tensors.unpack import DTYPES

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda parts: st.one_of(
        st.lists(parts), st.lists(parts).map(tuple), st.dictionaries(st.one_of(st.text(), st.integers()), parts)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_every_nesting_of_plain_values_comes_back(value):
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_comes_back_bit_for_bit(dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 4, 16), dtype=torch.uint8)
    tensor = raw.view(dtype)
    got = unpack(pack([tensor]))[0]
    assert got.dtype is dtype
    assert got.shape == tensor.shape
    assert torch.equal(got.view(torch.uint8), raw)


def test_views_scalars_and_empty_tensors_are_written_as_they_look():
    whole = torch.arange(24.0).view(4, 6)
    value = {"part": whole[:, 1:3].t(), "scalar": torch.tensor(3), "empty": torch.empty(0, 5)}
    got = unpack(pack(value))
    assert got["part"].tolist() == whole[:, 1:3].t().tolist()
    assert got["scalar"].item() == 3
    assert got["empty"].shape == (0, 5)


def test_a_request_payload_comes_back_with_its_objects_and_its_tensors_once():
    kv = SimpleNamespace(key_cache=[torch.ones(1000)], value_cache=[torch.zeros(1000), None])
    bundle = pack({"past_key_values": kv, "sp.past_key_values": kv, "kv_metadata": {"ropes": [7], "scale": math.inf}})
    assert bundle.numel() < 3 * 4000
    got = unpack(bundle)
    assert got["kv_metadata"] == {"ropes": [7], "scale": math.inf}
    assert isinstance(got["sp.past_key_values"], SimpleNamespace)
    assert torch.equal(got["past_key_values"].key_cache[0], torch.ones(1000))
    assert got["past_key_values"].value_cache[1] is None


def test_what_comes_back_lies_in_the_bundle():
    bundle = pack(torch.zeros(8))
    unpack(bundle)[3] = 5.0
    assert unpack(bundle)[3] == 5.0


class Odd(dict):
    pass


@pytest.mark.parametrize(
    "odd", [object(), Odd(), b"bytes", {1, 2}, torch.Size([1]), torch.empty(2, device="meta"), torch.eye(2).to_sparse()]
)
def test_what_no_reader_could_make_again_is_refused(odd):
    with pytest.raises(ConfigError, match="cannot be packed"):
        pack({"inside": [odd]})


def test_what_is_no_bundle_or_was_cut_short_is_refused():
    bundle = pack({"x": torch.ones(16 * 7)})
    for broken in (bundle[:8], bundle[:40], bundle[:-1], torch.zeros(64, dtype=torch.uint8), bundle[:0]):
        with pytest.raises(RemoteProtocolError, match="no bundle of values and tensors"):
            unpack(broken)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 200))
def test_damage_in_the_head_is_refused_or_read_but_never_anything_else(damage, at):
    bundle = pack({"x": torch.ones(10), "y": [1, ("a", None)]})
    room = bundle[min(at, bundle.numel() - 1) :][: len(damage)]
    room.copy_(torch.frombuffer(bytearray(damage), dtype=torch.uint8)[: len(room)])
    with suppress(RemoteProtocolError):
        unpack(bundle)
