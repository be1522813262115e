"""The bare star says whether all ranks cast the same, and nothing else."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from omnikv.bench.agreement_rank import ballot_of
from omnikv.bench.agreement_star import BareStar
from omnikv.groups.threads import ThreadGroup


def at_once(*jobs):
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(30) for future in [pool.submit(job) for job in jobs]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_alike", [True, False])
def test_every_rank_learns_whether_all_cast_the_same(size, is_alike):
    deadline = time.monotonic() + 30
    stars = at_once(*[lambda group=group: BareStar(group, deadline=deadline) for group in ThreadGroup.create(size)])
    votes = [[("r", ballot_of(0 if is_alike else rank == size - 1))] for rank in range(size)]
    said = at_once(*[lambda star=star, mine=mine: star.agree(mine) for star, mine in zip(stars, votes, strict=True)])
    for star in stars:
        star.close()
    assert said == [is_alike] * size
