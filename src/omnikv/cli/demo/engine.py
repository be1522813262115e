"""A transformers model as one rank of a stage runs it: prefill, greedy decode, and the reference to compare with.

Tensor parallelism is transformers' own, over gloo, or ours where the ranks do not divide the model's heads (`uneven`).
All ranks of a stage must call the same methods in the same order.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omnikv.cli.demo.plan import read_model_shape
from omnikv.cli.demo.uneven import keep_share
from omnikv.errors import ConfigError


def join_stage(group_file: str, rank: int, tp_size: int, *, timeout_s: float) -> None:
    """Nothing; this process is in the default process group of its stage, over gloo.

    Ranks meet at a file, not at a port, so that no other process can take the port in between.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(tp_size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group_file}",
        rank=rank,
        world_size=tp_size,
        timeout=timedelta(seconds=timeout_s),
    )


class Engine:
    """One rank's share of a model, with its tokenizer."""

    def __init__(self, model_dir: Path, tp_size: int) -> None:
        """Loads both from `model_dir`; with `tp_size` > 1 this rank's shards only, after `join_stage`.

        Raises:
            ConfigError: the directory has no tokenizer, or its model cannot be spread over so many ranks.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_dir} has no tokenizer that transformers can read: {error}") from error
        shape = read_model_shape(model_dir)
        is_even = tp_size in shape.tp_sizes()
        options = _parallel_options(tp_size) if is_even else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, **options
        ).eval()
        if not is_even:
            keep_share(self.model, shape, dist.get_rank(), tp_size)
        parameters = inspect.signature(self.model.forward).parameters
        # Renamed in transformers 5.24.
        self._cache_parameter = "cache" if "cache" in parameters else "past_key_values"

    @property
    def config(self) -> Any:
        return self.model.config

    def encode(self, prompt: str) -> list[int]:
        """The prompt's token ids, as a chat turn when the tokenizer has a template for that.

        Raises:
            ConfigError: there is nothing left to run.
        """
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}]
            encoded = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        else:
            encoded = self._tokenizer(prompt)
        token_ids = [int(token) for token in encoded["input_ids"]]
        if not token_ids:
            raise ConfigError(f"the prompt {prompt!r} has no tokens in this model's vocabulary")
        return token_ids

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`, without the special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def prefill(self, prompt_ids: list[int]) -> tuple[Any, int]:
        """The cache of the whole prompt, and the greedy token after it."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        return cache, self._step(prompt_ids, cache)

    def continue_greedily(self, cache: Any, first_token: int, max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens, `first_token` among them; ends after an end-of-text token as `generate` does."""
        stop_tokens = self._stop_tokens()
        tokens = [first_token]
        while len(tokens) < max_tokens and tokens[-1] not in stop_tokens:
            tokens.append(self._step(tokens[-1:], cache))
        return tokens

    def generate(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        """What transformers' own greedy `generate` gives: the reference."""
        from transformers import GenerationConfig

        stop_tokens = self._stop_tokens()
        # The model's own defaults (repetition penalties, minimum lengths) would make this no plain greedy run.
        self.model.generation_config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stop_tokens or None,
            pad_token_id=stop_tokens[0] if stop_tokens else 0,
        )
        inputs = torch.tensor([prompt_ids])
        with torch.inference_mode():
            output = self.model.generate(inputs, attention_mask=torch.ones_like(inputs))
        return [int(token) for token in output[0, len(prompt_ids) :]]

    def _step(self, token_ids: list[int], cache: Any) -> int:
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([token_ids]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_parameter: cache},
            )
        return int(output.logits[0, -1].argmax())

    def _stop_tokens(self) -> list[int]:
        stop = self.model.generation_config.eos_token_id
        if stop is None:
            return []
        return [int(token) for token in stop] if isinstance(stop, (list, tuple)) else [int(stop)]


def _parallel_options(tp_size: int) -> dict[str, Any]:
    if tp_size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    if "tp_plan" in {entry.name for entry in fields(DistributedConfig)}:
        return {"distributed_config": DistributedConfig(tp_size=tp_size, tp_plan="auto")}
    # Releases before this configuration take the plan directly.
    return {"tp_plan": "auto"}
