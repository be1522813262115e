"""How KV lies in memory, as a declaration: a shape alone cannot say which dimension means what.

Engines keep each layer's cache as blocks of tokens and differ in the order of dimensions, in where key and value sit,
and in how a backend repacks them; some shapes fit several of these (2 blocks look like a key/value pair, as many heads
as tokens a block look like a transpose). One mechanism covers all: a `Layout` names the dimensions of a tensor by axes,

    block   one block of the pool, or one row of a batch         kv    key, then value
    slot    one token within its block                           head  one KV head of this rank
    dim     one element of the head

in order, `*` joining axes that share a dimension: `"block head slot kv*dim"`. What is not paged is one block. Whatever
the layout, everything above sees the same views `[blocks, slots, heads, dim]` of it (`omnikv.tensors.layouts`), so any
layout becomes any other in the gather and the scatter that happen anyway, whatever the block sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from omnikv.core.wire_spans import ITEM_SIZES
from omnikv.errors import ConfigError

RotaryOrder = Literal["halves", "interleaved"]
ScaleGrain = Literal["tensor", "head", "token_head"]

_WORDS = {"kv": "2", "block": "blocks", "slot": "tokens", "head": "kv_heads", "dim": "head_dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one engine's KV lies; make one by name (`packed(16)`, ...), or from axes with `of`, then `stating` the rest.

    Raises:
        ConfigError: axes that name no such layout, a block size that is no positive number, an unknown dtype, rotary
            order or grain of scales.
    """

    # For messages alone: two layouts are the same when everything below is.
    name: str = field(compare=False)
    # The dimensions of each tensor. Without "kv" key and value are a pair of tensors; without "head" too there is one
    # latent a token, which is handed over as the key of one head and a value without elements.
    axes: str
    # Tokens a block; None where a block holds as many as its tensor says: a batch's row, or one request alone.
    block_size: int | None
    # Where a backend repacks its trailing dimensions as one: the order of all axes in memory, for key and for value.
    key_order: str = ""
    value_order: str = ""
    # The dtype that the values are in; None is what the tensors say.
    dtype: str | None = None
    # Which elements of a head the rotary embedding pairs: i and i + head_dim / 2, or 2i and 2i + 1; None is not stated.
    rope: RotaryOrder | None = None
    # What one quantisation scale covers; None is not quantised.
    scales: ScaleGrain | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and not is_count(self.block_size):
            raise ConfigError(f"block_size must be a positive number of tokens, got {self.block_size!r}")
        if not isinstance(self.axes, str):
            raise ConfigError(f'the axes of a layout must be text such as "block head slot kv*dim", got {self.axes!r}')
        for text in (self.axes, self.key_order or self.axes, self.value_order or self.axes):
            _require_axes(text, self)
        for what, value, known in (
            ("dtype", self.dtype, tuple(ITEM_SIZES)),
            ("rope", self.rope, get_args(RotaryOrder)),
            ("scales", self.scales, get_args(ScaleGrain)),
        ):
            if value is not None and value not in known:
                raise ConfigError(f"{what} of a layout must be one of {', '.join(known)}, got {value!r}")

    @classmethod
    def split_pair(cls, block_size: int, *, heads_first: bool = False) -> Layout:
        """The layout of a (key, value) pair of tensors, each `[blocks, block_size, kv_heads, head_dim]`.

        `heads_first` swaps tokens and heads, here and in `stacked`: `[blocks, kv_heads, block_size, head_dim]`.
        """
        return cls(name=_named("split_pair", heads_first), axes=f"block {_inner(heads_first)}", block_size=block_size)

    @classmethod
    def stacked(cls, block_size: int, *, dim: int, heads_first: bool = False) -> Layout:
        """The layout of one tensor of 5 dimensions with key and value stacked along `dim`.

        0: `[2, blocks, block_size, kv_heads, head_dim]`. 1: `[blocks, 2, block_size, kv_heads, head_dim]`.
        """
        if dim not in (0, 1):
            raise ConfigError(f"key and value are stacked along dimension 0 or 1, got dim={dim!r}")
        outer = ("kv block", "block kv")[dim]
        name = _named(f"stacked(dim={dim})", heads_first)
        return cls(name=name, axes=f"{outer} {_inner(heads_first)}", block_size=block_size)

    @classmethod
    def packed(cls, block_size: int) -> Layout:
        """The layout of one tensor `[blocks, kv_heads, block_size, 2 * head_dim]`, K|V side by side in each token.

        It is what FlashAttention on a GPU uses in vLLM >= 0.23; vLLM on a CPU gives the same shape another meaning.
        """
        return cls(name="packed", axes="block head slot kv*dim", block_size=block_size)

    @classmethod
    def vllm_cpu(cls, block_size: int) -> Layout:
        """The layout of vLLM on a CPU, as its vector kernels pack it: `[blocks, kv_heads, block_size, 2 * head_dim]`.

        Per block and head, all keys lie before all values, and keys are transposed: `[head_dim, block_size]`. The AMX
        kernels for bfloat16 pack in yet another way, which this is not.
        """
        return cls(
            name="vllm_cpu",
            axes="block head slot kv*dim",
            block_size=block_size,
            key_order="block head kv dim slot",
            value_order="block head kv slot dim",
        )

    @classmethod
    def latent(cls, block_size: int) -> Layout:
        """The layout of one tensor `[blocks, block_size, latent_dim]` without heads, as MLA models keep it."""
        return cls(name="latent", axes="block slot dim", block_size=block_size)

    @classmethod
    def transformers(cls) -> Layout:
        """The layout of a transformers cache: a (key, value) pair, each `[batch, kv_heads, tokens, head_dim]`.

        A row of the batch is a block: the row's number is the request's one block id.
        """
        return cls(name="transformers", axes="block head slot dim", block_size=None)

    @classmethod
    def tokens(cls) -> Layout:
        """The layout of a (key, value) pair of one request, each `[tokens, kv_heads, head_dim]`; its block id is 0."""
        return cls(name="tokens", axes="slot head dim", block_size=None)

    @classmethod
    def of(cls, axes: str, block_size: int | None, *, name: str = "custom") -> Layout:
        """The layout with these `axes`, for engines that none of the others describes."""
        return cls(name=name, axes=axes, block_size=block_size)

    @classmethod
    def named(cls, name: str, block_size: int) -> Layout:
        """The layout that a setting names: split_pair, stacked_0, stacked_1, packed, vllm_cpu, latent, or axes (`of`).

        Raises:
            ConfigError: it names none.
        """
        if not isinstance(name, str):
            raise ConfigError(f"a layout is named by text, got {name!r}")
        if name == "stacked_0" or name == "stacked_1":
            return cls.stacked(block_size, dim=int(name[-1]))
        if name in ("split_pair", "packed", "vllm_cpu", "latent"):
            layout: Layout = getattr(cls, name)(block_size)
            return layout
        if " " in name:
            return cls.of(name, block_size)
        raise ConfigError(
            f"no layout is named {name!r}; there are split_pair, stacked_0, stacked_1, packed, vllm_cpu and latent, or "
            'give the axes: "block head slot kv*dim"'
        )

    def stating(
        self,
        *,
        dtype: object = None,
        rope: RotaryOrder | None = None,
        scales: ScaleGrain | None = None,
    ) -> Layout:
        """This layout with what its axes do not say: dtype (a torch dtype or its name), rotary order, scales.

        What is left out stays as it was. A dtype of 8-bit floats also fits tensors of uint8, as engines keep them.

        Raises:
            ConfigError: one of them is unknown.
        """
        return replace(
            self,
            dtype=self.dtype if dtype is None else str(dtype).removeprefix("torch."),
            rope=rope or self.rope,
            scales=scales or self.scales,
        )

    @property
    def is_latent(self) -> bool:
        """Whether there is one latent a token and no key and value apart (MLA)."""
        return not {"kv", "head"} & set(axes_of(self.axes))

    @property
    def is_pair(self) -> bool:
        """Whether key and value are tensors of their own."""
        return "kv" not in axes_of(self.axes) and not self.is_latent

    def describe(self) -> str:
        """The layout in a few words, equal for equal layouts."""
        blocks = "tokens not in blocks" if self.block_size is None else f"blocks of {self.block_size} tokens"
        name = f"{self.name} [{self.axes}]" if self.name == "custom" else self.name
        scaled = f"scales a {self.scales}" if self.scales else None
        rope = f"rope in {self.rope}" if self.rope else None
        return ", ".join(part for part in (name, blocks, self.dtype, rope, scaled) if part)

    def spell_shape(self) -> str:
        """What a layer's cache must look like, in words."""
        words = _WORDS if self.block_size is None else _WORDS | {"slot": str(self.block_size)}
        shape = ", ".join(" * ".join(words[axis] for axis in dimension) for dimension in dimensions_of(self.axes))
        return f"a (key, value) pair, each [{shape}]" if self.is_pair else f"one tensor [{shape}]"


@functools.lru_cache(maxsize=64)
def dimensions_of(axes: str) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension: one, or several that share it."""
    return tuple(tuple(dimension.split("*")) for dimension in axes.split())


@functools.lru_cache(maxsize=64)
def axes_of(axes: str) -> tuple[str, ...]:
    """All axes, in order."""
    return tuple(axis for dimension in dimensions_of(axes) for axis in dimension)


def is_count(value: object) -> bool:
    """True for a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _inner(heads_first: bool) -> str:
    return "head slot dim" if heads_first else "slot head dim"


def _named(name: str, heads_first: bool) -> str:
    return f"{name}, heads first" if heads_first else name


def _require_axes(text: str, layout: Layout) -> None:
    names, wanted = axes_of(text), set(axes_of(layout.axes))
    stated = {"kv"} if layout.block_size is None else {"kv", "slot"}
    solvable = all(len(set(dimension) - stated) <= 1 for dimension in dimensions_of(text))
    if len(set(names)) < len(names) or set(names) != wanted or not {"slot", "dim"} <= wanted <= set(_WORDS):
        raise ConfigError(
            f"{text!r} names no layout: give slot and dim once each, block, head and kv where there are such, and the "
            'same in every order ("block head slot kv*dim")'
        )
    if not solvable:
        raise ConfigError(f"the layout {text!r} joins two axes whose lengths nothing states; reshape the cache before")
