"""What a sending rank cuts out of its own layers for each target rank, as sources that are still to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch

from omnikv.core.boxes import EVERY_LAYER, Box, Boxes, HeadIds, Region, Span, num_layers, position_of
from omnikv.core.plan import Piece, SharedBox
from omnikv.core.tokens import ALL_TOKENS, State, Stripes, count, is_everything
from omnikv.errors import ConfigError
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.convert import cast_layer
from omnikv.tensors.kv import DenseSource, LayerSource, TensorSource
from omnikv.tensors.rows import GatheredRows, RowSource

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
Layers: TypeAlias = "Sequence[tuple[torch.Tensor, torch.Tensor | None]] | PagedKV"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayers:
    """A request's layers on this rank, in order, and the boxes that they are: checked to be what the route says.

    `num_tokens` are the request's, of which the rank may hold a share. `dtype` is what floats are sent in, or None.
    """

    layers: tuple[Pair, ...] | PagedKV
    boxes: Boxes
    num_tokens: int
    dtype: torch.dtype | None = None

    @property
    def num_layers(self) -> int:
        return self.layers.num_layers if isinstance(self.layers, PagedKV) else len(self.layers)


def own_layers(layers: Layers, boxes: Boxes, num_tokens: int | None = None) -> OwnLayers:
    """The layers of a rank that holds `boxes`; `num_tokens` may be left out where it holds all tokens of some layer.

    Raises:
        ConfigError: no layers, or not as many as the route says, or one whose shape, dtype, heads or tokens do not fit.
    """
    if not isinstance(layers, PagedKV | Sequence):
        # An iterator among others: it would be empty by the time of the second target rank.
        raise ConfigError(f"layers must be a list of (key, value) pairs, or a PagedKV, got a {type(layers).__name__}")
    found = layers.num_layers if isinstance(layers, PagedKV) else len(layers)
    if not found:
        raise ConfigError("there are no layers to send: pass one (key, value) pair a layer")
    expected = num_layers(boxes)
    if expected is not None and found != expected:
        raise ConfigError(f"there are {found} layers, but the route states {expected} for this rank")
    if isinstance(layers, PagedKV):
        return _own_paged(layers, boxes, num_tokens)
    pairs = []
    for index, pair in enumerate(layers):
        pairs.append(_checked_pair(index, pair, _box_of(index, boxes)))
    rows = [pair[0].shape[0] for pair in pairs]
    total = _total_tokens(num_tokens, [rows[at] for at in range(found) if _box_of(at, boxes).tokens == ALL_TOKENS])
    if boxes == (Box(heads=boxes[0].heads),):
        _require_counted(total, max(rows))
    else:
        for index, (key, _) in enumerate(pairs):
            _require_rows(f"layer {index}", key.shape[0], _box_of(index, boxes), total)
    return OwnLayers(layers=tuple(pairs), boxes=boxes, num_tokens=total)


def cut(own: OwnLayers, piece: Piece) -> Sequence[LayerSource]:
    """The piece's pairs, box by box and in each layer by layer, still unread.

    Raises:
        ConfigError: the paged cache cannot give these heads, or a layer does not convert into the dtype to send.
    """
    first, *others = (_cut_box(own, box) for box in piece.boxes)
    sources = [*first, *chain.from_iterable(others)] if others else first
    return sources if own.dtype is None else [cast_layer(source, own.dtype) for source in sources]


def regions_of(own: OwnLayers, piece: Piece) -> tuple[Region, ...]:
    """The regions that `cut` gives, in its order."""
    return tuple(
        Region(_closed(box.layers, own.num_layers), box.heads, box.tokens(own.num_tokens)) for box in piece.boxes
    )


def _closed(layers: Span, num_own_layers: int) -> Span:
    return Span(layers.start, num_own_layers) if layers.stop == EVERY_LAYER.stop else layers


def _cut_box(own: OwnLayers, box: SharedBox) -> Sequence[LayerSource]:
    start = position_of(box.layers.start, own.boxes)
    stop = start + _closed(box.layers, own.num_layers).num_layers
    whole = box.source_share == box.target_share == ALL_TOKENS
    rows = None if whole else box.source_rows(own.num_tokens)
    if isinstance(own.layers, PagedKV):
        all_sources = own.layers.layer_sources(box.source_positions)
        # All of them as they are, with what is known of them already.
        sources = all_sources if stop - start == len(all_sources) else all_sources[start:stop]
        if rows is None or is_everything(rows, count(box.source_share.stripes(own.num_tokens))):
            return sources
        return [LayerSource(GatheredRows(key, rows), GatheredRows(value, rows)) for key, value in sources]
    return [
        LayerSource(*(_source(tensor, rows, box.source_positions) for tensor in pair))
        for pair in own.layers[start:stop]
    ]


def _source(tensor: torch.Tensor, rows: Stripes | None, head_positions: HeadIds) -> TensorSource:
    if rows is None or is_everything(rows, tensor.shape[0]):
        return DenseSource(tensor, head_positions)
    return RowSource(tensor, rows, head_positions)


def _own_paged(paged: PagedKV, boxes: Boxes, num_tokens: int | None) -> OwnLayers:
    total = _total_tokens(num_tokens, [paged.num_tokens for box in boxes if box.tokens == ALL_TOKENS])
    for box in boxes:
        if paged.num_heads != len(box.heads):
            raise ConfigError(_head_count_message("the paged cache", paged.num_heads, len(box.heads)))
        _require_rows("the paged cache", paged.num_tokens, box, total)
    return OwnLayers(layers=paged, boxes=boxes, num_tokens=total)


def _total_tokens(stated: int | None, rows: Sequence[int]) -> int:
    """How many tokens the request has, of which layers that hold all tokens have so many `rows`."""
    if stated is not None:
        if type(stated) is not int or stated < 0:
            raise ConfigError(f"num_tokens must be the request's number of tokens, got {stated!r}")
        return stated
    # Where nothing tells the layers apart, those that hold fewer tokens are windows.
    if rows:
        return max(rows)
    raise ConfigError(
        "this rank holds a share of the request's tokens only, so it cannot tell how many there are; pass num_tokens="
    )


def _box_of(index: int, boxes: Boxes) -> Box:
    """The box of this rank's layer number `index`."""
    for box in boxes:
        if index < box.layers.num_layers:
            return box
        index -= box.layers.num_layers
    raise ConfigError(f"the route states fewer layers for this rank than there are: {index + 1} more came")


def _require_counted(num_tokens: int, most_rows: int) -> None:
    if num_tokens != most_rows:
        raise ConfigError(
            f"num_tokens is {num_tokens}, but the layers hold {most_rows} tokens; leave it out where every rank holds "
            "all of a request, and give layers that keep only the last tokens a LayerRule"
        )


def _require_rows(what: str, num_rows: int, box: Box, num_tokens: int) -> None:
    expected = num_tokens if box.tokens == ALL_TOKENS else count(box.tokens.stripes(num_tokens))
    if num_rows != expected:
        raise ConfigError(
            f"{what} has {num_rows} tokens, but the route states {box.tokens} of the request's {num_tokens}, which is "
            f"{expected}; pass the tokens of this rank's share, and num_tokens= of the whole request"
        )


def _checked_pair(index: int, pair: Any, box: Box) -> Pair:
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], torch.Tensor) and pair[1] is None:
        # What is no key and value, such as a latent or a state, travels with an empty value.
        pair = (pair[0], pair[0][..., :0])
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(tensor, torch.Tensor) for tensor in pair):
        raise ConfigError(f"layer {index} must be a (key, value) pair of tensors, got {type(pair).__name__}")
    key, value = pair
    for name, tensor in (("key", key), ("value", value)):
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ConfigError(
                f"layer {index}'s {name} has no plain elements to send ({tensor.layout} on {tensor.device}, "
                f"{tensor.dtype}); pass a dense tensor that holds data"
            )
        if tensor.ndim != 3 and not (isinstance(box.tokens, State) and tensor.ndim > 3):
            raise ConfigError(
                f"layer {index}'s {name} must be [tokens, kv_heads, head_dim], got shape {list(tensor.shape)}"
            )
        if tensor.shape[1] != len(box.heads):
            raise ConfigError(_head_count_message(f"layer {index}'s {name}", tensor.shape[1], len(box.heads)))
    if key.shape[0] != value.shape[0]:
        raise ConfigError(f"layer {index} has {key.shape[0]} tokens of keys and {value.shape[0]} of values")
    return key, value


def _head_count_message(what: str, got: int, stated: int) -> str:
    return f"{what} has {got} KV heads, but the route states {stated} for this rank; make the route's head ids match"
