"""A model small enough to be made for a test: random weights, 9 query heads on 3 KV heads, a vocabulary of words."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(61))]
CHAT_TEMPLATE = "{% for message in messages %}<s> {{ message['content'] }} w60 {% endfor %}"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A directory as `--model` takes it."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=128,
        # Wide enough that the greedy choice is never a near tie, which rounding could decide either way.
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path
