"""Shares of a model over ranks that do not divide its heads: together they are the model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from omnikv.cli.demo import uneven
from omnikv.cli.demo.plan import read_model_shape
from omnikv.errors import ConfigError


@pytest.fixture
def alone(monkeypatch):
    """Ranks that run one after the other: what each adds to the sum is looked at by itself."""
    monkeypatch.setattr(uneven.dist, "all_reduce", lambda tensor: None)


def load(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, local_files_only=True).eval()


def first_layer(model, hidden):
    """What attention and the feed-forward of the first layer make of `hidden`, and its keys."""
    layer, positions = model.model.layers[0], torch.arange(hidden.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, positions)
    with torch.inference_mode():
        attended, _ = layer.self_attn(hidden, position_embeddings=rotary, attention_mask=None)
        return attended, layer.mlp(hidden), layer.self_attn.k_proj(hidden)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tp_size", [2, 4, 6])
def test_the_shares_of_all_ranks_add_up_to_the_whole(tiny_model_dir, tp_size):
    shape = read_model_shape(tiny_model_dir)
    hidden = torch.randn(1, 5, 72, dtype=torch.float64, generator=torch.manual_seed(3))
    attended, fed, keys = first_layer(load(tiny_model_dir), hidden)
    shares = []
    for rank in range(tp_size):
        model = load(tiny_model_dir)
        uneven.keep_share(model, shape, rank, tp_size)
        shares.append(first_layer(model, hidden))

    torch.testing.assert_close(sum(share[0] for share in shares), attended)
    torch.testing.assert_close(sum(share[1] for share in shares), fed)
    if tp_size == 2:
        torch.testing.assert_close(torch.cat([share[2] for share in shares], -1), keys)


@pytest.mark.usefixtures("alone")
def test_a_model_built_in_another_way_is_refused(tiny_model_dir):
    model = load(tiny_model_dir)
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(ConfigError, match="has no up_proj, so it cannot be spread over ranks that do not divide"):
        uneven.keep_share(model, read_model_shape(tiny_model_dir), 0, 2)
