"""What a demo is to do, checked before anything starts, and what each of its ranks is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from omnikv.core.handshake import ModelFacts
from omnikv.core.keys import Edge
from omnikv.core.layout import Layout
from omnikv.core.reshard import HeadIds, Parallel, Route, split_heads
from omnikv.errors import ConfigError

Role = Literal["prefill", "decode", "reference"]
REQUEST_ID = "demo"
LONGEST_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that decide over how many ranks it can be spread, and what its KV is.

    Raises:
        ConfigError: the query heads are no multiple of the KV heads.
    """

    num_attention_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_layers: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_attention_heads} query heads are no multiple of {self.num_kv_heads} KV heads: this is no "
                "Llama-like model"
            )

    def tp_sizes(self) -> list[int]:
        """The tensor-parallel sizes that give every rank whole heads and equal shares, ascending."""
        sizes = (self.num_attention_heads, self.num_kv_heads, self.intermediate_size)
        return [tp for tp in range(1, self.num_kv_heads + 1) if all(size % tp == 0 for size in sizes)]

    def query_heads(self, tp_size: int) -> list[HeadIds]:
        """The query heads of each rank: all that read its KV heads or, where ranks share a KV head, a part of those.

        With more ranks than query heads, some rank has none.
        """
        kv_heads = split_heads(self.num_kv_heads, tp_size)
        group = self.num_attention_heads // self.num_kv_heads
        shares = []
        for rank, heads in enumerate(kv_heads):
            readers = tuple(head * group + at for head in heads for at in range(group))
            sharers = [other for other, theirs in enumerate(kv_heads) if theirs == heads]
            start, stop = (len(readers) * at // len(sharers) for at in (sharers.index(rank), sharers.index(rank) + 1))
            shares.append(readers[start:stop])
        return shares


def read_model_shape(model_dir: Path) -> ModelShape:
    """The shape that `config.json` in `model_dir` states.

    Raises:
        ConfigError: the directory holds no model in the safetensors format, or its configuration lacks a size.
    """
    config_path = model_dir / "config.json"
    if not config_path.is_file() or not any(model_dir.glob("*.safetensors")):
        raise ConfigError(f"{model_dir} holds no model: it needs a config.json and *.safetensors files")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        num_attention_heads = int(config["num_attention_heads"])
        # A configuration without KV heads means as many as there are query heads.
        num_kv_heads = int(config.get("num_key_value_heads") or num_attention_heads)
        intermediate_size = int(config["intermediate_size"])
        num_layers = int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // num_attention_heads)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{config_path} is not the configuration of a Llama-like model "
            f"(num_attention_heads, num_key_value_heads, intermediate_size, num_hidden_layers, hidden_size): {error!r}"
        ) from error
    return ModelShape(
        num_attention_heads=num_attention_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        head_dim=head_dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What was asked for on the command line.

    Raises:
        ConfigError: a number is out of range, or there is no prompt.
    """

    prompt: str
    prefill_tp: int
    decode_tp: int
    max_tokens: int
    timeout_s: float
    kill_rank: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ConfigError("--prompt is empty: give the model something to continue")
        if any("\ud800" <= char <= "\udfff" for char in self.prompt):
            raise ConfigError(f"--prompt is no text in UTF-8: {self.prompt!a}")
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigError(
                f"--timeout-s must be above 0 and at most {LONGEST_TIMEOUT_S:.0f} seconds, got {self.timeout_s}"
            )
        for option, tp_size in (("--prefill-tp", self.prefill_tp), ("--decode-tp", self.decode_tp)):
            if tp_size < 1:
                raise ConfigError(f"{option} must be at least 1, got {tp_size}")
        if self.kill_rank is not None and not 0 <= self.kill_rank < self.prefill_tp:
            raise ConfigError(
                f"--kill-rank {self.kill_rank} is no prefill rank: there are {self.prefill_tp}, "
                f"0 to {self.prefill_tp - 1}"
            )

    def require_fit(self, shape: ModelShape) -> None:
        """Nothing, when the model can be spread as asked: every rank gets a query head and the KV head that it reads.

        Raises:
            ConfigError: there are too many ranks.
        """
        for option, tp_size in (("--prefill-tp", self.prefill_tp), ("--decode-tp", self.decode_tp)):
            if not all(shape.query_heads(tp_size)):
                raise ConfigError(
                    f"{option} {tp_size} leaves ranks of this model without a query head: it has "
                    f"{shape.num_attention_heads} on {shape.num_kv_heads} KV heads"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """All that one rank's process is told; `group_file` is where the ranks of one stage meet."""

    role: Role
    rank: int
    model_dir: str
    prompt: str
    max_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    prefill_tp: int
    decode_tp: int
    namespace: str
    group_file: str
    receive_timeout_s: float
    timeout_s: float

    @property
    def title(self) -> str:
        return self.role if self.role == "reference" else f"{self.role} rank {self.rank}"

    @property
    def program(self) -> str:
        return "omnikv.cli.demo.rank"

    @property
    def last_event(self) -> str:
        return "drained" if self.role == "prefill" else "finished"

    @property
    def tp_size(self) -> int:
        return {"prefill": self.prefill_tp, "decode": self.decode_tp, "reference": 1}[self.role]

    def route(self) -> Route:
        """The route of this demo; every rank states the same one."""
        return Route(
            edge=Edge(from_stage="prefill", to_stage="decode", namespace=self.namespace),
            source_heads=split_heads(self.num_kv_heads, self.prefill_tp),
            target_heads=split_heads(self.num_kv_heads, self.decode_tp),
        )

    def model_facts(self) -> ModelFacts:
        """What a rank of either stage states of its model when it meets one of the other."""
        return ModelFacts(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            layout=Layout.tokens().stating(dtype="float32", rope="halves"),
            sender=Parallel(tp=self.prefill_tp),
            receiver=Parallel(tp=self.decode_tp),
        )

    def heads(self) -> tuple[int, ...]:
        """The global KV-head ids of this rank."""
        return split_heads(self.num_kv_heads, self.tp_size)[self.rank]

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankJob:
        return cls(**message)
