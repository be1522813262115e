"""Leaders that receive for others: guidance ranks, sequence-parallel ranks, and a whole world."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

PARALLEL = "vllm_omni.diffusion.distributed.parallel_state"


class Group:
    def __init__(self, size, rank, gives=None):
        self.world_size, self.rank_in_group, self.gives, self.calls = size, rank, gives, []

    def send_object(self, obj, dst):
        self.calls.append(("send", dst, obj))

    def recv_object(self, src):
        self.calls.append(("recv", src))
        return self.gives

    def broadcast_object(self, obj=None, src=0):
        self.calls.append(("broadcast", src, obj))
        return self.gives if obj is None else obj


@pytest.fixture
def engine_groups():
    """Sets the groups of an engine's parallel state, as the engine's own tests do: by patching its getters."""
    with ExitStack() as patches:

        def use(*, world, cfg=None, sp=None, tp=None):
            for name, value in {
                "get_world_group": world,
                "get_cfg_group": cfg,
                "get_classifier_free_guidance_world_size": cfg.world_size if cfg else 1,
                "get_classifier_free_guidance_rank": cfg.rank_in_group if cfg else 0,
                "get_sp_group": sp,
                "get_sequence_parallel_world_size": sp.world_size if sp else 1,
                "get_sequence_parallel_rank": sp.rank_in_group if sp else 0,
            }.items():
                patches.enter_context(patch(f"{PARALLEL}.{name}", return_value=value))
            if tp is not None:
                patches.enter_context(patch("vllm.distributed.parallel_state.get_tp_group", return_value=tp))

        yield use


def shelve(connector, packed, *request_ids):
    for at, request_id in enumerate(request_ids):
        connector.kept["0", "1", f"{request_id}_0_0_0_0"] = packed([7 + at], request_id=request_id)


def collect(request_id, companion_ids, manager, device):
    found = {}
    for role, companion_id in companion_ids.items():
        data, _ = manager.receive_kv_cache_for_request(companion_id, device)
        found[f"{role}_past_key_values"] = data["layer_blocks"]
    return found


def test_a_guidance_leader_receives_once_and_sends_each_rank_its_branch(
    make_receiver, connector, packed, request_of, engine_groups
):
    cfg = Group(3, 0)
    engine_groups(world=Group(6, 0), cfg=cfg)
    shelve(connector, packed, "r1", "c1", "c2")
    req = request_of(cfg_kv_request_ids={"cfg_text": "c1", "cfg_img": "c2"})
    assert make_receiver(connector=connector, from_tp=2, to_tp=2).receive_multi_kv_cache_distributed(req, collect)
    (_, first, text), (_, second, image) = cfg.calls
    assert (first, second) == (1, 2)
    assert (text["sp.cfg_active_branch"], image["sp.cfg_active_branch"]) == ("cfg_text", "cfg_img")
    assert text["sp.cfg_text_past_key_values"]["key_cache"][0].unique().tolist() == [8]
    assert "sp.cfg_img_past_key_values" not in text
    assert "sp.cfg_kv_request_ids" not in text
    assert req.sampling_params.cfg_branch_roles == ["cfg_text", "cfg_img"]


def test_a_guidance_follower_applies_what_it_is_sent_and_fetches_nothing(
    make_receiver, connector, request_of, engine_groups
):
    sent = {"past_key_values": "main", "sp.past_key_values": "main", "sp.cfg_active_branch": "cfg_text"}
    cfg = Group(2, 1, gives=sent)
    engine_groups(world=Group(4, 1), cfg=cfg)
    req = request_of()
    assert make_receiver(connector=connector, from_tp=2, to_tp=2).receive_multi_kv_cache_distributed(req)
    assert (req.past_key_values, req.sampling_params.cfg_active_branch) == ("main", "cfg_text")
    assert (connector.asked, cfg.calls) == ([], [("recv", 0)])


def test_a_leader_that_got_nothing_releases_its_followers(make_receiver, connector, request_of, engine_groups):
    cfg, sp = Group(2, 0), Group(2, 0)
    engine_groups(world=Group(8, 0), cfg=cfg, sp=sp)
    receiver = make_receiver(connector=connector, from_tp=2, to_tp=2)
    assert receiver.receive_multi_kv_cache_distributed(request_of()) is False
    assert cfg.calls == [("send", 1, None)]
    assert sp.calls == [("broadcast", 0, None)]


def test_a_leader_whose_receive_raises_releases_its_followers_too(
    make_receiver, connector, request_of, engine_groups, monkeypatch
):
    def explode(*_):
        raise RuntimeError("trouble")

    sp = Group(2, 0)
    engine_groups(world=Group(4, 0), sp=sp)
    receiver = make_receiver(connector=connector, from_tp=2, to_tp=2)
    monkeypatch.setattr(receiver, "receive_multi_kv_cache", explode)
    assert receiver.receive_multi_kv_cache_distributed(request_of()) is False
    assert sp.calls == [("broadcast", 0, None)]


def test_a_sequence_group_shares_what_its_first_rank_received(
    make_receiver, connector, packed, request_of, engine_groups, heads_of
):
    shelve(connector, packed, "r1")
    leading, req = Group(2, 0), request_of()
    with ExitStack():
        engine_groups(world=Group(4, 0), sp=leading)
        assert make_receiver(connector=connector, from_tp=2, to_tp=2).receive_multi_kv_cache_distributed(req)
    ((_, _, payload),) = leading.calls
    following = Group(2, 1, gives=payload)
    engine_groups(world=Group(4, 1), sp=following)
    other = request_of()
    assert make_receiver(connector=connector, from_tp=2, to_tp=2).receive_multi_kv_cache_distributed(other)
    assert heads_of(other.past_key_values) == heads_of(req.past_key_values) == [7]


def test_the_head_of_a_sequence_group_passes_on_what_the_guidance_leader_sent(make_receiver, request_of, engine_groups):
    sent = {"past_key_values": "text"}
    cfg, sp = Group(2, 1, gives=sent), Group(2, 0)
    engine_groups(world=Group(8, 2), cfg=cfg, sp=sp)
    assert make_receiver(from_tp=2, to_tp=2).receive_multi_kv_cache_distributed(request_of())
    assert (cfg.calls, sp.calls) == ([("recv", 0)], [("broadcast", 0, sent)])


def test_without_tensor_parallelism_one_rank_receives_for_the_world(
    make_receiver, connector, packed, request_of, engine_groups
):
    world = Group(2, 0)
    engine_groups(world=world)
    connector.kept["0", "1", "omni_0_to_1_kv_cache_r1"] = packed([7])
    assert make_receiver(connector=connector).receive_multi_kv_cache_distributed(request_of())
    ((kind, src, payload),) = world.calls
    assert (kind, src) == ("broadcast", 0)
    assert set(payload) == {"past_key_values", "kv_metadata", "sp.past_key_values", "sp.kv_metadata"}


def test_pure_tensor_parallel_ranks_fetch_for_themselves_and_vote_in_their_own_group(
    make_receiver, connector, packed, request_of, engine_groups
):
    world, tp = Group(4, 3), Group(2, 1, gives=True)
    engine_groups(world=world, tp=tp)
    connector.kept["0", "1", "r1_0_0_1_1"] = packed([7])
    assert make_receiver(connector=connector, rank=1, from_tp=2, to_tp=2).receive_multi_kv_cache_distributed(
        request_of()
    )
    roles = ("kv_metadata", "past_key_values", "sp.kv_metadata", "sp.past_key_values")
    assert tp.calls == [("send", 0, (True, roles)), ("broadcast", 0, None)]
    assert world.calls == []


def test_receiving_is_called_by_position_so_that_engines_may_replace_it(
    make_receiver, request_of, engine_groups, monkeypatch
):
    engine_groups(world=Group(1, 0))
    receiver, calls, req = make_receiver(async_prefetch=True), [], request_of()
    monkeypatch.setattr(receiver, "receive_multi_kv_cache", lambda *args: calls.append(args) or True)
    device = torch.device("cpu")
    assert receiver.receive_multi_kv_cache_distributed(req, target_device=device)
    assert receiver.consume_and_distribute_kv_cache(req, target_device=device)
    assert calls == [(req, None, device)] * 2


def test_what_is_handed_on_is_applied_on_the_device_that_was_asked_for(make_receiver, request_of, engine_groups):
    sent = {"past_key_values": {"key_cache": [torch.ones(1)]}, "sp.cfg_active_branch": None}
    engine_groups(world=Group(4, 1), sp=Group(2, 1, gives=sent))
    req = request_of()
    receiver = make_receiver(from_tp=2, to_tp=2)
    assert receiver.receive_multi_kv_cache_distributed(req, target_device=torch.device("meta"))
    assert req.past_key_values["key_cache"][0].device.type == "meta"
    assert req.sampling_params.cfg_active_branch is None


@pytest.mark.parametrize(("cfg_size", "shared"), [(2, True), (3, False)])
def test_d07_unsplit_kv_is_shared_in_a_group_of_two_only(request_of, cfg_size, shared):
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager

    req = request_of(past_key_values="main")
    payloads = OmniKVTransferManager._build_cfg_rank_local_payloads(req, cfg_size=cfg_size)
    assert payloads[0] == {"sp.past_key_values": "main"}
    assert payloads[1:] == ([payloads[0]] if shared else [None, None])


def test_d07_the_ranks_that_would_run_without_kv_are_named_and_none_runs_with_it(
    make_receiver, connector, packed, request_of, engine_groups, caplog
):
    cfg, req = Group(3, 0), request_of()
    engine_groups(world=Group(6, 0), cfg=cfg)
    shelve(connector, packed, "r1")
    receiver = make_receiver(connector=connector, from_tp=2, to_tp=2)
    assert receiver.receive_multi_kv_cache_distributed(req) is False
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.args[0] for record in errors[:2]] == [1, 2]
    assert receiver.counters["cfg_ranks_without_kv"] == 2
    assert cfg.calls == [("send", 1, None), ("send", 2, None)]
    assert req.past_key_values is None
