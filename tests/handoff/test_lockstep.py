"""What stands between a receive and its group's verdict."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tests.support.engine_groups import ThreadCoordinator

from omnikv.core.receive_role import ReceiveLayout, ReceiveRole
from omnikv.errors import ConfigError, RemoteProtocolError, VerdictInDoubt
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.engine_request import received_until_vote, request_id_of
from omnikv.handoff.lockstep import Case, Lockstep, VoteRules
from omnikv.handoff.open_request import Deadlines, OpenRequest


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


def kv(tokens=3, dtype=torch.float32):
    return SimpleNamespace(
        key_cache=[torch.zeros(tokens, 1, 4, dtype=dtype)], value_cache=[torch.zeros(tokens, 1, 4, dtype=dtype)]
    )


def request(primary="kv", asks=("cfg_text",), **companions):
    params = SimpleNamespace(
        past_key_values=primary, **{f"{role}_past_key_values": it for role, it in companions.items()}
    )
    if asks:
        params.cfg_kv_request_ids = {role: f"r1-{role}" for role in asks}
    return SimpleNamespace(request_id="r1", past_key_values=primary, sampling_params=params)


def opened(**more):
    return OpenRequest(Deadlines.starting(0.0, recv_timeout_s=1.0, vote_timeout_s=1.0), ("r1",), **more)


def settle(
    req, group, *, received=True, request_id="r1", role=ReceiveRole.LOCAL, within_s=20.0, failures=None, **rules
):
    counters = Counter()
    lockstep = Lockstep(VoteRules(**{"need_recv_cache": True, **rules}), counters, BoundedCalls())
    case = Case(
        req=req,
        layout=layout(group, role),
        request=opened(failures=failures or {}),
        request_id=request_id,
        received=received,
        deadline=time.monotonic() + within_s,
    )
    return lockstep.settle(case), counters


def settle_all(requests, **more):
    """What each rank of a group of threads comes to: (kept, counters), or the error that it raises."""
    outcomes = {}

    def run(rank, group):
        mine = {name: value[rank] if isinstance(value, list) else value for name, value in more.items()}
        try:
            outcomes[rank] = settle(requests[rank], group, **mine)
        except Exception as error:  # noqa: BLE001
            outcomes[rank] = error

    groups = ThreadCoordinator.of(len(requests))
    threads = [threading.Thread(target=run, args=(rank, group)) for rank, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(len(requests))]


def test_a_rank_votes_with_what_its_request_holds_now():
    group, req = Follower(True), request()
    assert settle(req, group)[0]
    assert group.sent == [((True, ("past_key_values", "sp.cfg_kv_request_ids", "sp.past_key_values")), 0)]
    assert req.past_key_values == "kv"


def test_x13_a_drop_clears_the_kv_and_keeps_what_a_retry_needs():
    req = request()
    kept, counters = settle(req, Follower(False))
    assert not kept
    assert req.past_key_values is None
    assert req.sampling_params.cfg_kv_request_ids == {"cfg_text": "r1-cfg_text"}
    assert counters["dropped"] == 1


@pytest.mark.parametrize(
    "aside",
    [
        {"role": ReceiveRole.FOLLOWER},
        {"request_id": None},
        {"request_id": "dummy_req_id/1"},
        {"need_recv_cache": False},
    ],
)
def test_d36_without_a_vote_the_group_is_not_touched(aside):
    group = Follower(False)
    assert settle(request(), group, **aside)[0]
    assert group.sent == []


def test_x14_leaders_of_one_tensor_group_vote_as_well():
    group = Follower(False)
    assert not settle(request(), group, role=ReceiveRole.LEADER)[0]
    assert len(group.sent) == 1


def test_a_request_that_cannot_be_read_is_a_no_and_not_an_exception():
    class Odd:
        @property
        def past_key_values(self):
            raise ZeroDivisionError

    group = Follower(False)
    assert not settle(Odd(), group)[0]
    assert group.sent == [((False, ()), 0)]


# Words


def test_rank_0_says_which_rank_lacks_what(caplog):
    settle_all([request(cfg_text="text"), request()])
    assert "rank 1 lacks cfg_text: not received" in caplog.text


def test_a_rank_says_why_it_lacks_what_it_lacks(caplog):
    outcomes = settle_all(
        [request(), request(primary=None)],
        received=[True, False],
        failures=[{}, {"r1": "ReceiveTimeout: 1 of 2 shards are missing"}],
    )
    assert [kept for kept, _ in outcomes] == [False, False]
    assert "rank 1 lacks primary: ReceiveTimeout: 1 of 2 shards are missing" in caplog.text
    assert outcomes[1][1]["rank 1 lacks primary"] == 1
    assert outcomes[0][1]["rank 1 lacks primary"] == 1


# Which companions must be there


@pytest.mark.parametrize("dialect", ["published", "contents"])
def test_d06_a_companion_that_no_rank_has_is_named_and_counted(dialect, caplog):
    outcomes = settle_all([request(kv()), request(kv())], dialect=dialect)
    assert [kept for kept, _ in outcomes] == [True, True]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "without the companions cfg_text" in warnings[0]
    assert [counters["companions_missing"] for _, counters in outcomes] == [1, 1]


@pytest.mark.parametrize("dialect", ["published", "contents"])
def test_d06_a_required_companion_that_no_rank_has_fails_the_request(dialect):
    requests = [request(kv()), request(kv())]
    outcomes = settle_all(requests, dialect=dialect, required_roles=("cfg_text",))
    assert [kept for kept, _ in outcomes] == [False, False]
    assert [req.past_key_values for req in requests] == [None, None]


def test_d06_a_rank_without_a_group_does_not_go_on_without_a_required_companion():
    req = request(kv())
    kept, counters = settle(req, None, required_roles=("cfg_text",))
    assert not kept
    assert req.past_key_values is None
    assert counters["rank 0 lacks cfg_text"] == 1


@pytest.mark.parametrize("dialect", ["published", "contents"])
def test_d02_a_companion_that_only_one_rank_has_fails_the_request(dialect, caplog):
    requests = [request(kv(), cfg_text=kv()), request(kv())]
    outcomes = settle_all(requests, dialect=dialect, failures=[{}, {"r1-cfg_text": "the deadline passed"}])
    assert [kept for kept, _ in outcomes] == [False, False]
    assert requests[0].sampling_params.cfg_text_past_key_values is None
    assert "rank 1 lacks cfg_text: the deadline passed" in caplog.text


# Contents


def test_x12_ranks_that_hold_different_numbers_of_tokens_drop_the_request(caplog):
    requests = [request(kv(3), asks=()), request(kv(99), asks=())]
    assert [kept for kept, _ in settle_all(requests, dialect="contents")] == [False, False]
    assert "rank 1 lacks primary: differs: tokens 99 here, 3 on rank 0" in caplog.text
    assert [req.past_key_values for req in requests] == [None, None]


@pytest.mark.parametrize(
    "other", [kv(3, torch.float16), SimpleNamespace(key_cache=[torch.zeros(3, 1, 4)] * 2, value_cache=[])]
)
def test_x12_layers_and_dtypes_are_compared_too(other):
    assert [kept for kept, _ in settle_all([request(kv()), request(other)], dialect="contents")] == [False, False]


def test_parts_of_two_attempts_are_not_used_together(caplog):
    requests = [request(kv(), asks=()), request(kv(), asks=())]
    for attempt, req in enumerate(requests):
        req.kv_metadata = {"attempt": attempt}
    assert [kept for kept, _ in settle_all(requests, dialect="contents")] == [False, False]
    assert "attempt 1 here, 0 on rank 0" in caplog.text


def test_ranks_that_hold_different_heads_of_the_same_tokens_agree():
    two_heads = SimpleNamespace(key_cache=[torch.zeros(3, 2, 4)], value_cache=[torch.zeros(3, 2, 4)])
    assert [kept for kept, _ in settle_all([request(kv()), request(two_heads)], dialect="contents")] == [True, True]


def test_ranks_with_different_rules_do_not_vote_with_each_other():
    outcomes = settle_all([request(), request()], dialect="contents", required_roles=[("cfg_text",), ()])
    assert [type(outcome) for outcome in outcomes] == [RemoteProtocolError, RemoteProtocolError]


def test_a_channel_wants_a_process_group():
    with pytest.raises(ConfigError, match="cpu_group"):
        settle(request(), Follower(True), dialect="contents", over="channel")


# Deadlines


@pytest.mark.parametrize("rank", [0, 1])
def test_d01_a_dead_peer_leaves_the_others_in_doubt_by_the_deadline(rank):
    req = request()
    with pytest.raises(VerdictInDoubt, match="tear the group down"):
        settle(req, ThreadCoordinator.of(2)[rank], within_s=0.05)
    assert req.past_key_values == "kv"


def test_a_group_in_doubt_is_not_used_again():
    group, counters, calls = ThreadCoordinator.of(2)[1], Counter(), BoundedCalls()
    lockstep = Lockstep(VoteRules(need_recv_cache=True), counters, calls)
    for within_s, words in ((0.05, "the deadline passed"), (60.0, "the group failed before")):
        case = Case(
            req=request(),
            layout=layout(group),
            request=opened(),
            request_id="r1",
            received=True,
            deadline=time.monotonic() + within_s,
        )
        with pytest.raises(VerdictInDoubt, match=words):
            lockstep.settle(case)


# Before the vote


def test_an_error_before_the_vote_becomes_a_no_with_its_cause():
    def receive():
        raise MemoryError("gone")

    counters, open_request = Counter(), opened()
    assert not received_until_vote(receive, open_request, counters)
    assert counters == {"receive_failed": 1}
    assert open_request.failures == {"r1": "MemoryError: gone"}
    assert received_until_vote(lambda: True, opened(), counters)


def test_a_request_that_something_broke_on_the_way_does_not_count_as_received():
    open_request = opened()

    def receive():
        open_request.is_broken = True
        return True

    assert not received_until_vote(receive, open_request, Counter())


def test_a_request_to_stop_the_program_is_not_swallowed():
    def receive():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        received_until_vote(receive, opened(), Counter())


def test_a_request_whose_id_cannot_be_read_is_voted_on():
    def explode(req):
        raise RuntimeError("odd request")

    group = Follower(False)
    request_id = request_id_of(object(), explode)
    assert not settle(request(), group, request_id=request_id)[0]
    assert len(group.sent) == 1
