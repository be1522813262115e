"""Which fields of a request carry KV, and what each guidance rank gets of them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from omnikv.core.roles import (
    apply_payload,
    branch_payloads,
    branch_roles,
    clear_payload,
    collect_payload,
    companion_ids,
    missing_roles,
    ranks_without_kv,
    received_fields,
    role_of_field,
)


def request(**sampling_params):
    return SimpleNamespace(request_id="r1", sampling_params=SimpleNamespace(**sampling_params))


def full_request():
    req = request(
        past_key_values="main",
        kv_metadata={"seq_len": 3},
        cfg_text_past_key_values="text",
        cfg_text_kv_metadata={"seq_len": 1},
        cfg_active_branch="cfg_text",
        cfg_kv_request_ids={"cfg_text": "r1__cfg_text"},
        cfg_scale=4.0,
        seed=7,
    )
    req.past_key_values, req.kv_metadata = "main", {"seq_len": 3}
    return req


def test_collecting_finds_the_kv_fields_and_leaves_ordinary_parameters_alone():
    assert set(collect_payload(full_request())) == {
        "past_key_values",
        "kv_metadata",
        "sp.past_key_values",
        "sp.kv_metadata",
        "sp.cfg_text_past_key_values",
        "sp.cfg_text_kv_metadata",
        "sp.cfg_active_branch",
        "sp.cfg_kv_request_ids",
    }


def test_a_request_without_sampling_parameters_has_its_own_fields_only():
    assert collect_payload(SimpleNamespace(past_key_values="kv")) == {"past_key_values": "kv"}
    assert collect_payload(SimpleNamespace(sampling_params=None)) == {}


def test_sampling_parameters_may_be_a_struct_without_a_dict():
    class Params(msgspec.Struct):
        past_key_values: str | None = None
        cfg_text_past_key_values: str | None = None
        seed: int = 0

    req = SimpleNamespace(sampling_params=Params(past_key_values="kv", cfg_text_past_key_values="text"))
    assert collect_payload(req) == {"sp.past_key_values": "kv", "sp.cfg_text_past_key_values": "text"}
    assert branch_roles(req) == ["cfg_text"]


def test_clearing_drops_everything_that_was_received():
    req = full_request()
    clear_payload(req)
    assert set(collect_payload(req)) == {"sp.cfg_kv_request_ids"}
    assert req.past_key_values is None
    assert req.sampling_params.cfg_scale == 4.0


def test_x13_clearing_keeps_the_companion_ids_so_that_a_retry_is_possible():
    req = full_request()
    clear_payload(req)
    assert req.sampling_params.cfg_kv_request_ids == {"cfg_text": "r1__cfg_text"}


def test_what_was_collected_can_be_applied_to_another_request():
    req, other = full_request(), request()
    apply_payload(other, collect_payload(req))
    assert collect_payload(other) == collect_payload(req)


def test_applying_sets_a_branch_to_none_but_never_takes_the_primary_away():
    req = full_request()
    apply_payload(req, {"past_key_values": None, "sp.cfg_active_branch": None})
    assert req.past_key_values == "main"
    assert req.sampling_params.cfg_active_branch is None


def test_applying_to_a_request_without_sampling_parameters_sets_its_own_fields():
    req = SimpleNamespace(sampling_params=None)
    apply_payload(req, {"past_key_values": "kv", "sp.past_key_values": "kv"})
    assert req.past_key_values == "kv"


def test_a_received_payload_becomes_fields_in_both_places():
    fields = received_fields({"layer_blocks": {"key_cache": [1], "value_cache": [2]}, "metadata": {"a": 1}}, dict)
    assert fields == {
        "past_key_values": {"key_cache": [1], "value_cache": [2]},
        "kv_metadata": {"a": 1},
        "sp.past_key_values": {"key_cache": [1], "value_cache": [2]},
        "sp.kv_metadata": {"a": 1},
    }
    assert received_fields({"request_id": "r"}, dict) == {}


def test_branches_come_in_the_same_order_whatever_order_they_were_set_in():
    req = request(cfg_late_past_key_values="x", cfg_img_past_key_values="i", cfg_text_past_key_values="t")
    assert branch_roles(req) == ["cfg_text", "cfg_img", "cfg_late"]


def test_branches_kept_by_role_count_like_those_kept_by_name():
    req = request(cfg_branch_past_key_values={"cfg_img": "i", "other": "o", "empty": None}, cfg_z_past_key_values="z")
    assert branch_roles(req) == ["cfg_img", "other", "cfg_z"]


def test_a_named_branch_without_kv_keeps_its_rank():
    req = request(cfg_branch_past_key_values={"cfg_text": None, "cfg_img": "i"}, past_key_values="main")
    payloads = branch_payloads(req, cfg_size=3)
    assert payloads[1] is None
    assert payloads[2]["sp.cfg_active_branch"] == "cfg_img"
    assert ranks_without_kv(payloads) == [1]


def test_each_rank_gets_the_main_kv_and_its_own_branch_only():
    req = request(
        past_key_values="main",
        cfg_text_past_key_values="t",
        cfg_text_kv_metadata={"n": 1},
        cfg_img_past_key_values="i",
    )
    main, text, image = branch_payloads(req, cfg_size=3)
    assert main == {
        "sp.past_key_values": "main",
        "sp.cfg_branch_roles": ["cfg_text", "cfg_img"],
        "sp.cfg_active_branch": None,
    }
    assert text["sp.cfg_active_branch"] == "cfg_text"
    assert text["sp.cfg_branch_past_key_values"] == {"cfg_text": "t"}
    assert text["sp.cfg_branch_kv_metadata"] == {"cfg_text": {"n": 1}}
    assert text["sp.cfg_text_kv_metadata"] == {"n": 1}
    assert "sp.cfg_img_past_key_values" not in text
    assert image["sp.past_key_values"] == "main"
    assert "sp.cfg_branch_kv_metadata" not in image


def test_more_branches_than_ranks_are_cut_to_the_group():
    req = request(past_key_values="m", cfg_text_past_key_values="t", cfg_img_past_key_values="i")
    assert len(branch_payloads(req, cfg_size=2)) == 2


def test_d07_the_one_follower_of_a_group_of_two_shares_the_main_kv():
    main, follower = branch_payloads(request(past_key_values="main"), cfg_size=2)
    assert follower == main
    assert follower is not main


def test_d07_in_a_larger_group_the_ranks_without_a_branch_are_named():
    payloads = branch_payloads(request(past_key_values="main"), cfg_size=3)
    assert payloads[1:] == [None, None]
    assert ranks_without_kv(payloads) == [1, 2]


@pytest.mark.parametrize("cfg_size", [1, 2, 3])
def test_without_any_kv_no_rank_gets_any_and_none_is_named(cfg_size):
    payloads = branch_payloads(request(), cfg_size=cfg_size)
    assert payloads == [None] * cfg_size
    assert ranks_without_kv(payloads) == []


def test_d06_the_companions_asked_for_and_not_there_are_named():
    req = request(cfg_kv_request_ids={"cfg_text": "a", "cfg_img": "b"}, cfg_img_past_key_values="kv")
    assert companion_ids(req) == {"cfg_text": "a", "cfg_img": "b"}
    assert missing_roles(req) == ("cfg_text",)
    assert missing_roles(req, ["cfg_img", "cfg_audio"]) == ("cfg_audio", "cfg_text")


@pytest.mark.parametrize("asked", [None, ["c1"], "c1", {"cfg_text": None}])
def test_companion_ids_that_are_no_ids_by_role_name_nothing(asked):
    assert companion_ids(request(cfg_kv_request_ids=asked)) == {}


def test_a_field_is_part_of_a_role():
    assert role_of_field("past_key_values") == role_of_field("sp.kv_metadata") == "primary"
    assert role_of_field("sp.cfg_text_past_key_values") == role_of_field("sp.cfg_text_kv_metadata") == "cfg_text"
    assert role_of_field("sp.cfg_active_branch") == "cfg_active_branch"
