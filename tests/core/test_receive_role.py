"""Who fetches, who leads and who follows."""

from __future__ import annotations

import pytest

from omnikv.core.receive_role import Level, ReceiveLayout, ReceiveRole, choose_role

ALONE = {"cfg_size": 1, "cfg_rank": 0, "sp_size": 1, "sp_rank": 0, "world_rank": 0}


@pytest.mark.parametrize(
    ("place", "role"),
    [
        ({"tp_active": True, "world_size": 1}, ReceiveRole.LOCAL),
        ({"tp_active": True, "world_size": 2, "world_rank": 1}, ReceiveRole.LOCAL),
        ({"tp_active": True, "world_size": 4, "cfg_size": 2}, ReceiveRole.LEADER),
        ({"tp_active": True, "world_size": 4, "cfg_size": 2, "cfg_rank": 1}, ReceiveRole.FOLLOWER),
        ({"tp_active": True, "world_size": 4, "sp_size": 2, "sp_rank": 1}, ReceiveRole.FOLLOWER),
        ({"tp_active": True, "world_size": 4, "sp_size": 2, "world_rank": 2}, ReceiveRole.LEADER),
        ({"tp_active": False, "world_size": 2}, ReceiveRole.LEADER),
        ({"tp_active": False, "world_size": 2, "world_rank": 1}, ReceiveRole.FOLLOWER),
        # Not the whole world: a replica leads for itself (X15).
        ({"tp_active": False, "world_size": 4, "cfg_size": 2, "world_rank": 2}, ReceiveRole.LEADER),
        ({"tp_active": False, "world_size": 4, "cfg_size": 2, "cfg_rank": 1, "world_rank": 2}, ReceiveRole.FOLLOWER),
        ({"tp_active": False, "world_size": 4, "world_rank": 2, "replicas": 4}, ReceiveRole.LOCAL),
        # The whole world, although its guidance and sequence groups do not account for it: one replica in stages.
        ({"tp_active": False, "world_size": 4, "cfg_size": 2, "world_rank": 2, "replicas": 1}, ReceiveRole.FOLLOWER),
    ],
)
def test_the_role_follows_from_the_place(place, role):
    assert choose_role(**{**ALONE, **place}) is role


@pytest.mark.parametrize("role", list(ReceiveRole))
def test_a_layout_says_its_role_in_words(role):
    layout = ReceiveLayout(role, True, 2, 0, None, 1, 0, None, None)
    assert [layout.is_local, layout.is_leader, layout.is_follower].count(True) == 1
    assert layout.cfg_active
    assert not layout.sp_active
    assert (layout.tp_group, layout.tp_size) == (None, 1)


def layout(role, *, tp_active=True, cfg=(1, 0), sp=(1, 0), tp_group=None, world=None):
    return ReceiveLayout(role, tp_active, *cfg, "cfg", *sp, "sp", world, tp_group)


def test_kv_goes_down_the_guidance_group_and_then_the_sequence_groups():
    leader = layout(ReceiveRole.LEADER, cfg=(2, 0), sp=(3, 0))
    assert leader.levels() == (Level("cfg", 0, 2, True), Level("sp", 0, 3, False))
    assert layout(ReceiveRole.FOLLOWER, cfg=(2, 1), sp=(3, 0)).levels() == (
        Level("cfg", 1, 2, True),
        Level("sp", 0, 3, False),
    )
    assert layout(ReceiveRole.FOLLOWER, cfg=(2, 1), sp=(3, 2)).levels() == (Level("sp", 2, 3, False),)
    assert layout(ReceiveRole.LOCAL).levels() == ()


def test_without_tensor_parallelism_every_guidance_rank_gets_all_of_it():
    assert layout(ReceiveRole.LEADER, tp_active=False, cfg=(2, 0), world="world").levels()[0].splits is False


def test_handing_on_is_confirmed_where_leaders_have_a_group_of_their_own():
    assert layout(ReceiveRole.LEADER, cfg=(2, 0), tp_group="tp").confirms
    assert not layout(ReceiveRole.LEADER, cfg=(2, 0)).confirms
    assert not layout(ReceiveRole.LOCAL, tp_group="tp").confirms
    assert not layout(ReceiveRole.LEADER, tp_active=False, cfg=(2, 0), tp_group="tp").confirms
