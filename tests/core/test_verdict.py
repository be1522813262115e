"""Ballots in, one verdict out: the same on every rank, with the reasons in words."""

from __future__ import annotations

import pytest

from omnikv.core.verdict import (
    MAX_BALLOT_NBYTES,
    Ballot,
    decide,
    is_dummy_request_id,
    published_signature,
    published_verdict,
    should_exchange,
)
from omnikv.errors import LocalProtocolError, RemoteProtocolError

YES = Ballot(have=True, facts=(("tokens", "3"),))


def test_all_ranks_with_the_same_facts_keep():
    verdict = decide([YES, Ballot(have=True, facts=(("tokens", "3"),))])
    assert verdict.keep
    assert verdict.causes == {}


def test_one_rank_without_kv_drops_it_everywhere_and_says_why():
    verdict = decide([YES, Ballot(have=False, cause="the deadline passed")])
    assert not verdict.keep
    assert verdict.causes == {1: "rank 1: the deadline passed"}


def test_every_rank_without_kv_is_a_drop_that_names_them_all():
    verdict = decide([Ballot(have=False, cause="a"), Ballot(have=False, cause="b")])
    assert not verdict.keep
    assert sorted(verdict.causes) == [0, 1]


def test_x12_ranks_that_hold_different_tokens_do_not_agree():
    verdict = decide([YES, Ballot(have=True, facts=(("tokens", "99"),))])
    assert not verdict.keep
    assert verdict.causes[1] == "rank 1: tokens is 99 on rank 1 and 3 on rank 0"


def test_a_fact_that_only_one_rank_states_is_a_difference():
    verdict = decide([YES, Ballot(have=True, facts=(("tokens", "3"), ("roles", "cfg_text")))])
    assert verdict.causes == {1: "rank 1: roles is cfg_text on rank 1 and not stated on rank 0"}


def test_facts_are_compared_whatever_their_order():
    assert decide(
        [Ballot(have=True, facts=(("a", "1"), ("b", "2"))), Ballot(have=True, facts=(("b", "2"), ("a", "1")))]
    ).keep


def test_a_fact_stated_twice_still_gives_a_reason():
    twice = Ballot(have=True, facts=(("tokens", "3"), ("tokens", "3")))
    assert decide([YES, twice]).causes == {1: "rank 1: it states a fact twice"}


def test_differences_are_measured_against_the_first_rank_that_has_kv():
    verdict = decide([Ballot(have=False, cause="gone"), YES, Ballot(have=True, facts=(("tokens", "4"),))])
    assert verdict.causes == {0: "rank 0: gone", 2: "rank 2: tokens is 4 on rank 2 and 3 on rank 1"}


def test_a_single_rank_decides_for_itself():
    assert decide([YES]).keep


def test_no_ballots_are_a_misuse():
    with pytest.raises(LocalProtocolError, match="at least one ballot"):
        decide([])


@pytest.mark.parametrize(
    "ballot",
    [
        YES,
        Ballot(have=False, cause="no shard of source rank 1 for “r/ä” within 0.3 s"),
        Ballot(have=True),
        Ballot(have=False, facts=(("x", ""), ("y", "z"))),
    ],
)
def test_a_ballot_survives_its_encoding(ballot):
    assert Ballot.decode(ballot.encode()) == ballot


def test_a_yes_with_a_cause_is_a_misuse():
    with pytest.raises(LocalProtocolError, match="no cause"):
        Ballot(have=True, cause="but")


def test_a_no_without_a_cause_gets_one():
    assert Ballot(have=False).cause == "no cause given"


def test_a_long_cause_is_cut_rather_than_losing_the_vote():
    assert Ballot.decode(Ballot(have=False, cause="x" * 10**6).encode()).cause == "x" * 2000


def test_facts_too_long_to_send_are_a_misuse():
    with pytest.raises(LocalProtocolError, match="fewer or shorter facts"):
        Ballot(have=True, facts=(("x", "y" * MAX_BALLOT_NBYTES),)).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"have":true}',
        b'{"have":1,"cause":null,"facts":[]}',
        b'{"have":true,"cause":"x","facts":[]}',
        b'{"have":false,"cause":null,"facts":[]}',
        b'{"have":false,"cause":7,"facts":[]}',
        b'{"have":true,"cause":null,"facts":{}}',
        b'{"have":true,"cause":null,"facts":[["a"]]}',
        b'{"have":true,"cause":null,"facts":[["a",1]]}',
        b'{"have":true,"cause":null,"facts":[],"more":1}',
        b"[" * 60000,
        b" " * (MAX_BALLOT_NBYTES + 1),
    ],
)
def test_bytes_that_are_no_ballot_are_refused(data):
    with pytest.raises(RemoteProtocolError, match="ballot"):
        Ballot.decode(data)


def test_the_published_verdict_wants_the_same_state_everywhere():
    one = published_signature(True, ["kv_metadata", "past_key_values"])
    assert one == (True, ("kv_metadata", "past_key_values"))
    assert published_verdict([one, one])
    assert not published_verdict([one, published_signature(False, [])])
    assert not published_verdict([one, published_signature(True, ["past_key_values"])])
    assert not published_verdict([one, None])


def test_the_published_verdict_keeps_what_is_absent_on_every_rank():
    assert published_verdict([published_signature(False, []), published_signature(False, [])])


def test_a_group_that_turns_tuples_into_lists_does_not_change_the_verdict():
    assert published_verdict([(True, ("a", "b")), [True, ["a", "b"]]])


ENTER = {
    "is_local": True,
    "tp_active": True,
    "has_group": True,
    "tp_size": 2,
    "need_recv_cache": True,
    "request_id": "r1",
}


def test_pure_tensor_parallel_ranks_vote():
    assert should_exchange(**ENTER)


@pytest.mark.parametrize(
    "changed",
    [
        {"is_local": False},
        {"tp_active": False},
        {"has_group": False},
        {"tp_size": 1},
        {"need_recv_cache": False},
        {"request_id": None},
        {"request_id": "dummy_req_id"},
        {"request_id": "dummy_req_id/3"},
    ],
)
def test_each_shared_fact_alone_keeps_the_whole_group_out_of_the_vote(changed):
    assert not should_exchange(**{**ENTER, **changed})


def test_only_the_engines_own_warm_up_ids_are_dummies():
    assert is_dummy_request_id("dummy_req_id")
    assert is_dummy_request_id("dummy_req_id/0")
    assert not is_dummy_request_id("dummy_req_id_7")
    assert not is_dummy_request_id("r1")
    assert not is_dummy_request_id(None)
