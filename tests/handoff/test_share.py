"""Ranks that share KV, as real processes: one reads, each gets its branch, and all go the same way."""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from omnikv import KVSender, LayerKV, Route
from omnikv.config import HandoffConfig
from omnikv.errors import ConfigError, OmniKVError, RemoteProtocolError, TopologyError, VerdictInDoubt
from omnikv.groups import from_device_mesh
from omnikv.handoff import share
from omnikv.handoff.share import SharedReceiver
from omnikv.handoff.shared_part import unpack_part
from omnikv.tensors.bundle import pack

HERE = "tests.handoff.test_share"
ROLES = ("primary", "cfg_text", "cfg_img")
NAMES = ("dp", "cfg", "sp", "tp")
WAIT_S = 20.0


def route_of(namespace, tp=1):
    return Route.tp("ar", "dit", num_kv_heads=2, from_tp=1, to_tp=tp, namespace=namespace)


def cache_of(role, tokens=5):
    """A cache whose every value says which role and head it is."""
    number = ROLES.index(role) * 10.0
    heads = torch.stack([torch.full((tokens, 8), number), torch.full((tokens, 8), number + 1)], dim=1)
    return [LayerKV(heads, heads + 0.5), LayerKV(heads + 100, heads + 100.5)]


def send(sender, request_id, roles=ROLES):
    for at, role in enumerate(roles):
        sender.send(request_id, cache_of(role, tokens=5 + at), role=role, metadata={"ropes": [5 + at]})


@contextmanager
def receiving(shape, namespace, roles=ROLES, vote_timeout_s=5.0):
    groups = from_device_mesh(init_device_mesh("cpu", tuple(shape), mesh_dim_names=NAMES))
    config = HandoffConfig(transport="shm", slice_s=0.2, vote_timeout_s=vote_timeout_s)
    deadline = time.monotonic() + WAIT_S
    route = route_of(namespace, groups.sizes["tp"])
    with SharedReceiver(route, groups, roles=roles, config=config, deadline=deadline) as receiver:
        yield groups, receiver


def said_of(receive):
    """What a receive came to, as JSON."""
    try:
        outcome = receive()
    except OmniKVError as error:
        return {"verdict": type(error).__name__, "causes": [str(error)], "roles": {}}
    roles = {
        role: [kv.num_tokens, kv.metadata["ropes"], [float(layer.key[0, 0, 0]) for layer in kv.layers], kv.request_id]
        for role, kv in outcome.roles.items()
    }
    outcome.close()
    return {"verdict": outcome.verdict, "causes": [words for _, _, words in outcome.causes], "roles": roles}


def receive_in_turn(rank, channel, shape, namespace, requests, roles=ROLES):
    """Every request of `requests` by this rank; a name maps to the rank that fails in it and where, or to None."""
    said = []
    with receiving(shape, namespace, roles) as (_, receiver):
        for request_id, fault in requests:
            channel.tell(f"waiting {len(said)}")
            with broken_at(rank, fault):
                said.append(said_of(partial(receiver.receive_together, request_id, timeout_s=WAIT_S)))
        said.append([receiver.traffic.fetched_nbytes, receiver.traffic.taken_nbytes, receiver.traffic.given_nbytes])
    return said


@contextmanager
def broken_at(rank, fault):
    if fault is None or fault[0] != rank:
        yield
        return
    where = fault[1]

    def explode(*_):
        raise RuntimeError(f"{where} ran out of memory")

    with patch.object(share, where, explode):
        yield


@pytest.fixture
def namespace():
    return f"share-{uuid.uuid4().hex[:12]}"


def test_each_rank_gets_its_branch_alone_and_sequence_ranks_get_the_same(gangs, tmp_path, namespace):
    with KVSender(route_of(namespace), 0) as sender:
        send(sender, "r1")
        said = gangs.run(
            f"{HERE}:receive_in_turn", 6, tmp_path, shape=[1, 3, 2, 1], namespace=namespace, requests=[["r1", None]]
        )
        assert sender.drain(timeout_s=WAIT_S) == 0
    assert [answer["verdict"] for answer, _ in said] == ["keep"] * 6
    for at, role in enumerate(ROLES):
        for answer, _ in said[2 * at : 2 * at + 2]:
            assert answer["roles"] == {role: [5 + at, [5 + at], [10.0 * at, 10.0 * at + 100], "r1"]}
    # One rank fetched; every other took one bundle of its own branch, and gave on what it was to give.
    fetched, taken, given = zip(*(traffic for _, traffic in said), strict=True)
    assert [number > 0 for number in fetched] == [True] + [False] * 5
    assert taken[0] == 0
    assert sum(given) == sum(taken)
    assert taken[2:4] == (taken[2], taken[2])
    assert max(taken) < fetched[0] / 2


def test_one_rank_that_runs_every_branch_gets_them_all(gangs, tmp_path, namespace):
    with KVSender(route_of(namespace), 0) as sender:
        send(sender, "r1")
        said = gangs.run(
            f"{HERE}:receive_in_turn", 2, tmp_path, shape=[1, 1, 2, 1], namespace=namespace, requests=[["r1", None]]
        )
    assert [sorted(answer["roles"]) for answer, _ in said] == [sorted(ROLES)] * 2


def test_d07_the_follower_of_two_gets_a_cache_that_was_not_split(gangs, tmp_path, namespace):
    with KVSender(route_of(namespace), 0) as sender:
        send(sender, "r1", ROLES[:1])
        said = gangs.run(
            f"{HERE}:receive_in_turn",
            2,
            tmp_path,
            shape=[1, 2, 1, 1],
            namespace=namespace,
            requests=[["r1", None]],
            roles=ROLES[:1],
        )
    assert said[0][0] == said[1][0]
    assert said[1][0]["roles"] == {"primary": [5, [5], [0.0, 100.0], "r1"]}


@pytest.mark.parametrize("fault", [[0, "pack_part"], [1, "unpack_part"], [3, "unpack_part"]])
def test_when_one_part_cannot_be_handed_on_no_rank_uses_any_and_a_retry_finds_all(gangs, tmp_path, namespace, fault):
    requests = [["r1", fault], ["r1", None]]
    with KVSender(route_of(namespace), 0) as sender:
        send(sender, "r1", ROLES[:2])
        said = gangs.run(
            f"{HERE}:receive_in_turn",
            4,
            tmp_path,
            shape=[1, 2, 2, 1],
            namespace=namespace,
            requests=requests,
            roles=ROLES[:2],
        )
        assert sender.drain(timeout_s=WAIT_S) == 0
    assert [(first["verdict"], first["roles"]) for first, _, _ in said] == [("drop", {})] * 4
    assert all(f"{fault[1]} ran out of memory" in " ".join(first["causes"]) for first, _, _ in said)
    assert [second["verdict"] for _, second, _ in said] == ["keep"] * 4


def test_d10_what_a_sender_failed_is_dropped_everywhere_with_its_words(gangs, tmp_path, namespace):
    with KVSender(route_of(namespace, tp=2), 0) as sender:
        sender.fail("r1", "the prompt was too long")
        send(sender, "r2", ROLES[:2])
        said = gangs.run(
            f"{HERE}:receive_in_turn",
            4,
            tmp_path,
            shape=[1, 2, 1, 2],
            namespace=namespace,
            requests=[["r1", None], ["r2", None]],
            roles=ROLES[:2],
        )
    assert [first["verdict"] for first, _, _ in said] == ["drop"] * 4
    assert all("the prompt was too long" in first["causes"][0] for first, _, _ in said)
    assert [second["verdict"] for _, second, _ in said] == ["keep"] * 4


@pytest.mark.parametrize(("victim", "ending"), [(0, "VerdictInDoubt"), (1, "drop"), (2, "drop")])
def test_a_killed_rank_leaves_no_other_waiting_or_with_kv(gangs, tmp_path, namespace, victim, ending):
    with (
        KVSender(route_of(namespace), 0) as sender,
        gangs.started(
            f"{HERE}:receive_in_turn", 3, tmp_path, shape=[1, 3, 1, 1], namespace=namespace, requests=[["r1", None]]
        ) as gang,
    ):
        gang.wait_for("waiting 0")
        gang.ranks[victim].kill()
        started = time.monotonic()
        send(sender, "r1")
        said = gang.results([rank for rank in range(3) if rank != victim])
        # By the end of its connections, not by a deadline.
        assert time.monotonic() - started < WAIT_S
        assert [(answer["verdict"], answer["roles"]) for answer, _ in said] == [(ending, {})] * 2


def test_two_replicas_receive_different_requests_and_one_that_waits_holds_up_no_other(gangs, tmp_path, namespace):
    with gangs.started(f"{HERE}:receive_as_replica", 4, tmp_path, shape=[2, 2, 1, 1], namespace=namespace) as gang:
        with KVSender(route_of(f"{namespace}-0"), 0) as first:
            send(first, "r0", ROLES[:2])
            assert gang.results([0, 1]) == ["keep"] * 2
        with KVSender(route_of(f"{namespace}-1"), 0) as second:
            send(second, "r1", ROLES[:2])
            assert gang.results([2, 3]) == ["keep"] * 2


def receive_as_replica(rank, shape, namespace):
    replica = rank // 2
    with receiving(shape, f"{namespace}-{replica}", ROLES[:2]) as (_, receiver):
        outcome = receiver.receive_together(f"r{replica}", timeout_s=WAIT_S)
        outcome.close()
        return outcome.verdict


def be_refused(rank, namespace):
    groups = from_device_mesh(init_device_mesh("cpu", (1, 2, 1, 1), mesh_dim_names=NAMES))
    said = []
    # What every rank can see is refused before any of them waits for another.
    for roles, tp in ((ROLES, 1), (ROLES[:2], 2)):
        with pytest.raises(TopologyError) as caught:
            SharedReceiver(route_of(namespace, tp), groups, roles=roles, deadline=time.monotonic() + WAIT_S)
        said.append(str(caught.value))
    other_roles = (ROLES[:2], (ROLES[0], ROLES[2]))[rank]
    with pytest.raises(ConfigError) as caught:
        SharedReceiver(route_of(namespace), groups, roles=other_roles, deadline=time.monotonic() + WAIT_S)
    said.append(str(caught.value))
    deadline = time.monotonic() + WAIT_S
    with SharedReceiver(route_of(namespace), groups, roles=ROLES[:2], deadline=deadline) as receiver:
        for request_id, attempt in (("", 0), ("r1", -1)):
            with pytest.raises(ConfigError):
                receiver.receive_together(request_id, timeout_s=WAIT_S, attempt=attempt)
        said.append(receiver.discard("r1"))
        # As a call that failed leaves it.
        receiver._cfg_post._failures["rank 1"] = "lost rank 1"
        with pytest.raises(VerdictInDoubt, match=r"failed before .* tear them down"):
            receiver.receive_together("r1", timeout_s=WAIT_S)
    return said


def test_what_does_not_go_together_or_failed_before_is_refused_on_every_rank(gangs, tmp_path, namespace):
    for unused, places, facts, discarded in gangs.run(f"{HERE}:be_refused", 2, tmp_path, namespace=namespace):
        assert "nobody in a guidance group of 2 would use cfg_img" in unused
        assert "the route has 2 target ranks and the mesh 1 tensor-parallel places" in places
        assert "roles" in facts
        assert discarded == 0


def test_a_bundle_that_is_no_part_of_a_request_is_refused():
    with pytest.raises(RemoteProtocolError, match="no part of a request"):
        unpack_part("r1", pack({"roles": {"primary": {}}, "rounds": 1}), 0.0)


def test_a_stopped_follower_is_waited_for_until_the_deadline_alone(gangs, tmp_path, namespace):
    with (
        KVSender(route_of(namespace), 0) as sender,
        gangs.started(f"{HERE}:receive_impatiently", 3, tmp_path, shape=[1, 3, 1, 1], namespace=namespace) as gang,
    ):
        gang.wait_for("waiting")
        os.kill(gang.ranks[2].pid, signal.SIGSTOP)
        send(sender, "r1")
        assert gang.results([0, 1]) == ["drop", "drop"]


def receive_impatiently(rank, channel, shape, namespace):
    with receiving(shape, namespace, vote_timeout_s=0.3) as (_, receiver):
        channel.tell("waiting")
        return said_of(partial(receiver.receive_together, "r1", timeout_s=1.0))["verdict"]
