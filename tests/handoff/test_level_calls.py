"""Payloads between the ranks of one group, packed into tensors or as objects, over real process groups."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.engine_groups import DIMENSIONS, GlooCoordinator, ObjectsOnly, layout_of, rank_groups

from omnikv.errors import OmniKVError
from omnikv.groups.parcels import ParcelKind
from omnikv.handoff import level_calls
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.distribute import HandingOn
from omnikv.handoff.level_calls import DOUBT, Given, PackedCalls, takes_packed

HERE = "tests.handoff.test_level_calls"


class Scheduler:
    """Something of a model's that nobody but pickle can carry."""

    def __init__(self):
        self.step = 3


def payload_of(number, **more):
    kv = SimpleNamespace(key_cache=[torch.full((2, 3), number)], value_cache=[None])
    return {"past_key_values": kv, "sp.past_key_values": kv, "kv_metadata": {"ropes": [number]}, **more}


def spelt(payload):
    if not isinstance(payload, dict):
        return payload
    odd = payload.get("sp.cfg_branch_roles")
    shown = odd.step if isinstance(odd, Scheduler) else odd
    return [float(payload["past_key_values"].key_cache[0][0, 0]), payload["kv_metadata"], shown]


def give_and_take(rank):
    group = GlooCoordinator(range(3))
    calls = PackedCalls(group, deadline=time.monotonic() + 20)
    given = [payload_of(1.0), payload_of(2.0, **{"sp.cfg_branch_roles": Scheduler()}), None, DOUBT]
    if rank == 0:
        for payload in given:
            calls.send(Given(payload), 1)
            calls.broadcast(Given(payload))
        return group.calls
    taken = []
    for _ in given:
        if rank == 1:
            taken.append(spelt(calls.receive().payload))
        taken.append(spelt(calls.receive_broadcast().payload))
    return taken


def test_every_kind_of_payload_arrives_and_only_the_odd_one_is_pickled(gangs, tmp_path):
    calls, first, second = gangs.run(f"{HERE}:give_and_take", 3, tmp_path)
    expected = [[1.0, {"ropes": [1.0]}, None], [2.0, {"ropes": [2.0]}, 3], None, DOUBT]
    assert second == expected
    assert first == [answer for answer in expected for _ in range(2)]
    assert calls == [["send", 1], ["broadcast", 0]]


def pass_on(rank):
    group = GlooCoordinator(range(2))
    calls = PackedCalls(group, deadline=time.monotonic() + 20)
    if rank == 0:
        calls.send(Given(payload_of(1.0)), 1)
        return None
    given = calls.receive()
    with patch.object(level_calls, "pack", side_effect=AssertionError("packed again")):
        parcel = level_calls.as_parcel(given)
    return [parcel.kind == ParcelKind.BUNDLE, parcel is given.parcel]


def test_what_came_packed_is_passed_on_as_it_came(gangs, tmp_path):
    assert gangs.run(f"{HERE}:pass_on", 2, tmp_path)[1] == [True, True]


def see_what_carries_tensors(rank):
    group = GlooCoordinator(range(2))
    return [takes_packed(group), takes_packed(ObjectsOnly(group)), takes_packed(object())]


def test_only_a_process_group_with_tensors_on_the_cpu_carries_them(gangs, tmp_path):
    assert gangs.run(f"{HERE}:see_what_carries_tensors", 2, tmp_path) == [[True, False, False]] * 2


def groups_of(rank, sizes):
    world = GlooCoordinator(range(dist.get_world_size()))
    views = {"world": world}
    for dimension in DIMENSIONS:
        for ranks in rank_groups(dimension, **sizes):
            group = GlooCoordinator(ranks)
            if rank in ranks:
                views[dimension] = group
    return SimpleNamespace(**views)


def hand_on(rank, sizes, fault=None):
    """What each rank gets, and how many objects it gave to peers; a fault hits the packing of one rank."""
    views = groups_of(rank, sizes)
    layout = layout_of(views, **sizes)
    branches = {"cfg_text_past_key_values": SimpleNamespace(key_cache=[torch.full((2, 3), 5.0)], value_cache=[None])}
    params = SimpleNamespace(past_key_values=payload_of(1.0)["past_key_values"], **branches)
    req = SimpleNamespace(
        request_id="r1", past_key_values=params.past_key_values, kv_metadata={}, sampling_params=params
    )

    def packed(value):
        if rank == fault:
            raise RuntimeError("out of memory")
        return real_pack(value)

    real_pack = level_calls.pack
    handing = HandingOn(
        layout=layout,
        request_id="r1",
        prepare=lambda payload: payload,
        settle=lambda causes: agreed(views.tp, not causes),
        calls=BoundedCalls(),
        deadline=time.monotonic() + 20,
        counters=Counter(),
        packs=takes_packed,
    )
    with patch.object(level_calls, "pack", packed):
        try:
            payload = handing.run(req, received=layout.is_leader)
        except OmniKVError as error:
            return [type(error).__name__, str(error)]
    return [payload and payload.get("sp.cfg_active_branch"), payload and sorted(payload)]


def agreed(group, mine):
    votes = [None] * group.world_size
    dist.all_gather_object(votes, mine, group=group.cpu_group)
    return all(votes)


def test_every_rank_gets_its_branch_alone_over_tensors(gangs, tmp_path):
    got = gangs.run(f"{HERE}:hand_on", 8, tmp_path, sizes={"tp": 2, "cfg": 2, "sp": 2})
    main = ["kv_metadata", "past_key_values", "sp.cfg_active_branch", "sp.cfg_branch_roles", "sp.past_key_values"]
    text = [*main, "sp.cfg_branch_past_key_values", "sp.cfg_text_past_key_values"]
    assert got == [[None, sorted(main)]] * 4 + [["cfg_text", sorted(text)]] * 4


@pytest.mark.parametrize("fault", [0, 1])
def test_a_part_that_cannot_be_packed_leaves_every_rank_without_and_none_waiting(gangs, tmp_path, fault):
    got = gangs.run(f"{HERE}:hand_on", 4, tmp_path, sizes={"tp": 2, "cfg": 2}, fault=fault)
    assert got == [[None, None]] * 4
