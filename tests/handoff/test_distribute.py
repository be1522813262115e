"""Leaders hand on, followers get; nobody is left waiting."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.support.engine_groups import ThreadCoordinator, thread_world

from omnikv.core.receive_role import ReceiveLayout, ReceiveRole
from omnikv.errors import VerdictInDoubt
from omnikv.handoff.bounded_calls import BoundedCalls
from omnikv.handoff.distribute import HandingOn


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


def run(req, where, *, received=True, counters=None, prepare=lambda payload: payload, settle=None, within_s=20.0):
    return HandingOn(
        layout=where,
        request_id="r1",
        prepare=prepare,
        settle=settle or (lambda causes: not causes),
        calls=BoundedCalls(),
        deadline=time.monotonic() + within_s,
        counters=Counter() if counters is None else counters,
    ).run(req, received=received)


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


def test_when_the_first_follower_cannot_be_served_no_rank_gets_kv(caplog):
    group, counters = Group(refuses={1}), Counter()
    own = run(request("cfg_text", "cfg_img"), layout(ReceiveRole.LEADER, cfg=(3, 0, group)), counters=counters)
    assert own is None
    assert [call[1:] for call in group.calls if call[2] is None] == [(1, None), (2, None)]
    assert counters == {"cfg_scatter_failed": 1}
    assert "guidance rank 1" in caplog.text


def test_when_a_later_follower_cannot_be_served_the_leader_says_that_the_group_is_split():
    group = Group(refuses={2})
    with pytest.raises(VerdictInDoubt, match="could not send it to guidance rank 2"):
        run(request("cfg_text", "cfg_img"), layout(ReceiveRole.LEADER, cfg=(3, 0, group)))
    assert group.calls[-1] == ("send", 2, None)


def test_a_broadcast_that_cannot_be_packed_gives_every_rank_nothing():
    class Picky(Group):
        def broadcast_object(self, obj=None, src=0):
            super().broadcast_object(obj, src)
            if obj is not None:
                raise TypeError("cannot pickle")

    sp = Picky()
    assert run(request(), layout(ReceiveRole.LEADER, sp=(2, 0, sp))) is None
    assert [call[2] is None for call in sp.calls] == [False, True]


def test_a_follower_waits_for_a_dead_leader_no_longer_than_its_deadline():
    with pytest.raises(VerdictInDoubt, match="the deadline passed"):
        run(request(), layout(ReceiveRole.FOLLOWER, cfg=(2, 1, ThreadCoordinator.of(2)[1])), within_s=0.05)


def test_a_follower_that_loses_its_leader_releases_the_ranks_below_it():
    class Gone(Group):
        def recv_object(self, src):
            raise OSError("reset")

    sp = Group()
    with pytest.raises(VerdictInDoubt, match="reset"):
        run(request(), layout(ReceiveRole.FOLLOWER, cfg=(2, 1, Gone()), sp=(2, 0, sp)))
    assert sp.calls == [("broadcast", 0, None)]


def test_followers_are_served_even_when_a_request_cannot_be_split():
    class Broken:
        request_id = "r1"

        @property
        def sampling_params(self):
            raise RuntimeError("odd request")

    group = Group()
    assert run(Broken(), layout(ReceiveRole.LEADER, cfg=(3, 0, group))) is None
    assert group.calls == [("send", 1, None), ("send", 2, None)]


def test_d07_a_prefix_that_a_larger_guidance_group_cannot_share_goes_to_no_rank(caplog):
    counters, group = Counter(), Group()
    assert run(request(), layout(ReceiveRole.LEADER, cfg=(3, 0, group)), counters=counters) is None
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.args[0] for record in errors[:2]] == [1, 2]
    assert "guidance ranks [1, 2]" in errors[2].getMessage()
    assert counters == {"cfg_ranks_without_kv": 2}
    assert group.calls == [("send", 1, None), ("send", 2, None)]


def test_d07_a_branch_that_the_producer_left_out_is_named_and_the_others_go_on(caplog):
    counters, group = Counter(), Group()
    assert run(request("cfg_text"), layout(ReceiveRole.LEADER, cfg=(3, 0, group)), counters=counters)
    assert [record.args[0] for record in caplog.records if record.levelname == "ERROR"] == [2]
    assert counters == {"cfg_ranks_without_kv": 1}


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


def test_a_leader_whose_followers_have_no_group_keeps_what_it_has():
    assert run(request(), layout(ReceiveRole.LEADER, sp=(2, 0, None))) == run(
        request(), layout(ReceiveRole.LEADER, tp=False, world=Group())
    )


# Without tensor parallelism: the ranks that run the request, and no others


def test_x15_a_replica_that_is_not_the_whole_world_uses_its_own_groups():
    world, cfg, sp = Group(), Group(), Group()
    world.world_size = 8
    own = run(request("cfg_text"), layout(ReceiveRole.LEADER, tp=False, cfg=(2, 0, cfg), sp=(2, 0, sp), world=world))
    assert world.calls == []
    assert cfg.calls == [("broadcast", 0, own)]
    assert sp.calls == [("broadcast", 0, own)]


# Confirmed handing on, between threads


def hand_on_in(layouts, requests=None, **by_rank):
    """What each rank of a world of threads gets; a leader's request is received."""
    got, votes = {}, ThreadCoordinator.of(2)

    def leaders_agree(tp_rank):
        def settle(causes):
            mine, theirs = not causes, ThreadCoordinator.broadcast_object
            if tp_rank == 0:
                word = votes[0].recv_object(1) and mine
                return theirs(votes[0], word, 0)
            votes[1].send_object(mine, 0)
            return theirs(votes[1], None, 0)

        return settle

    def work(rank, where):
        more = {name: value[rank] for name, value in by_rank.items() if rank in value}
        settle = leaders_agree(where.tp_group.rank_in_group) if where.tp_size > 1 else None
        req = (requests or {}).get(rank) or request("cfg_text")
        got[rank] = run(req, where, received=where.is_leader, settle=settle, **more)

    threads = [threading.Thread(target=work, args=(rank, where)) for rank, where in enumerate(layouts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[rank] for rank in range(len(layouts))]


MIXES = [{"tp": 1, "cfg": 2}, {"tp": 2, "cfg": 2}, {"tp": 2, "sp": 2}, {"tp": 2, "cfg": 2, "sp": 2}, {"tp": 1, "sp": 3}]


def tensor_parallel_world(**sizes):
    # A single tensor rank behind a split producer counts as tensor parallel too.
    return [replace(where, tp_active=True, role=role_of(where)) for where in thread_world(**sizes)]


def role_of(where):
    return ReceiveRole.LEADER if where.cfg_rank == where.sp_rank == 0 else ReceiveRole.FOLLOWER


@pytest.mark.parametrize("sizes", MIXES)
def test_every_rank_of_every_mix_gets_its_part(sizes):
    layouts = tensor_parallel_world(**sizes)
    branches = [part and part.get("sp.cfg_active_branch") for part in hand_on_in(layouts)]
    assert branches == ["cfg_text" if where.cfg_rank else None for where in layouts]


@pytest.mark.parametrize("sizes", MIXES)
@pytest.mark.parametrize("broken", ["first", "last"])
def test_x14_a_rank_that_cannot_use_its_part_leaves_every_rank_of_the_mix_without(sizes, broken):
    layouts = tensor_parallel_world(**sizes)

    def explode(payload):
        raise RuntimeError("out of memory")

    rank = {"first": 0, "last": len(layouts) - 1}[broken]
    assert hand_on_in(layouts, prepare={rank: explode}) == [None] * len(layouts)


@pytest.mark.parametrize("sizes", [mix for mix in MIXES if mix.get("cfg")])
def test_x14_a_failed_scatter_to_one_follower_leaves_every_rank_of_the_mix_without(sizes):
    layouts = tensor_parallel_world(**sizes)
    group, send = layouts[0].cfg_group, layouts[0].cfg_group.send_object

    def refuse(obj, dst):
        if isinstance(obj, dict):
            raise OSError("cannot pickle")
        send(obj, dst)

    group.send_object = refuse
    assert hand_on_in(layouts) == [None] * len(layouts)


def test_followers_leave_the_tensor_group_alone():
    layouts = tensor_parallel_world(tp=2, cfg=2)
    hand_on_in(layouts)
    assert [where.tp_group.calls for where in layouts] == [[], [], [], []]
