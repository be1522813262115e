"""Shares of tokens, and where two of them meet."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnikv.core.stripes import first_gap, meet, rows_of
from omnikv.core.tokens import (
    Chunks,
    Cyclic,
    LastTokens,
    State,
    Stripe,
    count,
    may_meet,
    telling_count,
    without_windows,
)
from omnikv.errors import TopologyError


def chunks():
    def some_of(size):
        listed = st.lists(st.integers(0, size - 1), min_size=1, unique=True)
        return listed.map(lambda picked: Chunks(size, tuple(sorted(picked))))

    return st.integers(1, 6).flatmap(some_of)


def cyclic():
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 5))
    return sizes.flatmap(lambda size: st.integers(0, size[1] - 1).map(lambda rank: Cyclic(*size, rank)))


def shares():
    return st.one_of(chunks(), cyclic(), st.integers(1, 9).map(LastTokens))


def expand(stripes):
    return [at for stripe in stripes for run in stripe.runs() for at in range(*run)]


@given(shares(), st.integers(0, 200))
def test_a_share_lists_tokens_of_the_request_ascending_and_once(share, num_tokens):
    held = expand(share.stripes(num_tokens))
    assert held == sorted(set(held))
    assert all(0 <= token < num_tokens for token in held)
    assert count(share.stripes(num_tokens)) == len(held)


@settings(max_examples=500)
@given(shares(), shares(), st.integers(0, 200))
def test_two_shares_meet_in_exactly_the_tokens_of_both(one, other, num_tokens):
    mine, theirs = one.stripes(num_tokens), other.stripes(num_tokens)
    both = expand(meet(mine, theirs))
    assert sorted(both) == sorted({*expand(mine)} & {*expand(theirs)})
    if both:
        assert may_meet(one, other)
    for stripes in (mine, theirs):
        held = expand(stripes)
        assert [held[row] for row in expand(rows_of(meet(mine, theirs), stripes))] == both


@given(shares(), shares(), st.integers(0, 200))
def test_the_first_gap_is_where_tokens_begin_to_be_absent(one, other, num_tokens):
    needed, held = one.stripes(num_tokens), other.stripes(num_tokens)
    absent = sorted({*expand(needed)} - {*expand(held)})
    gap = first_gap(needed, [held])
    if not absent:
        assert gap is None
    else:
        assert gap[0] == absent[0]
        assert {*range(*gap)} <= {*absent}


def partitions():
    whole = st.integers(1, 4).flatmap(
        lambda size: st.sampled_from(
            [
                [Chunks(size, (rank,)) for rank in range(size)],
                [Cyclic(2, size, rank) for rank in range(size)],
                [Chunks(2 * size, (rank, 2 * size - 1 - rank)) for rank in range(size)],
            ]
        )
    )
    return whole | st.lists(shares(), min_size=1, max_size=3)


@settings(max_examples=300)
@given(st.lists(shares(), min_size=1, max_size=3), partitions())
@example(needed=[Cyclic(5, 2, 1)], held=[LastTokens(8)])
@example(needed=[LastTokens(1)], held=[Chunks(6, (0, 5))])
def test_what_covers_the_telling_count_covers_every_count(needed, held):
    case = needed, held

    def covers(num_tokens, needed, held):
        have = {token for share in held for token in expand(share.stripes(num_tokens))}
        return all(have.issuperset(expand(share.stripes(num_tokens))) for share in needed)

    def overlaps(num_tokens, held):
        tokens = [token for share in held for token in expand(share.stripes(num_tokens))]
        return len(tokens) != len(set(tokens))

    for wide in (False, True):
        if wide:
            needed, held = ([without_windows(share) for share in shares] for shares in (needed, held))
        num_tokens = telling_count([*needed, *held])
        if num_tokens > 20_000 or not covers(num_tokens, needed, held) or overlaps(num_tokens, held):
            return
    assert all(covers(fewer, *case) and not overlaps(fewer, case[1]) for fewer in range(100))


@pytest.mark.parametrize(
    ("share", "num_tokens", "expected"),
    [
        (Chunks(), 5, [0, 1, 2, 3, 4]),
        (Chunks(2, (0,)), 5, [0, 1, 2]),
        (Chunks(4, (0, 3)), 8, [0, 1, 6, 7]),
        (Cyclic(2, 3, 1), 15, [2, 3, 8, 9, 14]),
        (LastTokens(3), 5, [2, 3, 4]),
        (LastTokens(3), 2, [0, 1]),
        (State(), 7, [0]),
        (State(), 0, [0]),
    ],
)
def test_shares_are_what_they_say(share, num_tokens, expected):
    assert expand(share.stripes(num_tokens)) == expected


def test_interleaved_shares_stay_small_however_many_tokens():
    assert Cyclic(1, 8, 3).stripes(1 << 40) == (Stripe(3, 1, 8, 1 << 37),)
    [both] = meet(Cyclic(1, 8, 3).stripes(1 << 40), Cyclic(1, 4, 3).stripes(1 << 40))
    assert both == Stripe(3, 1, 8, 1 << 37)


@pytest.mark.parametrize(
    ("fine", "coarse"), [(Cyclic(1, 3, 1), Cyclic(4096, 2, 1)), (Cyclic(7, 3, 2), Cyclic(1000, 2, 0))]
)
def test_a_fine_share_within_long_blocks_is_one_stripe_a_block_and_the_runs_that_its_ends_cut(fine, coarse):
    num_tokens = 128 << 10
    mine, theirs = fine.stripes(num_tokens), coarse.stripes(num_tokens)
    blocks = sum(stripe.times for stripe in theirs)
    for both in (meet(mine, theirs), meet(theirs, mine)):
        assert len(both) <= 3 * blocks
        assert sorted(expand(both)) == sorted({*expand(mine)} & {*expand(theirs)})


def test_states_and_tokens_never_meet():
    assert may_meet(State(), State())
    assert not may_meet(State(), Chunks())
    assert not may_meet(LastTokens(3), State())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chunks(2, ()),
        lambda: Chunks(2, (2,)),
        lambda: Chunks(3, (1, 0)),
        lambda: Chunks(3, (1, 1)),
        lambda: Cyclic(0, 2, 0),
        lambda: Cyclic(4, 2, 2),
        lambda: LastTokens(0),
        lambda: LastTokens(1.5),
        lambda: LastTokens("4"),
        lambda: LastTokens(True),
        lambda: Cyclic(1.5, 2, 0),
        lambda: Cyclic("1", 2, 0),
        lambda: Cyclic(1, 2, 0.5),
        lambda: Chunks("2", (0,)),
        lambda: Chunks(2.5, (0,)),
        lambda: Chunks(2, (0.5,)),
        lambda: Chunks(2, 1),
        lambda: Chunks(2, None),
    ],
)
def test_shares_that_are_none_are_refused(make):
    with pytest.raises(TopologyError):
        make()
