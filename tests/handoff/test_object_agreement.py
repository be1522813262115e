"""The published vote over an engine's group, between real threads and with peers that fail."""

from __future__ import annotations

import threading
import time

import pytest
from tests.support.engine_groups import ThreadCoordinator

from omnikv.errors import VerdictInDoubt
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.object_agreement import agree_on_state


def agree(group, size, signature, within_s=20.0):
    deadline = time.monotonic() + within_s
    return agree_on_state(group, size, signature, "r1", calls=BoundedCalls(), deadline=deadline)


def vote(signatures):
    groups, verdicts = ThreadCoordinator.of(len(signatures)), {}

    def cast(rank):
        verdicts[rank] = agree(groups[rank], len(signatures), signatures[rank]).kept

    threads = [threading.Thread(target=cast, args=(rank,)) for rank in range(len(signatures))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [verdicts[rank] for rank in range(len(signatures))]


YES, NO = (True, ("past_key_values",)), (False, ())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_states_are_kept_on_every_rank(size):
    assert vote([YES] * size) == [True] * size


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_rank_that_differs_makes_all_of_them_drop(odd):
    signatures = [YES, YES, YES]
    signatures[odd] = NO
    assert vote(signatures) == [False] * 3


def test_the_same_absence_everywhere_is_kept():
    assert vote([NO, NO]) == [True, True]


class Recording:
    def __init__(self, rank, answers=(), verdict=None, error=None):
        self.rank_in_group, self._answers, self._verdict, self._error = rank, list(answers), verdict, error
        self.calls = []

    def recv_object(self, src):
        self.calls.append(("recv", src))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send_object(self, obj, dst):
        self.calls.append(("send", obj, dst))

    def broadcast_object(self, obj=None, src=0):
        self.calls.append(("broadcast", obj, src))
        if self._error:
            raise self._error
        return self._verdict if obj is None else obj


def test_rank_0_hears_every_peer_and_tells_all_of_them():
    group = Recording(0, [YES, YES])
    assert agree(group, 3, YES) == (True, ())
    assert group.calls == [("recv", 1), ("recv", 2), ("broadcast", True, 0)]


def test_another_rank_reports_and_obeys():
    group = Recording(2, verdict=False)
    assert not agree(group, 3, YES).kept
    assert group.calls == [("send", YES, 0), ("broadcast", None, 0)]


def test_a_peer_that_cannot_be_read_disagrees_and_the_others_are_told():
    group = Recording(0, [OSError("reset"), YES])
    verdict = agree(group, 3, YES)
    assert verdict == (False, ((1, "", "its vote could not be read"),))
    assert group.calls[-1] == ("broadcast", False, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_learn_the_verdict_says_so_instead_of_guessing(rank):
    group = Recording(rank, [YES], error=OSError("reset"))
    with pytest.raises(VerdictInDoubt, match="tear the group down"):
        agree(group, 2, YES)


def test_rank_0_knows_which_rank_lacked_what():
    one = (True, ("past_key_values", "sp.cfg_text_kv_metadata", "sp.cfg_text_past_key_values"))
    verdict = agree(Recording(0, [(True, ("past_key_values",)), NO]), 3, one)
    assert verdict.causes == (
        (1, "cfg_text", "no sp.cfg_text_kv_metadata on its request"),
        (2, "cfg_text", "no sp.cfg_text_kv_metadata on its request"),
        (2, "primary", "not received"),
    )


def test_d01_a_peer_that_never_votes_leaves_this_rank_in_doubt_at_its_deadline():
    with pytest.raises(VerdictInDoubt, match="the deadline passed"):
        agree(ThreadCoordinator.of(2)[0], 2, YES, within_s=0.05)
