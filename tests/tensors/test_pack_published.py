"""The published container: its methods, and payloads that released engines and omnikv read from each other.

`released_write` and `released_read` speak the released format as it is described, sharing no code with omnikv.
"""

from __future__ import annotations

import json
import struct

import pytest
import torch

from omnikv.core.wire import Extension
from omnikv.core.wire_spans import ITEM_SIZES
from omnikv.errors import ConfigError, LocalProtocolError, OmniKVError, WireError, WireReason
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.pack import KVCacheTransferData, decode_payload, plan_payload

SIDES = ("key_cache", "value_cache")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def released_write(data: KVCacheTransferData) -> bytes:
    """Keys, then values, packed without gaps behind a header without padding."""
    listed, body = [], b""
    for side in SIDES:
        for layer, tensor in enumerate(data.layer_blocks[side]):
            name = f"{side}_{layer}"
            if tensor is None:
                listed.append({"n": name, "x": True})
                continue
            piece = raw_bytes(tensor)
            dtype = str(tensor.dtype).split(".")[1]
            listed.append({"n": name, "i": layer, "d": dtype, "s": list(tensor.shape), "o": len(body), "b": len(piece)})
            body += piece
    header = {
        "rid": data.request_id,
        "bids": data.block_ids,
        "meta": data.metadata,
        "td": listed,
        "nl": len(data.layer_blocks["key_cache"]),
    }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack(">I", len(encoded)) + encoded + body


def released_read(payload: bytes) -> dict:
    """Every tensor from its stated offset, behind the header; whatever else the header says is not looked at."""
    (length,) = struct.unpack(">I", payload[:4])
    header = json.loads(payload[4 : 4 + length])
    body = payload[4 + length :]
    blocks: dict[str, list] = {side: [None] * header["nl"] for side in SIDES}
    for entry in header["td"]:
        if entry.get("x"):
            continue
        side, _, layer = entry["n"].rpartition("_")
        piece = bytearray(body[entry["o"] : entry["o"] + entry["b"]])
        assert len(piece) == entry["b"]
        flat = torch.frombuffer(piece, dtype=getattr(torch, entry["d"]))
        blocks[side][entry.get("i", int(layer))] = flat.reshape(entry["s"])
    return {
        "request_id": header["rid"],
        "layer_blocks": blocks,
        "block_ids": header["bids"],
        "metadata": header["meta"],
    }


def transfer(keys, values, **changes) -> KVCacheTransferData:
    fields = {
        "request_id": "ü/r_1",
        "layer_blocks": {"key_cache": keys, "value_cache": values},
        "block_ids": [9, 0, 4],
        "metadata": {"seq_len": 5, "kv_lens": [5], "note": None},
    }
    return KVCacheTransferData(**(fields | changes))


def sample(dtype=torch.bfloat16, shape=(5, 3, 7)) -> KVCacheTransferData:
    def random():
        return torch.randint(0, 2, shape).to(dtype)

    return transfer([random(), None, random()], [random(), None, random()])


def assert_same(fields: dict, data: KVCacheTransferData) -> None:
    assert set(fields) == {"request_id", "layer_blocks", "block_ids", "metadata"}
    assert fields["request_id"] == data.request_id
    assert fields["block_ids"] == data.block_ids
    assert fields["metadata"] == data.metadata
    for side in SIDES:
        for got, sent in zip(fields["layer_blocks"][side], data.layer_blocks[side], strict=True):
            assert (got is None) == (sent is None)
            if sent is not None:
                assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
                assert raw_bytes(got) == raw_bytes(sent)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in ITEM_SIZES], ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 7), (1, 1, 1), (4, 6), (2, 3, 2, 5)], ids=str)
def test_a_released_engine_reads_what_we_write_and_we_read_what_it_writes(dtype, shape):
    data = sample(dtype, shape)
    assert_same(released_read(data.to_bytes()), data)
    assert_same(KVCacheTransferData.from_bytes(released_write(data)), data)
    assert_same(KVCacheTransferData.from_bytes(data.to_bytes()), data)


def test_a_released_engine_reads_a_payload_with_everything_of_ours():
    tensors = [torch.randn(5, 3, 7) for _ in range(4)]
    sources = [LayerSource(DenseSource(tensors[at]), DenseSource(tensors[at + 2])) for at in (0, 1)]
    planned = plan_payload(
        request_id="r",
        layers=sources,
        metadata={"seq_len": 5},
        extension=Extension(source_rank=1, target_rank=0, role="cfg_text", attempt=2, heads=(3, 4, 5)),
        checksum=True,
    )
    payload = bytearray(planned.nbytes)
    planned.write_into(memoryview(payload))
    expected = transfer(tensors[:2], tensors[2:], request_id="r", block_ids=[], metadata={"seq_len": 5})
    assert_same(released_read(bytes(payload)), expected)


def test_a_released_payload_at_an_odd_address_is_read_aligned():
    data = sample(torch.float32)
    for request_id in ("a", "ab", "abc", "abcd"):
        data.request_id = request_id
        payload = bytearray(released_write(data))
        fields = KVCacheTransferData.from_bytes(memoryview(payload))
        assert_same(fields, data)
        assert all(t is None or t.data_ptr() % 4 == 0 for t in fields["layer_blocks"]["value_cache"])


def test_a_released_payload_says_no_rank_and_carries_no_checksum():
    payload = released_write(sample())
    header = decode_payload(payload, request_id="ü/r_1", target_rank=3).header
    assert (header.extension, header.scope) == (None, None)
    with pytest.raises(WireError) as caught:
        decode_payload(payload, require_checksum=True)
    assert caught.value.reason is WireReason.CHECKSUM


def test_to_bytes_gives_bytes_of_exactly_the_payload():
    payload = sample().to_bytes()
    assert type(payload) is bytes
    assert len(payload) % 64 == (5 * 3 * 7 * 2) % 64
    assert decode_payload(payload, require_checksum=True).header.scope == "all"


def test_x17_a_flipped_byte_is_refused_by_every_published_reader():
    payload = bytearray(sample().to_bytes())
    payload[-1] ^= 1
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for read, given in [
        (KVCacheTransferData.from_bytes, payload),
        (KVCacheTransferData.from_bytes, bytes(payload)),
        (KVCacheTransferData.from_bytes_device, tensor),
        (KVCacheTransferData.from_bytes_gpu, tensor),
    ]:
        with pytest.raises(ValueError, match="bytes changed on the way"):
            read(given)


def test_large_device_payloads_are_checked_to_their_last_byte():
    data = sample(torch.uint8, (100, 30, 200))
    tensor = torch.frombuffer(bytearray(data.to_bytes()), dtype=torch.uint8)
    assert_same(KVCacheTransferData.from_bytes_device(tensor), data)
    tensor[-1] ^= 1
    with pytest.raises(WireError):
        KVCacheTransferData.from_bytes_device(tensor)


def test_tensors_from_a_device_payload_outlive_it():
    data = sample(torch.float32)
    tensor = torch.frombuffer(bytearray(data.to_bytes()), dtype=torch.uint8)
    fields = KVCacheTransferData.from_bytes_gpu(tensor)
    tensor.zero_()
    assert_same(fields, data)


@pytest.mark.parametrize("stride", [2, 3])
def test_a_device_payload_may_be_a_strided_view_at_an_odd_offset(stride):
    data = sample(torch.float32)
    payload = torch.frombuffer(bytearray(data.to_bytes()), dtype=torch.uint8)
    room = torch.zeros(payload.numel() * stride + 1, dtype=torch.uint8)
    part = room[1::stride][: payload.numel()]
    part.copy_(payload)
    assert_same(KVCacheTransferData.from_bytes_device(part), data)


@pytest.mark.parametrize("tensor", [torch.zeros(8, dtype=torch.int8), torch.zeros(2, 4, dtype=torch.uint8)])
def test_a_device_payload_is_one_row_of_bytes(tensor):
    with pytest.raises(ValueError, match="1-D uint8"):
        KVCacheTransferData.from_bytes_device(tensor)


def test_a_device_payload_without_a_byte_is_truncated():
    with pytest.raises(WireError) as caught:
        KVCacheTransferData.from_bytes_device(torch.empty(0, dtype=torch.uint8))
    assert caught.value.reason is WireReason.TRUNCATED


def test_tensors_of_the_cpu_alone_have_no_device_payload():
    with pytest.raises(RuntimeError, match="use to_bytes"):
        sample().to_gpu_tensor()
    with pytest.raises(LocalProtocolError):
        transfer([None], [None]).to_gpu_tensor()


def test_a_payload_built_on_a_device_is_the_one_that_is_read_there():
    data = sample(torch.float16)
    built = data._plan(checksum=False).on_device(torch.device("cpu"))
    assert (built.dtype, built.dim()) == (torch.uint8, 1)
    assert_same(KVCacheTransferData.from_bytes_device(built), data)
    assert_same(released_read(raw_bytes(built)), data)


def test_a_checksum_over_data_is_not_promised_on_a_device():
    with pytest.raises(ConfigError, match="checksum=False"):
        sample()._plan(checksum=True).on_device(torch.device("cpu"))


def test_to_dict_shares_tensors_and_copies_the_lists_around_them():
    data = sample()
    fields = data.to_dict()
    assert fields["layer_blocks"]["key_cache"][0] is data.layer_blocks["key_cache"][0]
    fields["layer_blocks"]["key_cache"].append(None)
    fields["block_ids"].append(1)
    fields["metadata"]["new"] = 1
    assert len(data.layer_blocks["key_cache"]) == 3
    assert data.block_ids == [9, 0, 4]
    assert "new" not in data.metadata


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (transfer([torch.zeros(1)], [None]), "layer 0 must have a key and a value"),
        (transfer([None, None], [None]), "2 layers in key_cache and 1 in value_cache"),
        (transfer([[1.0]], [[1.0]]), "got list and list"),
        (transfer([torch.zeros(2, 3)], [torch.zeros(3, 3)]), "same number of tokens"),
        (transfer([], [], request_id=""), "request_id"),
        (transfer([], [], metadata={"dtype": torch.float16}), "JSON"),
    ],
)
def test_x03_what_cannot_be_sent_whole_is_not_sent(data, says):
    with pytest.raises(ConfigError, match=says):
        data.to_bytes()


def test_layers_that_a_caller_left_out_of_the_mapping_are_no_layers():
    data = KVCacheTransferData(request_id="r", layer_blocks={}, block_ids=[], metadata={})
    assert KVCacheTransferData.from_bytes(data.to_bytes())["layer_blocks"] == {"key_cache": [], "value_cache": []}


@pytest.mark.parametrize("layer_blocks", [None, [], {"key_cache": 3, "value_cache": 3}])
def test_a_container_of_the_wrong_kind_is_refused(layer_blocks):
    data = KVCacheTransferData(request_id="r", layer_blocks=layer_blocks, block_ids=[], metadata={})
    with pytest.raises(OmniKVError, match="layer_blocks"):
        data.to_bytes()


def test_gradients_stay_where_they_are():
    data = transfer([torch.ones(2, 1, 1, requires_grad=True)], [torch.ones(2, 1, 1, requires_grad=True)])
    fields = KVCacheTransferData.from_bytes(data.to_bytes())
    assert not fields["layer_blocks"]["key_cache"][0].requires_grad
