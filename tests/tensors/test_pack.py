"""Tensors are packed in one pass into room that is given, and read back as views on it."""

from __future__ import annotations

import pytest
import torch

from omnikv.core.wire import Extension
from omnikv.core.wire_spans import ALIGNMENT, ITEM_SIZES
from omnikv.errors import ConfigError, WireError, WireReason
from omnikv.tensors import unpack
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.pack import decode_payload, plan_payload


def random(shape, dtype=torch.float16) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def layer(shape=(5, 2, 3), dtype=torch.float16, value_shape=None) -> tuple[torch.Tensor, torch.Tensor]:
    return random(shape, dtype), random(value_shape or shape, dtype)


def plan(layers, *, checksum=True, **more):
    sources = [pair and LayerSource(DenseSource(pair[0]), DenseSource(pair[1])) for pair in layers]
    return plan_payload(**{"request_id": "r", "layers": sources, "checksum": checksum} | more)


def pack(layers, **more) -> bytearray:
    planned = plan(layers, **more)
    # Dirty room, as a reused pool gives it.
    buffer = bytearray(b"\xff" * planned.nbytes)
    planned.write_into(memoryview(buffer))
    return buffer


def address(buffer) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def assert_same(decoded, layers) -> None:
    assert len(decoded.layers) == len(layers)
    for got, sent in zip(decoded.layers, layers, strict=True):
        assert (got is None) == (sent is None)
        for mine, theirs in zip(got or (), sent or (), strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def refusal(buffer, **expected) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_payload(buffer, **expected)
    return caught.value


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in ITEM_SIZES], ids=str)
@pytest.mark.parametrize("checksum", [True, False])
def test_every_dtype_arrives_bit_for_bit(dtype, checksum):
    layers = [layer(dtype=dtype), layer(dtype=dtype), layer((3, 1, 1), dtype)]
    assert_same(decode_payload(pack(layers, checksum=checksum)), layers)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (5, 3, 2), (2, 3, 2, 5), (2, 1, 2, 1, 2, 1, 2, 3)])
def test_any_number_of_dimensions_arrives(shape):
    layers = [layer(shape), layer(shape)]
    assert_same(decode_payload(pack(layers)), layers)


def test_layers_may_differ_in_shape_and_dtype():
    layers = [
        layer((7, 1, 1), torch.int8),
        layer((5, 2, 3), torch.float64, value_shape=(5, 2, 4)),
        layer((1, 1, 1), torch.complex128),
    ]
    assert_same(decode_payload(pack(layers)), layers)


def test_x03_a_layer_missing_in_both_is_none_and_the_others_keep_their_places():
    layers = [None, layer(), None, layer()]
    assert_same(decode_payload(pack(layers)), layers)


@pytest.mark.parametrize("layers", [[], [None], [(torch.empty(0, 2, 3), torch.empty(0, 2, 3))] * 2])
def test_payloads_without_a_byte_of_data_work(layers):
    decoded = decode_payload(pack(layers))
    assert_same(decoded, layers)
    assert decoded.header.data_nbytes == 0


def test_empty_tensors_between_full_ones_work():
    layers = [layer(), layer((0, 2, 3)), layer((4, 0, 3)), layer(), layer((0, 1, 1), torch.int8)]
    assert_same(decode_payload(pack(layers)), layers)


def test_tensors_that_are_not_contiguous_are_packed_as_they_read():
    base = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6)
    layers = [(base.transpose(0, 1), base.permute(1, 2, 0)), (base[::2, 1:, ::3], base[:2, 1:].expand(2, 4, 6))]
    assert_same(decode_payload(pack(layers)), layers)


def test_the_bytes_between_tensors_are_zero_and_tensors_aligned():
    layers = [(torch.full((3, 1, 1), -1, dtype=torch.int8),) * 2] * 3
    buffer = pack(layers)
    decoded = decode_payload(buffer)
    data = bytes(buffer[len(buffer) - decoded.header.data_nbytes :])
    assert data == (b"\xff" * 3 + bytes(ALIGNMENT - 3)) * 5 + b"\xff" * 3
    for pair in decoded.layers:
        for tensor in pair:
            assert (tensor.data_ptr() - address(buffer)) % ALIGNMENT == 0


def test_packing_writes_each_tensor_once_straight_into_the_buffer():
    class Recorded(DenseSource):
        def write_into(self, out):
            written.append((out.data_ptr() - address(buffer), out.nbytes))
            super().write_into(out)

        def add_moves(self, address, moves):
            return False

    written: list[tuple[int, int]] = []
    sources = [LayerSource(Recorded(random((4, 2, 3))), Recorded(random((4, 2, 3)))) for _ in range(3)]
    planned = plan_payload(request_id="r", layers=sources, checksum=True)
    buffer = bytearray(planned.nbytes)
    planned.write_into(memoryview(buffer))
    start = planned.nbytes - planned.header.data_nbytes
    assert sorted(written) == [(start + span.offset, span.nbytes) for span in planned.header.spans]


@pytest.mark.parametrize("shapes", [[(5, 2, 3)] * 3, [(5, 2, 3), (4, 2, 3)]])
def test_tensors_are_views_on_a_writable_buffer(shapes):
    buffer = pack([layer(shape, torch.uint8) for shape in shapes], checksum=False)
    decoded = decode_payload(buffer)
    buffer[len(buffer) - decoded.header.data_nbytes :] = b"\x07" * decoded.header.data_nbytes
    for pair in decoded.layers:
        assert all(bool((tensor == 7).all()) for tensor in pair)


@pytest.mark.parametrize("form", [bytes, lambda buffer: memoryview(buffer).toreadonly()])
def test_read_only_payloads_are_copied_into_aligned_memory(form):
    layers = [layer(), layer((3, 1, 1))]
    buffer = pack(layers)
    decoded = decode_payload(form(buffer))
    assert_same(decoded, layers)
    inside = range(address(buffer), address(buffer) + len(buffer))
    for pair in decoded.layers:
        for tensor in pair:
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert tensor.data_ptr() not in inside


@pytest.mark.parametrize("shift", [1, 2, 3, 7])
def test_a_payload_at_an_odd_address_is_read(shift):
    layers = [layer(dtype=torch.float64), layer((4, 1, 1), torch.uint8), layer((2, 2, 2))]
    payload = pack(layers)
    room = bytearray(len(payload) + shift)
    room[shift:] = payload
    decoded = decode_payload(memoryview(room)[shift:])
    assert_same(decoded, layers)
    for pair in decoded.layers:
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in pair)


def test_a_payload_may_lie_in_a_view_with_other_dimensions():
    layers = [layer()]
    payload = pack(layers)
    folded = memoryview(payload).cast("B", (2, len(payload) // 2)) if len(payload) % 2 == 0 else None
    assert folded is not None
    assert_same(decode_payload(folded), layers)


@pytest.mark.parametrize("what", ["no buffer", 7, None, memoryview(bytearray(100))[::2]])
def test_what_is_no_contiguous_memory_is_a_mistake_of_the_caller(what):
    with pytest.raises(ConfigError):
        decode_payload(what)


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (lambda n: memoryview(bytes(n)), "read-only"),
        (lambda n: memoryview(bytearray(n - 1)), "exactly"),
        (lambda n: memoryview(bytearray(n + 1)), "exactly"),
        (lambda n: memoryview(bytearray(2 * n))[::2], "contiguous"),
        (lambda n: memoryview(bytearray(n + 1))[1:], "multiple of 16"),
    ],
)
def test_room_that_does_not_fit_is_refused_before_anything_is_written(room, says):
    planned = plan([layer()])
    buffer = room(planned.nbytes)
    with pytest.raises(ConfigError, match=says):
        planned.write_into(buffer)
    assert not any(buffer.tobytes())


def test_what_the_sender_says_of_a_payload_arrives():
    extension = Extension(source_rank=1, target_rank=0, role="cfg_img", attempt=2, heads=(4, 5))
    buffer = pack([layer()], block_ids=[3, 1], metadata={"seq_len": 5, "n": [1.5, None]}, extension=extension)
    header = decode_payload(buffer, request_id="r", target_rank=0, require_checksum=True).header
    assert header.block_ids == (3, 1)
    assert header.metadata == {"seq_len": 5, "n": [1.5, None]}
    assert header.extension == extension


@pytest.mark.parametrize(
    ("layers", "more", "says"),
    [
        ([layer()], {"request_id": ""}, "request_id"),
        ([layer()], {"metadata": {"t": torch.zeros(1)}}, "JSON"),
        ([layer(), layer((5, 2, 3), value_shape=(4, 2, 3))], {}, "layer 1 .*same number of tokens"),
        ([(torch.zeros(2, dtype=torch.uint16),) * 2], {}, "key of layer 0 has dtype uint16"),
        ([(torch.zeros((1,) * 9),) * 2], {}, "at most 8 dimensions"),
    ],
)
def test_what_a_payload_cannot_hold_is_refused_when_it_is_planned(layers, more, says):
    with pytest.raises(ConfigError, match=says):
        plan(layers, **more)


@pytest.mark.parametrize("checksum", [True, False])
def test_x17_no_flipped_byte_that_the_checksum_covers_passes(checksum):
    payload = pack([layer((3, 1, 1), torch.int8)], checksum=checksum, extension=Extension(target_rank=0))
    data_nbytes = decode_payload(payload).header.data_nbytes
    for at in range(len(payload) if checksum else len(payload) - data_nbytes):
        for bit in (0x01, 0x20, 0x80):
            payload[at] ^= bit
            assert refusal(payload).reason in set(WireReason)
            payload[at] ^= bit
    decode_payload(payload)


def test_x17_a_flipped_byte_in_a_value_is_refused_as_a_checksum_that_differs():
    payload = pack([layer()])
    payload[-1] ^= 1
    error = refusal(payload)
    assert error.reason is WireReason.CHECKSUM
    assert "bytes changed on the way" in str(error)


def test_a_checksum_is_not_compared_when_the_caller_knows_better():
    payload = pack([layer((3, 1, 1), torch.int8)])
    payload[-1] = 99
    assert decode_payload(payload, verify=False).layers[0].value[-1].item() == 99


def test_no_payload_can_be_cut_short_or_grow():
    payload = pack([layer((3, 1, 1), torch.int8)], checksum=False)
    for length in range(len(payload)):
        assert refusal(bytes(payload[:length])).reason is WireReason.TRUNCATED
    assert refusal(bytes(payload) + b"\0").reason is WireReason.SPAN_GAP


def test_x05_a_payload_cut_for_another_rank_is_refused():
    payload = pack([layer()], extension=Extension(target_rank=3))
    assert refusal(payload, target_rank=0).reason is WireReason.WRONG_RANK
    stamped = pack([layer()], metadata={"tp_head_slice": {"applied": True, "target_rank": 3}})
    assert refusal(stamped, target_rank=0).reason is WireReason.WRONG_RANK
    assert_same(decode_payload(stamped, target_rank=3), decode_payload(stamped).layers)


def test_another_requests_payload_is_refused():
    assert refusal(pack([layer()]), request_id="s").reason is WireReason.WRONG_REQUEST


def test_damage_is_named_before_identity():
    payload = pack([layer()]).replace(b'"rid":"r"', b'"rid":"s"')
    assert refusal(payload, request_id="r").reason is WireReason.CHECKSUM


@pytest.mark.parametrize("size", [1, 4])
def test_values_that_are_stored_conjugated_or_negated_travel_as_they_read(size):
    complex_values = torch.complex(torch.randn(size, 1, 1), torch.randn(size, 1, 1))
    layers = [(complex_values.conj(), complex_values), (complex_values.conj().imag, complex_values.real)]
    assert layers[1][0].is_neg()
    expected = [
        tuple(tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for tensor in pair)
        for pair in layers
    ]
    assert_same(decode_payload(pack(layers)), expected)


def test_a_payload_of_very_many_tensors_is_read_alike_and_nothing_of_its_shape_is_kept():
    layers = [(torch.full((1, 1, 2), float(at)), torch.zeros(1, 1, 2)) for at in range(2500)]
    payload = pack(layers)
    kept = unpack._common_strides.cache_info(), unpack._places_of_layers.cache_info()
    decoded = decode_payload(payload)
    assert [float(layer.key[0, 0, 0]) for layer in decoded.layers] == [float(at) for at in range(2500)]
    assert (unpack._common_strides.cache_info(), unpack._places_of_layers.cache_info()) == kept
