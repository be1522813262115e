"""Paged KV: a request's tokens gathered out of an engine's blocks in one pass, and written back into them.

`PagedKV` says where a request's KV lies: the layers' caches, the ids of its blocks in order, how many tokens they hold,
and the layout. All of it is checked when it is made, so that nothing is sent of a request that is wrong anywhere. Its
layers are sources (`tensors.kv`): each gathers its blocks straight into the room that a transport gave, so a payload is
read once and written once. The engine's blocks are not held or locked; the engine must leave them alone until sent.

Blocks that lie side by side move as one run. Where a request is in few runs, each is one copy; else one `index_select`
a tensor does the gather: it copies block by block at the speed of memcpy, uses as many threads as torch was told to,
and takes strided views, so some heads of a block, or a packed layout, need no temporary either. On a GPU the gather
runs there, and only its result crosses the bus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from omnikv.core.dtypes import convertible
from omnikv.core.layout import Layout
from omnikv.errors import ConfigError
from omnikv.tensors.block_span import TokenRun, TokenSpan, plan_span
from omnikv.tensors.convert import converted, name_of
from omnikv.tensors.kv import DenseSource, LayerKV, LayerSource, LayerSources, Move, head_runs, is_plain
from omnikv.tensors.layouts import BlockViews, LayerCache, layer_views
from omnikv.tensors.quantised import Scale, dequantise, scale_entry, split_scales

# `(first head in the output, first head in the blocks, how many)`.
HeadRun: TypeAlias = "tuple[int, int, int]"

_PIECE_NBYTES = 256 << 10
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """One request's KV in an engine's paged caches; checked whole when made, copied when sent.

    `block_ids` may name more blocks than `num_tokens` fill (engines reserve ahead): the surplus is checked, not sent.
    Layers have the same number of heads; their head_dim, dtype, pool size and device may differ. `scales`, where
    `layout` states such, are a (key, value) pair a layer; each layer then goes as two entries (`tensors.quantised`).

    Raises:
        ConfigError: no layers; a cache that does not fit `layout`; layers with different numbers of heads; `num_tokens`
            not positive or more than the blocks hold; a block id that is not in a layer's pool, or that comes twice;
            scales that `layout` does not state, or that are not as it states.
    """

    # Not shown: a log line would print an engine's whole cache.
    kv_caches: Sequence[LayerCache] = field(repr=False)
    block_ids: Sequence[int]
    num_tokens: int
    layout: Layout
    scales: Sequence[tuple[Scale, Scale]] | None = field(default=None, repr=False)
    _layers: tuple[BlockViews, ...] = field(init=False, repr=False)
    _span: TokenSpan = field(init=False, repr=False)
    _scales: tuple[LayerKV, ...] = field(init=False, repr=False)
    # By the heads that they select: several target ranks may take the same ones, and a request may be sent again.
    _sources: dict[tuple[int, ...], LayerSources] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        layers = _layer_views(self.kv_caches, self.layout)
        object.__setattr__(self, "_layers", layers)
        object.__setattr__(self, "_span", plan_span(self.block_ids, self.num_tokens, layers))
        object.__setattr__(self, "_scales", self._scale_entries())

    @property
    def num_layers(self) -> int:
        """How many entries `layer_sources` gives: a layer each, and its scales where it has such."""
        return len(self._layers) + len(self._scales)

    @property
    def num_heads(self) -> int:
        """The KV heads that these caches hold, the same in every layer."""
        return self._layers[0][0].shape[2]

    def layer_sources(self, head_positions: tuple[int, ...] | None = None) -> LayerSources:
        """A source an entry, each `[num_tokens, kv_heads, head_dim]`; `head_positions` selects and orders local heads.

        Raises:
            ConfigError: a position outside these caches' heads, one given twice, or none at all.
        """
        if head_positions is None:
            head_positions = tuple(range(self.num_heads))
        made = self._sources.get(head_positions)
        if made is None:
            made = self._sources[head_positions] = LayerSources(self._make_sources(head_positions))
        return made

    def _make_sources(self, head_positions: tuple[int, ...]) -> list[LayerSource]:
        outside = [position for position in head_positions if not 0 <= position < self.num_heads]
        if outside or len(set(head_positions)) != len(head_positions) or not head_positions:
            raise ConfigError(
                f"head positions {list(head_positions)} must be one or more different ones of the "
                f"{self.num_heads} KV heads that these caches hold"
            )
        # Runs of neighbouring heads move together: where a run starts in the output and in the blocks, and its length.
        runs = tuple((at, head_positions[at], length) for at, length in head_runs(head_positions))
        heads = None if head_positions == tuple(range(self.num_heads)) else runs
        values = [
            LayerSource(BlockSource(key, self._span, heads), BlockSource(value, self._span, heads))
            for key, value in self._layers
        ]
        if not self._scales:
            return values
        scales = [LayerSource(*(DenseSource(tensor, head_positions) for tensor in pair)) for pair in self._scales]
        return [entry for pair in zip(values, scales, strict=True) for entry in pair]

    def _scale_entries(self) -> tuple[LayerKV, ...]:
        grain, scales = self.layout.scales, self.scales
        if (grain is None) != (scales is None) or (scales is not None and len(scales) != len(self._layers)):
            raise ConfigError(
                f"the layout {self.layout.describe()!r} states scales {'for no' if grain is None else 'a'} "
                f"{grain or 'tensor'}, but {'none' if scales is None else len(scales)} came for {len(self._layers)} "
                "layers; pass scales= with a (key, value) pair a layer exactly where the layout states them"
            )
        if grain is None or scales is None:
            return ()
        return tuple(scale_entry(key, value, grain, self.num_tokens, self.num_heads) for key, value in scales)


class BlockSource:
    """A source over the blocks `[blocks, block_size, kv_heads, head_dim]` of one request; gathers when written."""

    __slots__ = ("_blocks", "_runs", "_span", "_token_nbytes", "dtype", "shape")

    def __init__(self, blocks: torch.Tensor, span: TokenSpan, head_runs: tuple[HeadRun, ...] | None) -> None:
        """`head_runs` selects and orders heads; None takes them all as they are."""
        self._blocks = blocks
        self._span = span
        self._runs = head_runs
        self.dtype = blocks.dtype
        _, _, num_heads, head_dim = blocks.shape
        if head_runs is not None:
            num_heads = sum(length for _, _, length in head_runs)
        self.shape = (span.num_tokens, num_heads, head_dim)
        # Of the sizes, not the strides: those of an empty value, as a latent has, are not 0.
        moves = head_runs is None and span.is_in_few_runs and is_plain(blocks)
        self._token_nbytes = num_heads * head_dim * blocks.element_size() if moves else None

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self._blocks.device

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks of the whole pool, this request's and others'."""
        return self._blocks

    def runs(self) -> list[tuple[int, int]] | None:
        """`(address, bytes)` of the stretches of host memory that are this tensor's bytes, one after another.

        None where some heads, strides within a block or a device make them no such bytes.
        """
        blocks = self._blocks
        if self._runs is not None or not blocks.numel() or not is_plain(blocks[0]):
            return None
        span, slots = self._span, blocks.shape[1]
        block_nbytes = blocks[0].nbytes
        token_nbytes, stride_nbytes = block_nbytes // slots, blocks.stride(0) * blocks.element_size()
        if stride_nbytes == block_nbytes:
            whole = span.runs
        else:
            whole = tuple(
                (at * slots, block * slots, min(slots, span.num_tokens - at * slots))
                for at, block in enumerate(span.block_ids)
            )
        origin = blocks.data_ptr()
        return [(origin + start // slots * stride_nbytes, length * token_nbytes) for _, start, length in whole]

    def add_moves(self, address: int, moves: list[Move]) -> bool:
        """As `HostSource`."""
        token_nbytes = self._token_nbytes
        if token_nbytes is None:
            return False
        origin = self._blocks.data_ptr()
        for at, start, length in self._span.runs:
            moves.append((address + at * token_nbytes, origin + start * token_nbytes, length * token_nbytes))
        return True

    def write_into(self, out: torch.Tensor) -> None:
        self._write(out, non_blocking=False)

    def queue_into(self, out: torch.Tensor) -> None:
        """As `write_into`, but `out` is filled when the device's current stream has come to it."""
        self._write(out, non_blocking=True)

    def _write(self, out: torch.Tensor, *, non_blocking: bool) -> None:
        if self._runs is None:
            self._gather(self._blocks, out, non_blocking)
            return
        for at, start, length in self._runs:
            self._gather(self._blocks.narrow(2, start, length), out.narrow(1, at, length), non_blocking)

    def _gather(self, blocks: torch.Tensor, out: torch.Tensor, non_blocking: bool) -> None:
        span = self._span
        if span.is_in_few_runs and blocks.is_contiguous():
            _move_runs(blocks, out, span.runs, non_blocking)
            return
        if span.whole_blocks:
            index = span.index_on(blocks.device)
            whole = span.as_blocks(out)
            if blocks.device == out.device and blocks.dtype == out.dtype:
                torch.index_select(blocks, 0, index, out=whole)
            elif blocks.device == out.device:
                for piece in _pieces(whole):
                    whole[piece].copy_(blocks.index_select(0, index[piece]))
            else:
                # Gathering over the bus would be a copy a block: one tensor is gathered where it lies, then moved.
                whole.copy_(blocks.index_select(0, index), non_blocking=non_blocking)
        if span.rest_tokens:
            span.rest_of(out).copy_(blocks[span.last_block, : span.rest_tokens], non_blocking=non_blocking)


def _move_runs(blocks: torch.Tensor, out: torch.Tensor, runs: Sequence[TokenRun], non_blocking: bool) -> None:
    tokens = blocks.flatten(0, 1)
    for at, start, length in runs:
        out.narrow(0, at, length).copy_(tokens.narrow(0, start, length), non_blocking=non_blocking)


def scatter_into_blocks(
    layers: Sequence[LayerKV], kv_caches: Sequence[LayerCache], block_ids: Sequence[int], layout: Layout
) -> list[LayerKV]:
    """The scales that came along, a pair a layer; writes `layers` into the blocks `block_ids`, in order.

    The inverse of what `PagedKV` reads, with the same checks, all of them before the first write. Each layer is
    `[tokens, kv_heads, head_dim]`. What follows the last token in its block, and blocks beyond, stay as they are.
    Layers may lie on another device than the caches, and in another dtype where `layout` states the caches' one: floats
    convert, and quantised ones (`tensors.quantised`) are scaled back. Their scales, each `[tokens, kv_heads, 1]`, are
    given where `layout` states that the engine keeps such, and there is none otherwise.

    Raises:
        ConfigError: as `PagedKV` does, or a layer that differs from its cache in heads or head_dim, or in a dtype that
            does not convert, or from the other layers in tokens.
        HandoffError: a value is beyond what float16 holds; blocks may have been written.
    """
    views = _layer_views(kv_caches, layout)
    scales: list[LayerKV] = []
    if len(layers) == 2 * len(views):
        layers, scales = split_scales(layers)
    _require_fit(layers, bool(scales), views, layout)
    span = plan_span(block_ids, layers[0][0].shape[0], views)
    for number, (layer, blocks) in enumerate(zip(layers, views, strict=True)):
        if scales and not layout.scales:
            (layer,) = dequantise([layer, scales[number]], blocks[0].dtype)
        for tensor, room in zip(layer, blocks, strict=True):
            _scatter(tensor.detach(), room, span)
    return scales if layout.scales else []


def _require_fit(layers: Sequence[LayerKV], has_scales: bool, views: tuple[BlockViews, ...], layout: Layout) -> None:
    if len(layers) != len(views) or (layout.scales and not has_scales):
        raise ConfigError(
            f"{len(layers)} layers{' with scales' * has_scales} cannot be written into the KV caches of {len(views)} "
            f"layers{' that have scales' * bool(layout.scales)}"
        )
    num_tokens = layers[0][0].shape[0]
    for number, (layer, blocks) in enumerate(zip(layers, views, strict=True)):
        for name, tensor, room in zip(("key", "value"), layer, blocks, strict=True):
            expected = (num_tokens, *room.shape[2:])
            converts = layout.dtype is not None and convertible(name_of(tensor.dtype), layout.dtype)
            if tuple(tensor.shape) != expected or (tensor.dtype != room.dtype and not converts):
                raise ConfigError(
                    f"the {name} of layer {number} is {list(tensor.shape)} {tensor.dtype}, "
                    f"but the blocks take {list(expected)} {room.dtype}"
                    f"{'' if layout.dtype else '; other dtypes are converted where the layout states a dtype'}"
                )


def _scatter(tensor: torch.Tensor, room: torch.Tensor, span: TokenSpan) -> None:
    if span.whole_blocks:
        index, whole = span.index_on(room.device), span.as_blocks(tensor).to(room.device)
        # Moved as bits: indexed writes are not offered for every dtype.
        bits = _BITS[room.element_size()]
        for piece in (slice(None),) if tensor.dtype == room.dtype else _pieces(whole):
            values = converted(whole[piece], room.dtype).view(bits)
            if room.is_contiguous():
                room.view(bits).index_copy_(0, index[piece], values)
            else:
                room.view(bits).index_put_((index[piece],), values)
    if span.rest_tokens:
        room[span.last_block, : span.rest_tokens].copy_(converted(span.rest_of(tensor), room.dtype))


def _pieces(blocks: torch.Tensor) -> list[slice]:
    """The blocks in pieces that stay in a core's cache between being read and being converted."""
    count = blocks.shape[0]
    step = max(1, count * _PIECE_NBYTES // max(1, blocks.nbytes))
    return [slice(at, at + step) for at in range(0, count, step)]


def _layer_views(kv_caches: Sequence[LayerCache], layout: Layout) -> tuple[BlockViews, ...]:
    if not isinstance(layout, Layout):
        raise ConfigError(f"layout must be a Layout, which declares how the caches lie, got {layout!r}")
    if not isinstance(kv_caches, Iterable):
        raise ConfigError(f"kv_caches must be the KV cache of every layer, in order, got {kv_caches!r}")
    layers = tuple(layer_views(cache, layout, layer=number) for number, cache in enumerate(kv_caches))
    if not layers:
        raise ConfigError("there are no layers; pass the KV cache of every layer")
    _, slots, num_heads, _ = layers[0][0].shape
    for number, (key, _) in enumerate(layers):
        if key.shape[1] != slots:
            raise ConfigError(
                f"a block of layer {number} holds {key.shape[1]} tokens and one of layer 0 holds {slots}; "
                "every layer must have blocks of the same size"
            )
        if key.shape[2] != num_heads or num_heads == 0:
            raise ConfigError(
                f"layer {number} has {key.shape[2]} KV heads and layer 0 has {num_heads}; "
                "every layer must hold the same heads, one or more"
            )
    return layers
