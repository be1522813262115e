"""Requests as two families of models make them, and how a stage of real ranks receives each.

Bagel's language stage prefills companions under ids of their own, which the request names by role; a function of the
model's fetches them from the manager. HunyuanImage's keeps one cache for all branches, so there are no companions, and
its stage fetches the next request in the background. Both say in the metadata where the latents stand (`ropes`).
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from tests.support.engine_groups import DIMENSIONS, GlooCoordinator, rank_groups

from omnikv.integrations.vllm_omni import diffusion_parallel_state, vllm_parallel_state
from omnikv.integrations.vllm_omni.manager import OmniKVTransferManager
from omnikv.integrations.vllm_omni.request import OmniDiffusionRequest

BAGEL_ROLES = ("cfg_text", "cfg_img")


def bagel_metadata(num_tokens):
    """Where a Bagel request's latents stand: one place behind its cache."""
    return {"kv_lens": [num_tokens], "ropes": [num_tokens + 1], "image_shape": [1024, 1024]}


def bagel_request(request_id):
    params = SimpleNamespace(
        cfg_kv_request_ids={role: f"{request_id}__{role}" for role in BAGEL_ROLES},
        cfg_branch_past_key_values=None,
        cfg_branch_kv_metadata=None,
        cfg_branch_roles=None,
        cfg_active_branch=None,
        cfg_text_scale=4.0,
        cfg_img_scale=1.5,
    )
    return OmniDiffusionRequest(prompt="a lighthouse", sampling_params=params, request_id=request_id)


def collect_bagel_companions(request_id, cfg_request_ids, kv_transfer_manager, target_device):
    """The released form: four arguments, and fields for the sampling parameters by name."""
    fields = {}
    for role, companion_id in cfg_request_ids.items():
        data, nbytes = kv_transfer_manager.receive_kv_cache_for_request(companion_id, target_device)
        if data and nbytes:
            fields[f"{role}_past_key_values"] = SimpleNamespace(**data["layer_blocks"])
            fields[f"{role}_kv_metadata"] = data["metadata"]
    return fields


def hunyuan_request(request_id, sender_info):
    params = SimpleNamespace(guidance_scale=5.0, cfg_branch_roles=None)
    return OmniDiffusionRequest(
        prompt="a lighthouse", sampling_params=params, request_id=request_id, kv_sender_info=sender_info
    )


def set_up_groups(rank, sizes):
    """The groups of this rank as an engine sets them up; every process makes all of them, in one order."""
    count = 1
    for size in sizes.values():
        count *= size
    mine = {"world": GlooCoordinator(range(count))}
    for dimension in DIMENSIONS:
        for ranks in rank_groups(dimension, **sizes):
            group = GlooCoordinator(ranks)
            if rank in ranks:
                mine[dimension] = group
    tp = mine.pop("tp")
    os.environ["LOCAL_RANK"] = str(tp.rank_in_group)
    vllm_parallel_state.set_groups(tp=tp)
    diffusion_parallel_state.set_groups(**mine)
    return {"tp": tp, **mine}


def manager_of(namespace, *, from_tp, to_tp, prefetch=False, collector=None, **settings):
    """A receiving manager from the configuration that an engine passes."""
    raw = {
        "connector_config": {"type": "shm", "namespace": namespace},
        "stage_id": 1,
        "engine_input_source": [0],
        "need_recv_cache": True,
        "rank_mapping": {"from_tp": from_tp, "to_tp": to_tp},
        "enable_kv_async_prefetch": prefetch,
        "recv_timeout": 10.0,
        "kv_vote_timeout": 10.0,
        **settings,
    }
    return OmniKVTransferManager.from_od_config(SimpleNamespace(omni_kv_config=raw, cfg_kv_collect_func=collector))


def held_by(req):
    """What a rank's request holds, as JSON: tokens, KV heads by their number, and where its latents stand."""
    params = req.sampling_params
    return {
        "primary": kv_of(getattr(req, "past_key_values", None)),
        "on the parameters": kv_of(getattr(params, "past_key_values", None)),
        "ropes": (getattr(req, "kv_metadata", None) or {}).get("ropes"),
        "active": getattr(params, "cfg_active_branch", None),
        "roles": getattr(params, "cfg_branch_roles", None),
        "by role": {
            role: [kv_of(kv), (params.cfg_branch_kv_metadata or {}).get(role, {}).get("ropes")]
            for role, kv in (getattr(params, "cfg_branch_past_key_values", None) or {}).items()
        },
        "single": {
            role: [
                kv_of(getattr(params, f"{role}_past_key_values", None)),
                (getattr(params, f"{role}_kv_metadata", None) or {}).get("ropes"),
            ]
            for role in BAGEL_ROLES
            if getattr(params, f"{role}_past_key_values", None) is not None
        },
    }


def kv_of(kv):
    if kv is None:
        return None
    key, value = kv.key_cache[0], kv.value_cache[-1]
    assert (value - key).unique().tolist() == [0.5]
    return [len(key), [float(head) for head in key[0, :, 0]]]
