"""A transformers cache goes out as layers and comes back: the model continues as if nothing had happened."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from omnikv.errors import ConfigError
from omnikv.integrations.transformers import cache_from_layers, layers_from_cache
from omnikv.tensors.kv import LayerKV

PROMPT = [5, 17, 3, 42, 8, 30, 11]
NUM_NEW_TOKENS = 8


def tiny_config(**changes):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    return LlamaForCausalLM(tiny_config()).eval()


def step(model, token_ids, cache, **inputs):
    """The greedy token after `token_ids`, one a row, with `cache` grown by them."""
    with torch.inference_mode():
        # Positional up to the cache: transformers renames that parameter.
        logits = model(torch.tensor(token_ids), inputs.get("mask"), inputs.get("positions"), cache).logits
    return logits[:, -1].argmax(-1).tolist()


def continue_greedily(model, first, cache):
    tokens = [first]
    while len(tokens) < NUM_NEW_TOKENS:
        tokens += step(model, [[tokens[-1]]], cache)
    return tokens


def tokens_of_one_run(model, prompt=PROMPT):
    cache = DynamicCache(config=model.config)
    return continue_greedily(model, step(model, [prompt], cache)[0], cache)


def test_the_tiny_model_says_something():
    torch.manual_seed(7)
    assert len(set(tokens_of_one_run(LlamaForCausalLM(tiny_config()).eval()))) > 3


def received_copy(layers):
    """The layers as a receiver gets them: bytes of its own."""
    return [LayerKV(layer.key.clone(), layer.value.clone()) for layer in layers]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_model_continues_on_the_cache_that_was_handed_over(model, kind):
    cache = (
        DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
    )
    first = step(model, [PROMPT], cache)[0]

    layers = layers_from_cache(cache)

    assert [tuple(tensor.shape) for layer in layers for tensor in layer] == [(len(PROMPT), 2, 8)] * 6
    imported = cache_from_layers(received_copy(layers), model.config)
    assert continue_greedily(model, first, imported) == tokens_of_one_run(model)


def test_layers_are_views_and_the_imported_cache_is_a_copy(model):
    cache = DynamicCache(config=model.config)
    step(model, [PROMPT], cache)

    layers = layers_from_cache(cache)
    imported = cache_from_layers(layers, model.config)
    before = imported.layers[1].keys.clone()
    with torch.inference_mode():
        cache.layers[1].keys.fill_(9.0)

    assert torch.all(layers[1].key == 9.0)
    assert torch.equal(imported.layers[1].keys, before)


def test_a_row_of_a_left_padded_batch_leaves_without_its_padding(model):
    short = PROMPT[:4]
    pad = len(PROMPT) - len(short)
    mask = torch.tensor([[1] * len(PROMPT), [0] * pad + [1] * len(short)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    firsts = step(model, [PROMPT, [0] * pad + short], cache, mask=mask, positions=positions)

    whole = layers_from_cache(cache, row=0)
    padded = layers_from_cache(cache, row=1, left_pad=pad)

    assert whole[0].key.shape[0] == len(PROMPT)
    assert padded[0].key.shape[0] == len(short)
    continued = continue_greedily(model, firsts[1], cache_from_layers(padded, model.config))
    assert continued == tokens_of_one_run(model, short)


def test_the_heads_of_two_ranks_are_the_heads_of_one(model):
    cache = DynamicCache(config=model.config)
    first = step(model, [PROMPT], cache)[0]
    layers = layers_from_cache(cache)
    by_rank = [[LayerKV(layer.key[:, [rank]], layer.value[:, [rank]]) for layer in layers] for rank in (0, 1)]

    merged = [
        LayerKV(*(torch.cat(pair, dim=1) for pair in zip(*ranks, strict=True))) for ranks in zip(*by_rank, strict=True)
    ]

    assert continue_greedily(model, first, cache_from_layers(merged, model.config)) == tokens_of_one_run(model)


def test_a_sliding_window_is_refused_by_name():
    cache = DynamicCache(config=tiny_config())
    cache.layers[1] = DynamicSlidingWindowLayer(sliding_window=4)
    for layer in range(3):
        cache.update(torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 8), layer)

    with pytest.raises(ConfigError, match="layer 1 of the cache is a DynamicSlidingWindowLayer"):
        layers_from_cache(cache)


def test_layers_are_not_put_into_a_model_with_a_sliding_window():
    config = tiny_config()
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    config.sliding_window = 4
    layers = [LayerKV(torch.ones(6, 2, 8), torch.ones(6, 2, 8))] * 3

    with pytest.raises(ConfigError, match="layer 1 of the cache is a DynamicSlidingWindowLayer"):
        cache_from_layers(layers, config)


def test_an_empty_cache_has_nothing_to_hand_over():
    with pytest.raises(ConfigError, match="layer 0 of the cache is empty: run the prompt"):
        layers_from_cache(DynamicCache(config=tiny_config()))


def test_a_cache_between_two_layers_of_a_step_is_refused():
    cache = DynamicCache(config=tiny_config())
    for layer, num_tokens in enumerate((6, 6, 5)):
        cache.update(torch.ones(1, 2, num_tokens, 8), torch.ones(1, 2, num_tokens, 8), layer)

    with pytest.raises(ConfigError, match=r"different numbers of tokens, \[5, 6\]: hand over between steps"):
        layers_from_cache(cache)


def test_something_without_layers_is_refused():
    with pytest.raises(ConfigError, match="a dict holds no layers"):
        layers_from_cache({})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"row": 1}, "no row 1 in a cache with a batch of 1"),
        ({"left_pad": 7}, "left_pad=7"),
        ({"left_pad": -1}, "left_pad=-1"),
        ({"left_pad": None}, "left_pad=None"),
        ({"row": 0.5}, "no row 0.5"),
    ],
)
def test_a_row_or_padding_that_is_not_there_is_refused(model, choice, message):
    cache = DynamicCache(config=model.config)
    step(model, [PROMPT], cache)

    with pytest.raises(ConfigError, match=message):
        layers_from_cache(cache, **choice)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(torch.ones(6, 2, 8), torch.ones(6, 2, 8))] * 2, "has 3 layers, 2 were handed over"),
        ([(torch.ones(6, 16), torch.ones(6, 2, 8))] * 3, r"layer 0 has \[6, 16\]"),
        ([(torch.ones(6, 2, 8), None)] * 3, "layer 0 has NoneType"),
        ([(torch.ones(6, 2, 8), torch.ones(6, 1, 8))] * 3, "layer 0 has heads 2 in its key and 1 in its value"),
        ([(torch.ones(6, 2, 8), torch.ones(6, 2, 8).half())] * 3, "layer 0 has dtype torch.float32 in its key"),
        ([(torch.ones(6, 2, 8), torch.ones(5, 2, 8))] * 3, "layer 0 has tokens 6 in its key and 5 in its value"),
        ([(torch.ones(count, 2, 8),) * 2 for count in (6, 5, 6)], r"different numbers of tokens, \[5, 6\]"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers, message):
    with pytest.raises(ConfigError, match=message):
        cache_from_layers(layers, tiny_config())
