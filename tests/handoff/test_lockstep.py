"""What stands between a receive and its group's verdict."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from omnikv.core.receive_role import ReceiveLayout, ReceiveRole
from omnikv.handoff.lockstep import keep_or_drop, received_until_vote


class Follower:
    """Rank 1 of 2, whose leader has decided already."""

    rank_in_group, world_size = 1, 2

    def __init__(self, verdict):
        self.verdict, self.sent = verdict, []

    def send_object(self, obj, dst):
        self.sent.append((obj, dst))

    def broadcast_object(self, obj=None, src=0):
        return self.verdict


def layout(group, role=ReceiveRole.LOCAL):
    return ReceiveLayout(role, True, 1, 0, None, 1, 0, None, None, tp_group=group, tp_size=2)


def request():
    params = SimpleNamespace(past_key_values="kv", cfg_kv_request_ids={"cfg_text": "c"})
    return SimpleNamespace(request_id="r1", past_key_values="kv", sampling_params=params)


def settle(req, group, *, received=True, request_id="r1", need=True, counters=None, role=ReceiveRole.LOCAL):
    return keep_or_drop(
        req,
        layout(group, role),
        received=received,
        request_id=request_id,
        need_recv_cache=need,
        counters=Counter() if counters is None else counters,
    )


def test_a_rank_votes_with_what_its_request_holds_now():
    group, req = Follower(True), request()
    assert settle(req, group)
    assert group.sent == [((True, ("past_key_values", "sp.cfg_kv_request_ids", "sp.past_key_values")), 0)]
    assert req.past_key_values == "kv"


def test_x13_a_drop_clears_the_kv_and_keeps_what_a_retry_needs():
    req, counters = request(), Counter()
    assert not settle(req, Follower(False), counters=counters)
    assert req.past_key_values is None
    assert req.sampling_params.cfg_kv_request_ids == {"cfg_text": "c"}
    assert counters == {"dropped": 1}


@pytest.mark.parametrize(
    "aside", [{"role": ReceiveRole.LEADER}, {"request_id": None}, {"request_id": "dummy_req_id/1"}, {"need": False}]
)
def test_without_a_vote_the_group_is_not_touched(aside):
    group = Follower(False)
    assert settle(request(), group, **aside)
    assert group.sent == []


def test_an_error_before_the_vote_becomes_a_no():
    def receive():
        raise MemoryError("gone")

    counters = Counter()
    assert not received_until_vote(receive, "r1", counters)
    assert counters == {"receive_failed": 1}
    assert received_until_vote(lambda: True, "r1", counters)


def test_a_request_to_stop_the_program_is_not_swallowed():
    def receive():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        received_until_vote(receive, "r1", Counter())
