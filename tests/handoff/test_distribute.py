"""Leaders hand on, followers get; nobody is left waiting."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from omnikv.core.receive_role import ReceiveLayout, ReceiveRole
from omnikv.handoff.distribute import hand_on


class Group:
    def __init__(self, gives=None, refuses=()):
        self.gives, self.refuses, self.calls = gives, set(refuses), []

    def send_object(self, obj, dst):
        self.calls.append(("send", dst, obj))
        if dst in self.refuses and obj is not None:
            raise OSError("cannot pickle")

    def recv_object(self, src):
        self.calls.append(("recv", src))
        return self.gives

    def broadcast_object(self, obj=None, src=0):
        self.calls.append(("broadcast", src, obj))
        return self.gives if obj is None else obj


def layout(role, *, tp=True, cfg=None, sp=None, world=None):
    cfg_size, cfg_rank, cfg_group = cfg or (1, 0, None)
    sp_size, sp_rank, sp_group = sp or (1, 0, None)
    return ReceiveLayout(role, tp, cfg_size, cfg_rank, cfg_group, sp_size, sp_rank, sp_group, world)


def request(*branches):
    params = SimpleNamespace(past_key_values="main", **{f"{name}_past_key_values": name for name in branches})
    return SimpleNamespace(request_id="r1", past_key_values="main", sampling_params=params)


def run(req, where, *, received=True, counters=None):
    return hand_on(req, where, received=received, request_id="r1", counters=Counter() if counters is None else counters)


def test_a_local_rank_touches_no_group():
    world = Group()
    assert run(request(), layout(ReceiveRole.LOCAL, world=world)) is None
    assert world.calls == []


def test_a_leader_sends_each_guidance_rank_its_own_branch():
    group = Group()
    own = run(request("cfg_text", "cfg_img"), layout(ReceiveRole.LEADER, cfg=(3, 0, group)))
    assert [(call[0], call[1], call[2]["sp.cfg_active_branch"]) for call in group.calls] == [
        ("send", 1, "cfg_text"),
        ("send", 2, "cfg_img"),
    ]
    assert own["sp.cfg_active_branch"] is None


def test_a_leader_without_kv_tells_every_follower_so():
    cfg, sp = Group(), Group()
    assert run(request(), layout(ReceiveRole.LEADER, cfg=(2, 0, cfg), sp=(2, 0, sp)), received=False) is None
    assert cfg.calls == [("send", 1, None)]
    assert sp.calls == [("broadcast", 0, None)]


def test_a_follower_that_cannot_be_served_is_told_that_there_is_nothing(caplog):
    group, counters = Group(refuses={1}), Counter()
    run(request("cfg_text", "cfg_img"), layout(ReceiveRole.LEADER, cfg=(3, 0, group)), counters=counters)
    assert [call[1:] for call in group.calls if call[2] is None] == [(1, None)]
    assert group.calls[-1][1] == 2
    assert counters == {"cfg_scatter_failed": 1}
    assert "guidance rank 1" in caplog.text


def test_followers_are_served_even_when_a_request_cannot_be_split():
    class Broken:
        request_id = "r1"

        @property
        def sampling_params(self):
            raise RuntimeError("odd request")

    group = Group()
    assert run(Broken(), layout(ReceiveRole.LEADER, cfg=(3, 0, group))) is None
    assert group.calls == [("send", 1, None), ("send", 2, None)]


def test_d07_a_rank_of_a_larger_guidance_group_without_kv_is_named(caplog):
    counters = Counter()
    run(request(), layout(ReceiveRole.LEADER, cfg=(3, 0, Group())), counters=counters)
    assert [record.args[0] for record in caplog.records if record.levelname == "ERROR"] == [1, 2]
    assert counters == {"cfg_ranks_without_kv": 2}


def test_d07_a_group_of_two_shares_the_main_kv_without_complaint(caplog):
    group = Group()
    run(request(), layout(ReceiveRole.LEADER, cfg=(2, 0, group)))
    assert group.calls[0][2]["past_key_values"] == "main"
    assert caplog.records == []


def test_the_first_rank_of_a_sequence_group_takes_from_the_guidance_leader_and_passes_it_on():
    cfg, sp = Group(gives={"past_key_values": "text"}), Group()
    got = run(request(), layout(ReceiveRole.FOLLOWER, cfg=(2, 1, cfg), sp=(2, 0, sp)))
    assert got == {"past_key_values": "text"}
    assert cfg.calls == [("recv", 0)]
    assert sp.calls == [("broadcast", 0, {"past_key_values": "text"})]


def test_the_other_ranks_of_a_sequence_group_take_the_broadcast_alone():
    cfg, sp = Group(), Group(gives={"past_key_values": "main"})
    got = run(request(), layout(ReceiveRole.FOLLOWER, cfg=(2, 0, cfg), sp=(2, 1, sp)))
    assert got == {"past_key_values": "main"}
    assert cfg.calls == []
    assert sp.calls == [("broadcast", 0, None)]


def test_without_tensor_parallelism_one_leader_serves_the_world():
    world = Group()
    own = run(request("cfg_text"), layout(ReceiveRole.LEADER, tp=False, world=world))
    assert own["sp.cfg_text_past_key_values"] == "cfg_text"
    assert world.calls == [("broadcast", 0, own)]
    follower = Group(gives=own)
    assert run(request(), layout(ReceiveRole.FOLLOWER, tp=False, world=follower)) == own


@pytest.mark.parametrize("received", [True, False])
def test_a_leader_of_a_sequence_group_alone_broadcasts_all_or_none(received):
    sp = Group()
    own = run(request("cfg_text"), layout(ReceiveRole.LEADER, sp=(2, 0, sp)), received=received)
    assert (own is not None) is received
    assert sp.calls == [("broadcast", 0, own)]


def test_views_are_sent_as_copies_and_the_leader_keeps_its_own():
    whole = torch.arange(1000)
    req = request()
    req.past_key_values = SimpleNamespace(key_cache=[whole[:2]])
    group = Group()
    own = run(req, layout(ReceiveRole.LEADER, cfg=(2, 0, group)))
    sent = group.calls[0][2]["past_key_values"].key_cache[0]
    assert sent.tolist() == [0, 1]
    assert sent.untyped_storage().nbytes() == sent.nbytes
    assert own["past_key_values"] is req.past_key_values
