"""Who fetches, who leads and who follows."""

from __future__ import annotations

import pytest

from omnikv.core.receive_role import ReceiveLayout, ReceiveRole, choose_role

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
