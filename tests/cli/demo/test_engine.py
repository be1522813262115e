"""One rank's model: greedy steps on a cache say what transformers' own `generate` says."""

import shutil
from pathlib import Path

import pytest

from omnikv.cli.demo.engine import Engine
from omnikv.errors import ConfigError

PROMPT = "w7 w21 w3 w40"
FIRST_WORD = 3


@pytest.fixture
def engine(tiny_model_dir):
    return Engine(tiny_model_dir, 1)


def stepped(engine, max_tokens):
    cache, first_token = engine.prefill(engine.encode(PROMPT))
    return engine.continue_greedily(cache, first_token, max_tokens)


def test_steps_on_a_cache_give_what_generate_gives(engine):
    tokens = stepped(engine, 8)

    assert len(tokens) == 8
    assert len(set(tokens)) > 2
    assert engine.generate(engine.encode(PROMPT), 8) == tokens


def test_both_end_after_a_token_that_ends_the_text(engine):
    tokens = stepped(engine, 8)
    end = next(token for token in tokens[1:] if token != tokens[0])
    engine.model.generation_config.eos_token_id = [63, end]

    shorter = stepped(engine, 8)

    assert shorter == tokens[: tokens.index(end) + 1]
    assert engine.generate(engine.encode(PROMPT), 8) == shorter


def test_a_single_token_needs_no_step_after_the_prompt(engine):
    assert stepped(engine, 1) == engine.generate(engine.encode(PROMPT), 1)


def test_a_prompt_becomes_a_chat_turn_where_the_tokenizer_has_a_template(engine):
    words = [7, 21, 3, 40]
    assert engine.encode(PROMPT) == [1, *(word + FIRST_WORD for word in words), 60 + FIRST_WORD]


def test_a_prompt_is_taken_as_it_is_without_a_template(tiny_model_dir, tmp_path):
    plain = Path(shutil.copytree(tiny_model_dir, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    engine = Engine(plain, 1)

    assert engine.encode("w7 w21") == [7 + FIRST_WORD, 21 + FIRST_WORD]
    with pytest.raises(ConfigError, match="has no tokens"):
        engine.encode("")


def test_a_model_without_a_tokenizer_is_refused(tiny_model_dir, tmp_path):
    bare = Path(shutil.copytree(tiny_model_dir, tmp_path / "bare"))
    for path in bare.glob("*token*"):
        path.unlink()

    with pytest.raises(ConfigError, match="has no tokenizer that transformers can read"):
        Engine(bare, 1)
