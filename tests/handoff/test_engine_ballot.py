"""A rank's ballot on an engine's request: it can be sent, whatever text the engine brings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from omnikv.core.messages import decode_vote, encode_vote, read_facts
from omnikv.handoff.engine_ballot import ballot_of, failed_ballot, vote_key

# How a file name that is not UTF-8 reaches the text of an error.
NO_UTF_8 = "no file /tmp/\udcff"


def request(companions, **metadata):
    kv = {"key_cache": [torch.zeros(2, 1, 4)], "value_cache": [torch.zeros(2, 1, 4)]}
    params = SimpleNamespace(past_key_values=kv, cfg_kv_request_ids=companions)
    return SimpleNamespace(past_key_values=kv, kv_metadata=metadata, sampling_params=params)


def vote_of(req, failures):
    ballot = ballot_of(
        req,
        received=True,
        request_id="r1",
        required=(),
        failures=failures,
        waiting=frozenset(),
        round_number=0,
        can_refetch=False,
    )
    assert decode_vote(encode_vote("r1", "", ballot)).ballot == ballot
    return {entry.role: entry for entry in ballot.roles}


def test_d01_a_cause_without_a_utf_8_form_is_voted_on():
    entries = vote_of(request({"cfg_text": "c1"}), {"c1": NO_UTF_8})
    assert entries["cfg_text"].cause == "no file /tmp/\\udcff"
    ballot = failed_ballot("primary", NO_UTF_8)
    assert decode_vote(encode_vote("r1", "", ballot)).ballot == ballot


def test_roles_and_attempts_without_a_utf_8_form_are_voted_on():
    entries = vote_of(request({"cfg_\udcff": "c1", "": "c2", "x" * 5000: "c3"}, attempt="\udcff"), {})
    assert {role[:8] for role in entries} == {"cfg_\\udc", "unnamed", "xxxxxxxx", "primary"}
    assert read_facts(entries["primary"].facts)["attempt"] == "\\udcff"


@pytest.mark.parametrize("request_id", ["r1", "\udcff", "a" * 5000, None])
def test_x08_a_vote_on_any_id_can_be_sent(request_id):
    for what in ("", "handing on"):
        key = vote_key(request_id, what)
        assert decode_vote(encode_vote(key, "", failed_ballot("primary", "x"))).key == key


def test_long_ids_that_begin_alike_are_not_one_vote():
    keys = {vote_key("a" * length, what) for length in (511, 512, 513, 5000, 5001) for what in ("", "handing on")}
    assert len(keys) == 10
