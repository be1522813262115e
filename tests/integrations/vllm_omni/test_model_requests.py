"""Bagel's and HunyuanImage's requests through the published receive, by real ranks in real process groups.

Each token and head of a cache says which branch and head it is, so that every rank's request can be checked whole.
"""

from __future__ import annotations

import logging
import uuid
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from tests.support.model_requests import (
    BAGEL_ROLES,
    bagel_metadata,
    bagel_request,
    collect_bagel_companions,
    held_by,
    hunyuan_request,
    manager_of,
    set_up_groups,
)

from omnikv.integrations.vllm_omni.manager import OmniKVCacheConfig, OmniKVTransferManager

HERE = "tests.integrations.vllm_omni.test_model_requests"
LOCAL_RANK = "omnikv.integrations.vllm_omni.manager.get_local_tp_rank"
HEADS, BLOCK = 4, 8
TOKENS = {"": 14, "cfg_text": 9, "cfg_img": 11}


class Words(logging.Handler):
    """Keeps what is logged as an error or a warning."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("omnikv").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def senders():
    """Sending managers of a language stage, made by `senders(namespace, from_tp, to_tp)`."""
    with ExitStack() as ends:

        def open_stage(namespace, from_tp, to_tp):
            stage = []
            for rank in range(from_tp):
                with patch(LOCAL_RANK, return_value=rank):
                    connector = {"type": "shm", "namespace": namespace}
                    config = OmniKVCacheConfig(
                        connector, from_stage="0", to_stage="1", need_send_cache=True, from_tp=from_tp, to_tp=to_tp
                    )
                    stage.append(OmniKVTransferManager(config))
                ends.callback(stage[-1].close)
            return stage

        yield open_stage


def send(stage, request_id, *, role="", ranks=None):
    """One branch's cache by every rank of the stage, or by `ranks` alone: head h of branch b is 10 * b + h."""
    num_tokens, local = TOKENS[role], HEADS // len(stage)
    for rank, sender in enumerate(stage):
        if ranks is not None and rank not in ranks:
            continue
        heads = torch.arange(local).float() + rank * local + 10 * list(TOKENS).index(role)
        paged = heads.view(1, 1, 1, local, 1).expand(2, 3, BLOCK, local, 8).clone()
        paged[1] += 0.5
        finished = {
            request_id: {"block_ids": [2, 0], "seq_len": num_tokens, "custom_metadata": bagel_metadata(num_tokens)}
        }
        assert sender.handle_finished_requests_kv_transfer(finished, [paged, paged], BLOCK, "float32") == [request_id]
        assert sender.counters["send_failed"] == 0


def expected_kv(role, tp, tp_rank):
    local = HEADS // tp
    first = 10 * list(TOKENS).index(role) + tp_rank * local
    return [TOKENS[role], [float(first + at) for at in range(local)]]


@pytest.fixture
def namespace():
    return f"models-{uuid.uuid4().hex[:12]}"


# Bagel


def receive_bagel(rank, channel, sizes, namespace, from_tp, requests):
    words, groups = Words(), set_up_groups(rank, sizes)
    manager = manager_of(namespace, from_tp=from_tp, to_tp=sizes["tp"], recv_timeout=2.0)
    answers = []
    for number, request_id in enumerate(requests):
        channel.tell(f"waiting {number}")
        words.lines.clear()
        req = bagel_request(request_id)
        outcome = manager.receive_multi_kv_cache_distributed(req, collect_bagel_companions)
        asked = sorted(getattr(req.sampling_params, "cfg_kv_request_ids", None) or [])
        answers.append({"outcome": outcome, "asked": asked, "words": list(words.lines), **held_by(req)})
    objects = sum(name == "broadcast" for group in groups.values() for name, _ in group.calls)
    manager.close()
    return [answers, objects]


BAGEL_MIXES = [(2, {"tp": 1, "cfg": 3}), (1, {"tp": 2, "cfg": 3}), (2, {"tp": 2, "sp": 2, "cfg": 3})]


@pytest.mark.parametrize(("from_tp", "sizes"), BAGEL_MIXES)
def test_each_guidance_rank_of_bagel_holds_its_branch_and_where_its_latents_stand(
    gangs, senders, tmp_path, namespace, from_tp, sizes
):
    stage = senders(namespace, from_tp, sizes["tp"])
    send(stage, "r1")
    for role in BAGEL_ROLES:
        send(stage, f"r1__{role}", role=role)
    count = sizes["tp"] * sizes["cfg"] * sizes.get("sp", 1)
    told = gangs.run(
        f"{HERE}:receive_bagel", count, tmp_path, sizes=sizes, namespace=namespace, from_tp=from_tp, requests=["r1"]
    )
    for rank, ((answer,), objects) in enumerate(told):
        tp_rank, cfg_rank = rank % sizes["tp"], rank // (count // sizes["cfg"])
        main = expected_kv("", sizes["tp"], tp_rank)
        assert answer["outcome"] is True
        assert (answer["primary"], answer["on the parameters"]) == (main, main)
        assert answer["ropes"] == [TOKENS[""] + 1]
        assert answer["roles"] == list(BAGEL_ROLES)
        mine = BAGEL_ROLES[cfg_rank - 1] if cfg_rank else None
        assert answer["active"] == mine
        if mine:
            part = [expected_kv(mine, sizes["tp"], tp_rank), [TOKENS[mine] + 1]]
            assert answer["by role"] == answer["single"] == {mine: part}
        # What was handed on went as tensors: the only object that is broadcast is the last word in a sequence group.
        assert objects == sizes.get("sp", 1) - 1


def test_d01_a_bagel_companion_that_one_rank_misses_leaves_all_six_without_and_a_retry_works(
    gangs, senders, tmp_path, namespace
):
    stage = senders(namespace, 2, 2)
    send(stage, "r1")
    send(stage, "r1__cfg_text", role="cfg_text")
    send(stage, "r1__cfg_img", role="cfg_img", ranks=[0])
    with gangs.started(
        f"{HERE}:receive_bagel",
        6,
        tmp_path,
        sizes={"tp": 2, "cfg": 3},
        namespace=namespace,
        from_tp=2,
        requests=["r1", "r1"],
    ) as gang:
        gang.wait_for("waiting 1")
        send(stage, "r1__cfg_img", role="cfg_img", ranks=[1])
        told = gang.results()
    first, second = zip(*(answers for answers, _ in told), strict=True)
    assert [answer["outcome"] for answer in first] == [False] * 6
    assert [answer["primary"] for answer in first] == [None] * 6
    # X13: the request still says what it asks for, so that it can be asked for again.
    assert [answer["asked"] for answer in first] == [sorted(BAGEL_ROLES)] * 6
    assert any("rank 1 lacks cfg_img" in line for line in first[0]["words"])
    assert [answer["outcome"] for answer in second] == [True] * 6


# HunyuanImage


def receive_hunyuan(rank, sizes, namespace, from_tp, prefetch):
    words = Words()
    set_up_groups(rank, sizes)
    manager = manager_of(namespace, from_tp=from_tp, to_tp=sizes["tp"], prefetch=prefetch, recv_timeout=3.0)
    sender_info = {"0": {"host": "127.0.0.1", "zmq_port": 50151}}
    if prefetch:
        manager.start_prefetch({"request_id": "r1", "kv_sender_info": sender_info})
        assert manager.wait_prefetch(20.0)
    req = hunyuan_request("r1", sender_info)
    outcome = manager.consume_and_distribute_kv_cache(req)
    manager.close()
    return {"outcome": outcome, "words": words.lines, **held_by(req)}


@pytest.mark.parametrize("prefetch", [False, True])
def test_d07_both_guidance_ranks_of_hunyuan_image_hold_the_one_cache(gangs, senders, tmp_path, namespace, prefetch):
    sizes = {"tp": 2, "sp": 2, "cfg": 2}
    stage = senders(namespace, 2, 2)
    send(stage, "r1")
    told = gangs.run(
        f"{HERE}:receive_hunyuan", 8, tmp_path, sizes=sizes, namespace=namespace, from_tp=2, prefetch=prefetch
    )
    for rank, answer in enumerate(told):
        main = expected_kv("", 2, rank % 2)
        assert answer["outcome"] is True, answer["words"]
        assert (answer["primary"], answer["ropes"]) == (main, [TOKENS[""] + 1])
        assert (answer["active"], answer["by role"], answer["single"]) == (None, {}, {})


def test_d07_a_third_guidance_rank_of_hunyuan_image_is_named_and_no_rank_runs(gangs, senders, tmp_path, namespace):
    stage = senders(namespace, 2, 2)
    send(stage, "r1")
    told = gangs.run(
        f"{HERE}:receive_hunyuan",
        6,
        tmp_path,
        sizes={"tp": 2, "cfg": 3},
        namespace=namespace,
        from_tp=2,
        prefetch=False,
    )
    assert [answer["outcome"] for answer in told] == [False] * 6
    assert [answer["primary"] for answer in told] == [None] * 6
    for leader in (0, 1):
        lines = " ".join(told[leader]["words"])
        assert "rank 2 of the guidance group of 3 gets no KV" in lines
        assert "guidance ranks [1, 2]" in lines
