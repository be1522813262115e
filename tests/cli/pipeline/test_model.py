"""The model reads and draws as its description says, and its picture is a PNG."""

import struct
import zlib

import pytest
import torch

from omnikv.cli.pipeline.conditions import Condition, branch_cache, guided, prefix_tokens
from omnikv.cli.pipeline.drawing import Peers, draw
from omnikv.cli.pipeline.model import ModelConfig, OmniModel
from omnikv.cli.pipeline.picture import as_png, decode
from omnikv.cli.pipeline.plan import BRANCHES, NUM_HEADS, NUM_KV_HEADS, NUM_LATENTS


@pytest.fixture(scope="module")
def model():
    return OmniModel(ModelConfig())


@pytest.fixture(scope="module")
def condition():
    return Condition("a cat", 5)


def test_the_plan_knows_the_model_s_sizes_without_loading_torch(model):
    config = model.config
    assert (config.num_heads, config.num_kv_heads, config.num_latents) == (NUM_HEADS, NUM_KV_HEADS, NUM_LATENTS)


def test_every_process_makes_the_same_weights_and_leaves_the_generator_alone(model):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    other = OmniModel(ModelConfig())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))


def test_the_cache_without_the_text_is_the_beginning_of_the_whole_one(model, condition):
    whole, without_text = (model.understand(condition.embedded(model, branch)) for branch in BRANCHES[:2])
    beginning = branch_cache("cfg_text", {"primary": whole}, prefix_tokens(model))
    for mine, theirs in zip(beginning, without_text, strict=True):
        torch.testing.assert_close(mine.key, theirs.key)
        torch.testing.assert_close(mine.value, theirs.value)


def test_every_branch_matters_to_the_picture(model, condition):
    caches = {branch: model.understand(condition.embedded(model, branch)) for branch in BRANCHES}

    def drawn(**changed):
        return draw(model, condition.noise(model), {**caches, **changed}, BRANCHES, steps=2, cfg=Peers(), sp=Peers())

    picture = drawn()
    for branch in BRANCHES:
        other = model.understand(Condition("another", 6).embedded(model, branch))
        assert (drawn(**{branch: other}) - picture).abs().max() > 0.05


def test_guidance_leads_away_from_what_the_dropped_parts_leave_out():
    ones = torch.ones(1)
    assert guided([3 * ones, ones]).item() == 1 + 4.0 * 2
    assert guided([3 * ones, ones, 0 * ones]).item() == 1.5 * 9
    assert guided([ones, ones, ones]).item() == 1


def test_a_picture_is_a_png_whose_pixels_come_back(model):
    picture = decode(torch.randn(model.config.num_latents, 4), model.config.grid)
    png = as_png(picture)
    width, height = struct.unpack(">II", png[16:24])
    assert (png[:8], height, width) == (b"\x89PNG\r\n\x1a\n", *picture.shape[:2])
    rows = zlib.decompress(png[png.index(b"IDAT") + 4 : png.index(b"IEND") - 8])
    pixels = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(height, 1 + width * 3)[:, 1:]
    assert torch.equal(pixels.reshape(picture.shape), picture)
