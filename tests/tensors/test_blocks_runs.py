"""Neighbouring blocks move as one run, scattered ones by one gather; both bring the same tokens."""

import random

import pytest
import torch

from omnikv.core.layout import Layout
from omnikv.tensors import block_span
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.fill import move_all

BLOCK, HEADS, DIM, POOL = 4, 2, 8, 64
CACHE = torch.arange(2 * POOL * BLOCK * HEADS * DIM, dtype=torch.float32).view(2, POOL, BLOCK, HEADS, DIM)
STACKED = Layout.stacked(BLOCK, dim=0)


def expected(ids, tokens, cache=CACHE):
    return [half[list(ids)].flatten(0, 1)[:tokens] for half in cache]


def gathered(paged, heads=None):
    (layer,) = paged.layer_sources(heads)
    outs = [torch.full(source.shape, -1.0, dtype=source.dtype) for source in layer]
    for source, out in zip(layer, outs, strict=True):
        source.write_into(out)
    return outs


def moves_of(source, address=0):
    """The moves that a source names, or None where it names none."""
    moves = []
    return moves if source.add_moves(address, moves) else None


def moved(paged):
    """What `gathered` gives, by the moves that the sources name."""
    outs = []
    for source in paged.layer_sources()[0]:
        outs.append(torch.full(source.shape, -1.0, dtype=source.dtype))
        move_all(moves_of(source, outs[-1].data_ptr()))
    return outs


TOKEN_NBYTES = HEADS * DIM * 4


@pytest.mark.parametrize(
    ("ids", "tokens", "lengths"),
    [
        ([5], 4, [4]),
        ([5], 3, [3]),
        (range(10, 30), 80, [80]),
        (range(10, 30), 77, [77]),
        ([*range(10, 20), *range(40, 50)], 78, [40, 38]),
        ([9, 8, 7, 6], 16, [4, 4, 4, 4]),
        ([*range(5, 9), 3], 18, [16, 2]),
    ],
)
def test_neighbouring_blocks_are_one_move_that_ends_with_the_last_token(ids, tokens, lengths):
    paged = PagedKV([CACHE], ids, tokens, STACKED)
    assert all(map(torch.equal, gathered(paged), expected(ids, tokens)))
    assert all(map(torch.equal, moved(paged), expected(ids, tokens)))
    for source in paged.layer_sources()[0]:
        assert [nbytes for _, _, nbytes in moves_of(source)] == [length * TOKEN_NBYTES for length in lengths]


def test_scattered_blocks_are_gathered_at_once():
    ids = random.Random(0).sample(range(0, POOL, 2), 20)
    paged = PagedKV([CACHE], ids, 77, STACKED)
    assert all(map(torch.equal, gathered(paged), expected(ids, 77)))
    assert [moves_of(source) for source in paged.layer_sources()[0]] == [None, None]


@pytest.mark.parametrize("heads", [(1,), (1, 0)])
def test_some_heads_of_neighbouring_blocks_are_still_the_right_ones(heads):
    outs = gathered(PagedKV([CACHE], range(10, 30), 77, STACKED), heads)
    assert all(
        torch.equal(out, whole[:, list(heads)]) for out, whole in zip(outs, expected(range(10, 30), 77), strict=True)
    )


@pytest.mark.parametrize("layout", [Layout.stacked(BLOCK, dim=1), Layout.packed(BLOCK), Layout.split_pair(BLOCK)])
def test_every_layout_gives_runs_as_it_gives_scattered_blocks(layout, monkeypatch):
    shapes = {
        Layout.stacked(BLOCK, dim=1): (POOL, 2, BLOCK, HEADS, DIM),
        Layout.packed(BLOCK): (POOL, HEADS, BLOCK, 2 * DIM),
    }
    if layout in shapes:
        cache = torch.randn(shapes[layout])
    else:
        cache = (torch.randn(POOL, BLOCK, HEADS, DIM), torch.randn(POOL, BLOCK, HEADS, DIM))
    by_runs = gathered(PagedKV([cache], range(3, 23), 78, layout))
    monkeypatch.setattr(block_span, "_FEW_RUNS", 0)
    monkeypatch.setattr(block_span, "_LONG_RUN_BLOCKS", 100)
    by_blocks = gathered(PagedKV([cache], range(3, 23), 78, layout))
    assert all(map(torch.equal, by_runs, by_blocks))


def test_runs_are_converted_where_the_place_has_another_dtype():
    (layer,) = PagedKV([CACHE], range(10, 30), 77, STACKED).layer_sources()
    out = torch.empty(layer.key.shape, dtype=torch.float64)
    layer.key.write_into(out)
    assert torch.equal(out, expected(range(10, 30), 77)[0].double())


def test_a_place_that_is_not_in_one_piece_is_filled_too():
    (layer,) = PagedKV([CACHE], range(10, 30), 77, STACKED).layer_sources()
    room = torch.full((77, HEADS, 2 * DIM), -1.0)
    layer.key.write_into(room[..., :DIM])
    assert torch.equal(room[..., :DIM], expected(range(10, 30), 77)[0])
    assert bool((room[..., DIM:] == -1).all())
