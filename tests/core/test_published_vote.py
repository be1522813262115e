"""The published dialect of the vote: signatures, their comparison, and whether there is a vote at all."""

from __future__ import annotations

import pytest

from omnikv.core.published_vote import (
    is_dummy_request_id,
    published_causes,
    published_signature,
    published_verdict,
    should_exchange,
)


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
    "fetches": True,
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
        {"fetches": False},
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


def test_rank_0_sees_which_rank_lacks_what():
    whole = (True, ("past_key_values", "sp.cfg_text_past_key_values"))
    assert published_causes([whole, whole]) == ()
    assert published_causes([whole, (True, ("past_key_values",)), None]) == (
        (1, "cfg_text", "no sp.cfg_text_past_key_values on its request"),
        (2, "", "its vote could not be read"),
    )
    assert published_causes([(False, ()), (True, ())]) == ((0, "primary", "not received"),)
