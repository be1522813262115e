"""When the rounds of a receive in a group end: how long each waits for what is missing before the ranks vote on it.

Slices are equal, so that a failure on any rank is known to all within one. A request of very long patience gets longer
slices late in its life, because the number of rounds is bounded.
"""

from __future__ import annotations

from omnikv.core.verdict import MAX_ROUNDS

# A round that would leave less than this of the request's time is the last one.
WORTH_A_ROUND_S = 0.02
_EQUAL_ROUNDS = MAX_ROUNDS // 2
_GROWTH = 1.05


def round_end(started_s: float, deadline_s: float, slice_s: float, number: int) -> tuple[float, bool]:
    """When round `number`, from 0, stops waiting, and whether the request's time allows another round after it."""
    later = max(0, number + 1 - _EQUAL_ROUNDS)
    slices = number + 1 - later + (_GROWTH**later - 1) / (_GROWTH - 1) * _GROWTH
    end_s = started_s + slice_s * slices
    if number + 1 >= MAX_ROUNDS or end_s > deadline_s - WORTH_A_ROUND_S:
        return deadline_s, False
    return end_s, True
