"""Identities keep their fields apart; published keys are what released engines speak, the same on both sides."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.keys import (
    Edge,
    PayloadId,
    build_rank_aware_recv_keys,
    build_rank_aware_send_keys,
    get_kv_connector_key,
)
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError, TopologyError


def identity(transfer_id="req", *, edge=None, **fields):
    ranks = {"source_rank": 0, "target_rank": 0, **fields}
    return PayloadId(edge=edge or Edge(from_stage="0", to_stage="1"), transfer_id=transfer_id, **ranks)


def topo(source, target, rank=0):
    return KVTPTopology(source_tp_size=source, target_tp_size=target, local_rank=rank)


names = st.text(min_size=1, max_size=40).filter(lambda text: not any(0xD800 <= ord(c) <= 0xDFFF for c in text))
counts = st.integers(min_value=0, max_value=2**31)
identities = st.builds(
    PayloadId,
    edge=st.builds(Edge, from_stage=names, to_stage=names, namespace=names, replica=counts),
    transfer_id=names,
    role=names,
    attempt=counts,
    source_rank=counts,
    target_rank=counts,
)


@given(identities)
def test_an_identity_survives_its_encoding(payload):
    assert PayloadId.decode(payload.encode()) == payload


@given(identities, identities)
def test_equal_encodings_mean_equal_identities(one, other):
    assert (one.encode() == other.encode()) == (one == other)


@pytest.mark.parametrize("transfer_id", ["a/b", "a_1", "two words", "日本語/ключ", "x" * 300, "%2F", "..", "a\nb"])
def test_x08_every_spelling_of_an_id_is_an_identity(transfer_id):
    assert PayloadId.decode(identity(transfer_id).encode()).transfer_id == transfer_id


def test_x06_ids_and_stages_that_share_a_published_key_are_different_identities():
    assert get_kv_connector_key("a_1", "0", 0, 0, 0) == get_kv_connector_key("a", "1_0", 0, 0, 0)
    one = identity("a_1", edge=Edge(from_stage="0", to_stage="1"))
    other = identity("a", edge=Edge(from_stage="1_0", to_stage="1"))
    assert one.encode() != other.encode()


def test_x06_the_receiving_stage_is_part_of_an_identity():
    edges = [Edge(from_stage="0", to_stage=stage) for stage in ("1", "2")]
    assert len({identity(edge=edge).encode() for edge in edges}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transfer_id": ""}, "transfer_id must be a non-empty string"),
        ({"transfer_id": 7}, "transfer_id must be a non-empty string, got 7"),
        ({"transfer_id": "x" * 2000}, "2000 characters, at most 1024"),
        ({"transfer_id": "\ud800"}, "lone surrogate"),
        ({"role": ""}, "role must be a non-empty string"),
        ({"source_rank": -1}, "source_rank must be an integer of at least 0, got -1"),
        ({"target_rank": True}, "target_rank must be an integer"),
        ({"attempt": 1.5}, "attempt must be an integer"),
    ],
)
def test_a_field_that_is_none_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        identity(**fields)


@pytest.mark.parametrize("text", ["", "a/b", "d/0/1/x/req/primary/0/0/0", "d/0/1/0/req/primary/0/0/-1"])
def test_text_that_is_no_identity_is_refused(text):
    with pytest.raises(ConfigError):
        PayloadId.decode(text)


def test_d34_every_process_computes_the_same_keys():
    program = (
        "from omnikv.core.keys import *\n"
        "e = Edge(from_stage='s/0', to_stage='1', namespace='n s')\n"
        "p = PayloadId(edge=e, transfer_id='r_\u00e9', source_rank=1, target_rank=2)\n"
        "print(ascii(p.encode()), get_kv_connector_key('r', 's', 0, None, 2))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(5)
    }
    assert len(seen) == 1


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 2), (4, 2), (2, 4), (1, 2), (2, 1)])
def test_d04_every_key_that_is_sent_is_asked_for_once(source, target):
    sent = [
        key for rank in range(source) for key in build_rank_aware_send_keys("r", "0", "1", topo(source, target, rank))
    ]
    asked = [
        key
        for rank in range(target)
        for key, _ in build_rank_aware_recv_keys("r", "0", "1", topo(source, target, rank))
    ]
    assert sorted(sent) == sorted(asked)
    assert len(set(sent)) == len(sent)


def test_d13_plain_keys_of_a_hook_get_their_source_rank_back():
    pairs = build_rank_aware_recv_keys("r", "0", "1", topo(4, 2, 1), hook=lambda *_: ["left", "right"])
    assert pairs == [("left", 2), ("right", 3)]


def test_d13_a_hook_with_as_many_keys_as_no_topology_has_is_an_error():
    with pytest.raises(TopologyError, match=r"returned 3 plain keys, but rank 0 of 2 reads from 2 source ranks"):
        build_rank_aware_recv_keys("r", "0", "1", topo(4, 2), hook=lambda *_: ["a", "b", "c"])


def test_d13_a_hook_that_mixes_plain_keys_and_pairs_is_an_error():
    with pytest.raises(TopologyError, match="all plain keys or all"):
        build_rank_aware_recv_keys("r", "0", "1", topo(4, 2), hook=lambda *_: ["a", ("b", 1)])


def test_a_hooks_pairs_are_taken_as_they_are():
    pairs = [("k", 3)]
    assert build_rank_aware_recv_keys("r", "0", "1", topo(4, 2), hook=lambda *_: pairs) == pairs


def test_a_hooks_single_key_without_tensor_parallelism_names_no_rank():
    assert build_rank_aware_recv_keys("r", "0", "1", topo(1, 1), hook=lambda *_: ["k"]) == [("k", None)]


@pytest.mark.parametrize("nothing", [None, [], (), ""])
def test_a_hook_that_returns_nothing_leaves_the_published_keys(nothing):
    assert build_rank_aware_send_keys("r", "0", "1", topo(2, 2, 1), hook=lambda *_: nothing) == ["r_0_0_1_1"]
    assert build_rank_aware_recv_keys("r", "0", "1", topo(2, 2, 1), hook=lambda *_: nothing) == [("r_0_0_1_1", 1)]


def test_a_send_hooks_keys_win():
    assert build_rank_aware_send_keys("r", "0", "1", topo(2, 2), hook=lambda *a: ["-".join(a)]) == ["r-0-1"]


def test_d13_one_key_by_itself_is_a_key_and_not_its_letters():
    alone = KVTPTopology(1, 1, 0)
    assert build_rank_aware_send_keys("r", "0", "1", alone, hook=lambda *_: "abc") == ["abc"]
    assert build_rank_aware_recv_keys("r", "0", "1", alone, hook=lambda *_: "abc") == [("abc", None)]


@pytest.mark.parametrize("wrong", [None, 7, "", b"k", ("k", 0)])
def test_d34_what_is_no_key_is_not_put_under_its_text(wrong):
    with pytest.raises(ConfigError, match="send key hook"):
        build_rank_aware_send_keys("r", "0", "1", KVTPTopology(1, 1, 0), hook=lambda *_: ["k", wrong])


@pytest.mark.parametrize("wrong", [(None, 0), ("", 0), ("k", 0, 1), ("k",), (7, 0)])
def test_d13_what_is_no_pair_of_key_and_rank_is_refused(wrong):
    with pytest.raises(ConfigError, match="receive key hook"):
        build_rank_aware_recv_keys("r", "0", "1", KVTPTopology(2, 1, 0), hook=lambda *_: [("a", 1), wrong])


@pytest.mark.parametrize("rank", [2, -1, "1", 1.0, True])
def test_d13_a_hook_that_names_a_rank_the_sender_has_not_is_an_error(rank):
    with pytest.raises(TopologyError, match="the sender's ranks are 0 to 1"):
        build_rank_aware_recv_keys("r", "0", "1", KVTPTopology(2, 1, 0), hook=lambda *_: [("a", 0), ("b", rank)])
