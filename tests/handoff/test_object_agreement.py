"""The published vote over an engine's group, between real threads and with peers that fail."""

from __future__ import annotations

import queue
import threading

import pytest

from omnikv.errors import VerdictInDoubt
from omnikv.handoff.object_agreement import agree_on_state


class ThreadGroup:
    """One rank's view of ranks that are threads; every receive gives up after a while rather than hang the test."""

    def __init__(self, rank, size, mail):
        self.rank_in_group, self.world_size, self._mail = rank, size, mail

    @classmethod
    def of(cls, size):
        mail = {(source, target): queue.Queue() for source in range(size) for target in range(size)}
        return [cls(rank, size, mail) for rank in range(size)]

    def send_object(self, obj, dst):
        self._mail[self.rank_in_group, dst].put(obj)

    def recv_object(self, src):
        return self._mail[src, self.rank_in_group].get(timeout=20)

    def broadcast_object(self, obj=None, src=0):
        if self.rank_in_group != src:
            return self.recv_object(src)
        for rank in range(self.world_size):
            if rank != src:
                self.send_object(obj, rank)
        return obj


def vote(signatures):
    groups, verdicts = ThreadGroup.of(len(signatures)), {}

    def cast(rank):
        verdicts[rank] = agree_on_state(groups[rank], len(signatures), signatures[rank], "r1")

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
    assert agree_on_state(group, 3, YES, "r1")
    assert group.calls == [("recv", 1), ("recv", 2), ("broadcast", True, 0)]


def test_another_rank_reports_and_obeys():
    group = Recording(2, verdict=False)
    assert not agree_on_state(group, 3, YES, "r1")
    assert group.calls == [("send", YES, 0), ("broadcast", None, 0)]


def test_a_peer_that_cannot_be_read_disagrees_and_the_others_are_told():
    group = Recording(0, [OSError("reset"), YES])
    assert not agree_on_state(group, 3, YES, "r1")
    assert group.calls[-1] == ("broadcast", False, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_learn_the_verdict_says_so_instead_of_guessing(rank):
    group = Recording(rank, [YES], error=OSError("reset"))
    with pytest.raises(VerdictInDoubt, match="tear the group down"):
        agree_on_state(group, 2, YES, "r1")
