"""A request of several payloads gets room for all of them or for none, and holds no part of it that others may want."""

import contextlib
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from omnikv.errors import PutRejected
from omnikv.transports.shm_map import make_private_segment
from omnikv.transports.shm_pool import PAGE_NBYTES, Pool


class SlowMaker:
    """Makes memory, from the second segment on only once it is let."""

    def __init__(self):
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()
        self._calls = 0

    def __call__(self, nbytes):
        self._calls += 1
        if self._calls > 1:
            self.is_asked.set()
            assert self.may_go_on.wait(60)
        return make_private_segment(nbytes)


def pages(number):
    return number * PAGE_NBYTES


def test_d31_a_request_for_which_the_pool_still_grows_holds_no_room_that_another_could_have():
    maker = SlowMaker()
    pool = Pool(pages(10), pages(5), make=maker)
    pool.give(pool.take(pages(1)))
    with ThreadPoolExecutor(1) as threads:
        growing = threads.submit(pool.take_all, [pages(4), pages(5)])
        assert maker.is_asked.wait(60)
        other = pool.take(pages(4))
        pool.give(other)
        maker.may_go_on.set()
        assert [room.nbytes for room in growing.result(timeout=60)] == [pages(4), pages(5)]


def test_d31_a_request_that_is_refused_leaves_the_pool_as_it_was():
    pool = Pool(pages(10), pages(5), make=make_private_segment)
    pool.take(pages(1))
    with pytest.raises(PutRejected) as refused:
        pool.take_all([pages(4), pages(5), pages(1)])
    assert refused.value.retryable
    assert pool.used_nbytes == pages(1)
    assert pool.mapped_nbytes == pages(5), "a request that cannot be let in must not make the pool grow"


@pytest.mark.parametrize(
    ("left_by_others", "wanted"),
    [([7, 3], [5, 5]), ([3, 7], [5, 5]), ([4, 6], [6, 3, 1]), ([2, 2, 2, 2, 2], [3, 3, 3, 1]), ([9, 1], [2] * 5)],
)
def test_d31_an_idle_pool_lets_in_whatever_fits_it_however_it_is_cut(left_by_others, wanted):
    pool = Pool(pages(10), pages(1), make=make_private_segment)
    for room in [pool.take(pages(size)) for size in left_by_others]:
        pool.give(room)
    assert pool.mapped_nbytes == pages(10)
    rooms = pool.take_all([pages(size) for size in wanted])
    assert [room.nbytes for room in rooms] == [pages(size) for size in wanted]
    assert pool.used_nbytes == pages(10)


def test_d31_idle_segments_make_way_for_what_does_not_fit_beside_those_in_use():
    pool = Pool(pages(8), pages(1), make=make_private_segment)
    used, idle = pool.take(pages(1)), pool.take(pages(3))
    pool.give(idle)
    rooms = pool.take_all([pages(2), pages(2)])
    assert pool.used_nbytes == pages(5)
    for room in (used, *rooms):
        pool.give(room)
    assert pool.used_nbytes == 0


def test_no_history_of_requests_makes_an_idle_pool_refuse_what_fits_it_or_two_rooms_overlap():
    dice = random.Random(31)
    for _ in range(300):
        limit = dice.randint(4, 24)
        pool = Pool(pages(limit), pages(dice.randint(1, 6)), make=make_private_segment)
        live = []
        for _ in range(dice.randint(1, 25)):
            if live and dice.random() < 0.5:
                for room in live.pop(dice.randrange(len(live))):
                    pool.give(room)
                continue
            sizes = [pages(dice.randint(1, limit // 2)) for _ in range(dice.randint(1, 4))]
            held = sum(room.nbytes for rooms in live for room in rooms)
            if live:
                with contextlib.suppress(PutRejected):
                    live.append(pool.take_all(sizes))
                    held += sum(sizes)
            elif sum(sizes) <= pool.limit_nbytes:
                live.append(pool.take_all(sizes))
                held += sum(sizes)
            assert pool.used_nbytes == held
            spans = sorted(
                (room.segment.number, room.offset, room.offset + room.nbytes) for rooms in live for room in rooms
            )
            assert all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(spans))
        pool.close()
