"""Moving and copying the tensors inside nested objects, and nothing else of them."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
import torch

from omnikv.tensors.place import (
    borrows_from,
    detach_from_buffers,
    has_free_memory,
    map_tensors,
    move_tensors,
    record_current_stream,
    tensors_in,
)

Pair = namedtuple("Pair", ["key", "value"])


def test_every_tensor_in_a_nested_object_is_moved():
    kv = SimpleNamespace(key_cache=[torch.ones(2), None], value_cache=(torch.ones(3),))
    moved = move_tensors({"kv": kv, "pair": Pair(torch.ones(1), 2), "n": 3}, "meta")
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    assert isinstance(moved["pair"], Pair)
    assert moved["kv"].key_cache[1] is None
    assert isinstance(moved["kv"].value_cache, tuple)


def test_the_original_is_left_as_it_was():
    kv = SimpleNamespace(key_cache=[torch.ones(2)])
    move_tensors(kv, "meta")
    assert kv.key_cache[0].device.type == "cpu"


def test_what_is_in_place_already_is_given_back_itself():
    payload = {"kv": SimpleNamespace(key_cache=[torch.ones(2)]), "meta": {"a": [1, "b"]}}
    assert move_tensors(payload, torch.device("cpu")) is payload
    assert move_tensors(payload, None) is payload


def test_one_object_in_two_places_stays_one_object():
    kv = SimpleNamespace(key_cache=[torch.ones(2)])
    moved = move_tensors({"past_key_values": kv, "sp.past_key_values": kv}, "meta")
    assert moved["past_key_values"] is moved["sp.past_key_values"]


def test_an_object_that_contains_itself_is_walked_once():
    kv = SimpleNamespace(tensor=torch.ones(1))
    kv.me = kv
    assert [tensor.tolist() for tensor in tensors_in(kv)] == [[1.0]]


def test_classes_and_functions_are_not_taken_apart():
    def hook():
        return None

    hook.cache = torch.ones(1)
    value = {"hook": hook, "type": torch.Tensor}
    assert map_tensors(value, lambda tensor: tensor + 1) is value


def test_views_get_memory_of_their_own_before_they_are_pickled():
    whole = torch.arange(100_000)
    detached = detach_from_buffers([whole[:2], whole[10:12]])
    assert [part.tolist() for part in detached] == [[0, 1], [10, 11]]
    assert len(pickle.dumps(detached)) < 5_000


def test_tensors_that_own_their_memory_are_not_copied():
    payload = {"kv": SimpleNamespace(key_cache=[torch.ones(2, 3)])}
    assert detach_from_buffers(payload) is payload


def test_a_view_into_a_buffer_is_told_from_a_copy_of_it():
    buffer = torch.zeros(64, dtype=torch.uint8)
    view = buffer[16:32].view(torch.float32)
    assert borrows_from(view, [torch.zeros(4), buffer])
    assert not borrows_from(view.clone(), [buffer])
    assert not borrows_from(view, [])


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta"), torch.device("cuda", 99)])
def test_a_device_that_cannot_tell_its_memory_does_not_stand_in_the_way(device):
    assert has_free_memory(device, 0.99)


@pytest.mark.parametrize(("free", "enough"), [(10, False), (50, True), (90, True)])
def test_a_device_with_too_little_free_memory_does(monkeypatch, free, enough):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    assert has_free_memory(torch.device("cuda", 0), 0.5) is enough
    assert has_free_memory(torch.device("cuda", 0), 0.0)


def test_tensors_on_the_cpu_need_no_stream():
    data = {"kv": [torch.ones(1)]}
    record_current_stream(data)
    assert data == {"kv": [torch.ones(1)]}


@dataclass(frozen=True, slots=True)
class Slotted:
    key: object
    heads: int = 1


class SlottedChild(Slotted):
    __slots__ = "value"


def test_what_an_object_keeps_in_slots_is_moved_too_even_if_it_is_frozen():
    child = SlottedChild(torch.ones(2))
    object.__setattr__(child, "value", [torch.ones(3)])
    unset = SlottedChild(torch.ones(4))
    moved = move_tensors([child, unset, Slotted(3)], "meta")
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta"] * 3
    assert [type(part) for part in moved] == [SlottedChild, SlottedChild, Slotted]
    assert child.key.device.type == "cpu"


class Frozen(msgspec.Struct, frozen=True):
    key: object
    heads: int = 1


def test_the_fields_of_a_struct_are_moved_too():
    moved = move_tensors(Frozen(torch.ones(2), heads=3), "meta")
    assert (type(moved), moved.heads, moved.key.device.type) == (Frozen, 3, "meta")


def test_a_mapping_stays_of_its_kind_and_in_its_order():
    moved = move_tensors(OrderedDict(b=1, a=torch.ones(2)), "meta")
    assert type(moved) is OrderedDict
    assert list(moved) == ["b", "a"]
    by_default = move_tensors(defaultdict(list, a=[torch.ones(2)]), "meta")
    assert by_default["absent"] == []
