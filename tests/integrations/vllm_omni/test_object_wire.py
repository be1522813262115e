"""Objects travel as released connectors write them: the same bytes for the same object, and nothing is executed."""

from __future__ import annotations

import dataclasses
import pickle

import msgspec
import pytest
import torch

from omnikv.errors import ConfigError, WireError
from omnikv.integrations.vllm_omni.object_wire import decode_object, encode_object


def test_plain_data_and_tensors_come_back_equal():
    value = {
        "layers": [torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), None, torch.zeros(0, 4)],
        "scalar": torch.tensor(7),
        "ids": [1, 2],
        "raw": b"bytes",
    }
    back = decode_object(encode_object(value), "key")
    assert torch.equal(back["layers"][0], value["layers"][0])
    assert back["layers"][0].dtype == torch.bfloat16
    assert back["layers"][2].shape == (0, 4)
    assert back["scalar"].shape == ()
    assert back["scalar"] == 7
    assert (back["layers"][1], back["ids"], back["raw"]) == (None, [1, 2], b"bytes")


def test_a_tensor_is_written_as_released_engines_write_it():
    written = msgspec.msgpack.decode(encode_object(torch.tensor([[1.0, 2.0]])[:, 1:]))
    assert written == {"__tensor__": True, "dtype": "float32", "shape": [1, 1], "data": b"\x00\x00\x00@"}


def test_an_array_comes_back_as_one():
    numpy = pytest.importorskip("numpy")
    back = decode_object(encode_object(numpy.arange(4, dtype="<i2").reshape(2, 2)), "key")
    assert back.tolist() == [[0, 1], [2, 3]]
    assert back.dtype == numpy.int16


def test_a_dataclass_becomes_a_mapping():
    @dataclasses.dataclass
    class Point:
        x: int
        at: torch.Tensor

    back = decode_object(encode_object(Point(3, torch.ones(2))), "key")
    assert back["x"] == 3
    assert back["at"].tolist() == [1, 1]


def test_what_nobody_can_read_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"a list cannot be sent .* a object in it is neither"):
        encode_object([object()])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps({"a": 1}),
        msgspec.msgpack.encode({"__tensor__": True, "dtype": "load", "shape": [1], "data": b"1234"}),
        msgspec.msgpack.encode({"__tensor__": True, "dtype": "float32", "shape": [9], "data": b"1234"}),
        msgspec.msgpack.encode({"__tensor__": True, "dtype": "float32"}),
    ],
    ids=["empty", "no msgpack", "pickle", "a function for a dtype", "too short", "fields missing"],
)
def test_what_no_connector_wrote_is_an_error_that_names_the_key(data):
    with pytest.raises(WireError, match="'r1@a_b'"):
        decode_object(data, "r1@a_b")
