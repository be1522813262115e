"""8-bit floats: their scales are entries of the cache, and every part of a layer carries its own."""

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.errors import ConfigError, HandoffError
from omnikv.tensors.blocks import PagedKV, scatter_into_blocks
from omnikv.tensors.convert import cast_layer
from omnikv.tensors.kv import DenseSource, LayerKV, LayerSource
from omnikv.tensors.quantised import dequantise, in_dtype, quantise, scale_entry, split_scales

TOKENS, HEADS, DIM = 10, 3, 8
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GRAINS = ("tensor", "head", "token_head")
EIGHT_BITS = Layout.packed(4).stating(dtype=torch.float8_e4m3fn, scales="tensor")


def a_layer(seed=0, dtype=torch.float32, spread=1.0):
    key, value = torch.randn(2, TOKENS, HEADS, DIM, generator=torch.manual_seed(seed)) * spread
    return LayerKV(key.to(dtype), value.to(dtype))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def written(source):
    out = torch.empty(source.shape, dtype=source.dtype)
    source.write_into(out)
    return out


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e6, 1e38])
def test_values_come_back_within_the_rounding_of_8_bits_whatever_their_size(grain, dtype, spread):
    layers = [a_layer(seed, spread=spread) for seed in (1, 2)]
    entries = quantise(layers, dtype, grain)
    assert len(entries) == 4
    # Half a unit in the last place, relative to the value, or to the smallest that the format can tell from zero.
    relative = torch.finfo(dtype).eps / 2
    for before, after in zip(layers, dequantise(entries, torch.float32), strict=True):
        for one, other in zip(before, after, strict=True):
            floor = one.abs().max() / torch.finfo(dtype).max * torch.finfo(dtype).smallest_normal
            assert bool(((one - other).abs() <= one.abs() * relative * 1.001 + floor * relative).all())


@pytest.mark.parametrize("grain", GRAINS)
def test_what_was_quantised_once_is_quantised_again_to_the_same_bits(grain):
    entries = quantise([a_layer()], torch.float8_e4m3fn, grain)
    again = quantise(dequantise(entries, torch.float32), torch.float8_e4m3fn, grain)
    assert all(torch.equal(bits(one), bits(two)) for one, two in zip(entries[0], again[0], strict=True))


def test_zeros_have_a_scale_too():
    zeros = LayerKV(torch.zeros(TOKENS, HEADS, DIM), torch.zeros(TOKENS, HEADS, 0))
    (layer,) = dequantise(quantise([zeros], torch.float8_e4m3fn), torch.bfloat16)
    assert not layer.key.any()
    assert layer.value.shape == (TOKENS, HEADS, 0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_has_no_scale_is_refused(bad):
    layer = a_layer()
    layer.key[0, 0, 0] = bad
    with pytest.raises(HandoffError, match="infinite or no numbers; they cannot be float8_e4m3fn"):
        quantise([layer], torch.float8_e4m3fn)


def test_every_part_of_a_layer_carries_the_scales_of_just_its_heads_and_tokens():
    layer = a_layer()
    whole = dequantise(quantise([layer], torch.float8_e4m3fn, "head"), torch.float32)[0]
    parts = [LayerKV(*(tensor[2:7, [2, 0]] for tensor in entry)) for entry in quantise([layer], torch.float8_e4m3fn)]
    (part,) = dequantise(parts, torch.float32)
    assert torch.equal(part.key, whole.key[2:7, [2, 0]])
    assert torch.equal(part.value, whole.value[2:7, [2, 0]])


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [a_layer()],
        [a_layer(), a_layer()],
        [*quantise([a_layer()], torch.float8_e4m3fn), a_layer()],
        quantise([a_layer()], torch.float8_e4m3fn)[::-1],
    ],
)
def test_entries_that_are_no_quantised_layers_are_refused(entries):
    with pytest.raises(ConfigError, match=r"no quantised layers|a quantised one has 8-bit values and then scales"):
        split_scales(entries)


def test_dtypes_that_quantising_does_not_know_are_refused():
    with pytest.raises(ConfigError, match=r"quantised to float8_e4m3fn, .*, not to int8"):
        quantise([a_layer()], torch.int8)
    with pytest.raises(ConfigError, match="KV in float64 cannot be quantised"):
        quantise([a_layer(dtype=torch.float64)], torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="dequantised to float32, bfloat16, float16, not to float64"):
        dequantise(quantise([a_layer()], torch.float8_e4m3fn), torch.float64)


def engines_cache(seed=0):
    """Packed blocks of 8-bit floats as an engine keeps them: bytes, and a scale a tensor."""
    (values, scales) = quantise([a_layer(seed)], torch.float8_e4m3fn, "tensor")
    blocks = torch.zeros(4, HEADS, 4, 2 * DIM, dtype=torch.uint8)
    scatter_into_blocks([values], [blocks], [2, 0, 1], Layout.packed(4).stating(dtype=torch.float8_e4m3fn))
    return blocks, tuple(float(scale[0, 0, 0]) for scale in scales), values, scales


def test_an_engines_8_bit_cache_goes_with_its_scales_and_any_heads_of_it():
    blocks, numbers, values, scales = engines_cache()
    paged = PagedKV([blocks], [2, 0, 1], TOKENS, EIGHT_BITS, scales=[numbers])
    assert paged.num_layers == 2
    sent = [LayerKV(*map(written, entry)) for entry in paged.layer_sources((2, 0))]
    assert torch.equal(bits(sent[0].key), bits(values.key[:, [2, 0]]))
    assert torch.equal(sent[1].value, scales.value[:, [2, 0]])


def test_a_receiver_that_keeps_8_bits_gets_the_same_bits_and_the_scales():
    blocks, numbers, values, scales = engines_cache()
    entries = [
        LayerKV(*map(written, entry))
        for entry in PagedKV([blocks], [2, 0, 1], TOKENS, EIGHT_BITS, [numbers]).layer_sources()
    ]
    there = torch.zeros(2, 4, 4, HEADS, DIM, dtype=torch.uint8)
    layout = Layout.stacked(4, dim=0).stating(dtype=torch.float8_e4m3fn, scales="tensor")
    (got,) = scatter_into_blocks(entries, [there], [0, 1, 3], layout)
    assert torch.equal(there[0, 3, :2], bits(values.key[8:]))
    assert torch.equal(got.key, scales.key)


def test_a_receiver_of_16_bits_gets_values_scaled_back_in_the_scatter():
    entries = quantise([a_layer(1), a_layer(2)], torch.float8_e4m3fn, "head")
    there = [torch.zeros(2, 4, 4, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    layout = Layout.stacked(4, dim=0).stating(dtype=torch.bfloat16)
    assert scatter_into_blocks(entries, there, [0, 1, 3], layout) == []
    for cache, layer in zip(there, dequantise(entries, torch.bfloat16), strict=True):
        assert torch.equal(cache[1, 3, :2], layer.value[8:])


@pytest.mark.parametrize("scales", [None, [], [(1.0, 1.0)] * 2])
def test_scales_come_exactly_where_the_layout_states_them(scales):
    blocks, *_ = engines_cache()
    with pytest.raises(ConfigError, match=r"pass scales= with a .* pair a layer exactly where the layout states them"):
        PagedKV([blocks], [0], 4, EIGHT_BITS, scales=scales)
    with pytest.raises(ConfigError, match="pass scales="):
        PagedKV([torch.zeros(4, HEADS, 4, 2 * DIM)], [0], 4, Layout.packed(4), scales=[(1.0, 1.0)])


@pytest.mark.parametrize(
    ("grain", "scale"), [("tensor", torch.ones(HEADS)), ("head", 1.0), ("token_head", torch.ones(HEADS))]
)
def test_a_scale_of_another_shape_than_stated_is_refused(grain, scale):
    with pytest.raises(ConfigError, match=f"a scale a {grain} has the shape"):
        scale_entry(scale, scale, grain, TOKENS, HEADS)


def test_layers_without_scales_are_not_written_where_scales_are_kept():
    there = torch.zeros(4, HEADS, 4, 2 * DIM, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="1 layers cannot be written into the KV caches of 1 layers that have scales"):
        scatter_into_blocks([a_layer()], [there], [0, 1, 2], EIGHT_BITS)


def test_float16_is_refused_what_it_cannot_hold():
    layer = a_layer(spread=1e6)
    source = cast_layer(LayerSource(*map(DenseSource, layer)), torch.float16)
    with pytest.raises(HandoffError, match=r"beyond 65504, which float16 cannot hold; .* as bfloat16 or as float32"):
        written(source.key)
    there = torch.zeros(2, 4, 4, HEADS, DIM, dtype=torch.float16)
    with pytest.raises(HandoffError, match="beyond 65504"):
        scatter_into_blocks([layer], [there], [0, 1, 3], Layout.stacked(4, dim=0).stating(dtype="float16"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_a_sender_narrows_floats_only(dtype):
    layer = LayerSource(*map(DenseSource, a_layer()))
    with pytest.raises(ConfigError, match=r"float32 is not sent as .*: .* are sent as one another"):
        cast_layer(layer, dtype)


def test_plain_heads_of_one_element_are_not_taken_for_scales():
    layer = LayerKV(*torch.randn(2, TOKENS, HEADS, 1, generator=torch.manual_seed(3)))
    (converted,) = in_dtype([layer], torch.bfloat16, copy=True)
    assert torch.equal(converted.key, layer.key.bfloat16())


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("shape", [(0, HEADS, DIM), (TOKENS, 0, DIM), (TOKENS, HEADS, 0), (1, 1, 1)])
def test_layers_of_any_size_even_without_elements_come_back(grain, shape):
    layer = LayerKV(*torch.randn(2, *shape, generator=torch.manual_seed(3)))
    (back,) = dequantise(quantise([layer], FP8[0], grain), torch.float32)
    assert [part.shape for part in back] == [part.shape for part in layer]
    assert all(torch.allclose(mine, theirs, rtol=0.07) for mine, theirs in zip(back, layer, strict=True))
