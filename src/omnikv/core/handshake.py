"""What two stages say of their model and caches when two ranks first meet, and whether KV may pass between them.

Both sides state the same facts by name, as text. What must be equal is compared; what omnikv converts on the way
(block sizes, the order of dimensions, dtypes) may differ, and the agreement says what is converted; everything else is
refused before a byte moves, with one sentence a difference. Both sides judge alike from the same two statements, so
both refuse, with the same words. A size that is absent, or zero, is a difference and never assumed to be 1: eight
senders that take their peer for a single rank would all write to it (D21).

Which life of a process speaks, and in which version of the protocol, is the greeting's to say (`messages.Hello`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from omnikv.core.dtypes import convertible
from omnikv.core.keys import Edge
from omnikv.core.layout import Layout, is_count
from omnikv.core.partition import LayerRule, Parallel
from omnikv.core.reshard import Route
from omnikv.errors import ConfigError

PREFIX = "model."
UNSTATED = "unstated"
# What stands for the size of a block where tokens are not in blocks, and for that of a value where there is none.
WHOLE, NO_VALUES = "whole", "none"
_SIZES = ("tp", "pp", "cp")

Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What one side states of its model, its caches and both stages.

    `num_kv_heads` counts the whole model's. `value_head_dim` is None where a layer has no values apart (a latent).
    `layout` says how this side's caches lie and in which dtype; a sender states the dtype that it sends. `sender` and
    `receiver` are the parallel sizes of both stages.

    Raises:
        ConfigError: a size is no positive number, the layout states no dtype, or a stage has no parallel sizes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None
    layout: Layout
    sender: Parallel
    receiver: Parallel

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            if not is_count(value) and not (name == "value_head_dim" and value is None):
                raise ConfigError(f"{name} must be a positive number, got {value!r}")
        for name, sizes in (("sender", self.sender), ("receiver", self.receiver)):
            if not isinstance(sizes, Parallel):
                raise ConfigError(f"{name} must be the parallel sizes of that stage, got {sizes!r}")
        if not isinstance(self.layout, Layout) or self.layout.dtype is None:
            layout = self.layout.describe() if isinstance(self.layout, Layout) else self.layout
            raise ConfigError(f"the layout {layout!r} states no dtype; add it with .stating(dtype=...)")

    def route(self, edge: Edge, rules: Sequence[LayerRule] = ()) -> Route:
        """The route of this model over `edge`: sizes and counts are stated once, and both sides compare them.

        Values in 8 bits travel with their scales, as two entries a layer: make their route by `Route.parallel`.

        Raises:
            TopologyError: sizes, layers and `rules` do not fit together.
        """
        return Route.parallel(
            edge,
            num_kv_heads=self.num_kv_heads,
            num_layers=self.num_layers,
            source=self.sender,
            target=self.receiver,
            rules=rules,
        )

    def texts(self) -> dict[str, str]:
        """The facts as text by name, as a greeting carries them."""
        layout = self.layout
        stated = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "value_head_dim": self.value_head_dim or NO_VALUES,
            "layout": f"{layout.name} [{layout.axes}]",
            "block_size": layout.block_size or WHOLE,
            "dtype": layout.dtype,
            "rope": layout.rope or UNSTATED,
            "scales": layout.scales or NO_VALUES,
            "sender_sizes": _spell_sizes(self.sender),
            "receiver_sizes": _spell_sizes(self.receiver),
        }
        return {f"{PREFIX}{name}": str(value) for name, value in stated.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What came of two statements: what is converted on the way, and why the pair is refused; each in words."""

    conversions: tuple[str, ...]
    differences: tuple[str, ...]


# What a rule finds in two facts: they are alike, they are converted, or neither.
_Finding = Literal["alike", "converted", "unlike"]


def judge(sender: Facts, receiver: Facts) -> Agreement:
    """Whether KV may pass from one to the other by what both state of their models (`ModelFacts.texts`).

    Statements come from a peer as they are: one that is absent, or makes no sense, is a difference that names its side.
    """
    conversions, differences = [], []
    for name, rule in _RULES.items():
        theirs = {"sender": sender.get(PREFIX + name), "receiver": receiver.get(PREFIX + name)}
        senseless = [
            f"{side}: {name} {'not stated' if text is None else f'{text!r} is none'}"
            for side, text in theirs.items()
            if text is None or not rule.is_sensible(text)
        ]
        if senseless:
            differences += senseless
            continue
        finding = rule.compare(str(theirs["sender"]), str(theirs["receiver"]))
        words = ", ".join(f"{side}: {name} {text}" for side, text in theirs.items())
        if finding == "unlike":
            differences.append(f"{words}; not convertible")
        elif finding == "converted":
            conversions.append(words)
    return Agreement(
        conversions=tuple(conversions), differences=tuple(differences + _scale_differences(sender, receiver))
    )


def model_differences(side: str, own: Facts, peer: Facts) -> list[str]:
    """One sentence for each statement about models that keeps two peers apart, the same on both sides.

    `own` and `peer` are all their facts; `side` is ours, "source" or "target". Two that state nothing of their models
    may deal.
    """
    sender, receiver = (own, peer) if side == "source" else (peer, own)
    silent = [name for name, facts in (("sender", sender), ("receiver", receiver)) if not any(map(is_of_model, facts))]
    if len(silent) == 1:
        return [f"{silent[0]}: states nothing of its model, while its peer does; pass model= on both sides"]
    return [] if silent else list(judge(sender, receiver).differences)


def is_of_model(name: str) -> bool:
    """Whether a fact of this name is for `model_differences` to compare."""
    return name.startswith(PREFIX)


class _Rule(NamedTuple):
    is_sensible: Callable[[str], bool]
    compare: Callable[[str, str], _Finding]


def _is_positive(text: str) -> bool:
    # Not read as a number: Python refuses texts of thousands of digits, and a peer may send any.
    return text.isascii() and text.isdigit() and text.strip("0") != ""


def _is_sizes(text: str) -> bool:
    parts = [part.partition("=") for part in text.split()]
    return tuple(name for name, _, _ in parts) == _SIZES and all(_is_positive(size) for _, _, size in parts)


def _spell_sizes(stage: Parallel) -> str:
    return " ".join(f"{name}={getattr(stage, name)}" for name in _SIZES)


def _equal(sender: str, receiver: str) -> _Finding:
    return "alike" if sender == receiver else "unlike"


def _any(sender: str, receiver: str) -> _Finding:
    return "alike" if sender == receiver else "converted"


def _dtypes(sender: str, receiver: str) -> _Finding:
    if sender == receiver:
        return "alike"
    return "converted" if convertible(sender, receiver) else "unlike"


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "num_layers": _Rule(_is_positive, _equal),
        "num_kv_heads": _Rule(_is_positive, _equal),
        "head_dim": _Rule(_is_positive, _equal),
        "value_head_dim": _Rule(lambda text: text == NO_VALUES or _is_positive(text), _equal),
        "sender_sizes": _Rule(_is_sizes, _equal),
        "receiver_sizes": _Rule(_is_sizes, _equal),
        "layout": _Rule(bool, _any),
        "block_size": _Rule(lambda text: text == WHOLE or _is_positive(text), _any),
        "dtype": _Rule(bool, _dtypes),
        # A permutation of each key's elements, which nothing here undoes.
        "rope": _Rule(bool, _equal),
    }
)


def _scale_differences(sender: Facts, receiver: Facts) -> list[str]:
    """Scales travel with what they scale: they matter only where the receiver keeps the 8-bit values."""
    theirs = [facts.get(f"{PREFIX}scales") for facts in (sender, receiver)]
    same_dtype = sender.get(f"{PREFIX}dtype") == receiver.get(f"{PREFIX}dtype")
    if None in theirs:
        return [
            f"{side}: scales not stated" for side, text in zip(("sender", "receiver"), theirs, strict=True) if not text
        ]
    if same_dtype and theirs[0] != theirs[1]:
        return [f"sender: scales {theirs[0]}, receiver: scales {theirs[1]}; not convertible"]
    return []
