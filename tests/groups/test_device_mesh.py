"""The groups of a mesh, by real processes: who reads, who shares, and who acts in lockstep."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omnikv.errors import ConfigError
from omnikv.groups import from_device_mesh

HERE = "tests.groups.test_device_mesh"


def place_in(rank, shape, names):
    groups = from_device_mesh(init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names)))
    return {
        "places": groups.places,
        "sizes": groups.sizes,
        "reader": groups.is_reader,
        "sharing": groups.sharing,
        "replica": groups.replica,
        **{name: dist.get_process_group_ranks(getattr(groups, name)) for name in ("tp", "cfg", "sp", "lockstep")},
    }


def test_every_rank_of_two_replicas_finds_its_groups(gangs, tmp_path):
    found = gangs.run(f"{HERE}:place_in", 8, tmp_path, shape=[2, 2, 1, 2], names=["dp", "cfg", "sp", "tp"])
    assert [rank for rank, groups in enumerate(found) if groups["reader"]] == [0, 1, 4, 5]
    assert [groups["sharing"] for groups in found[:4]] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [groups["lockstep"] for groups in found] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [groups["replica"] for groups in found] == [0] * 4 + [1] * 4
    assert found[7]["places"] == {"dp": 1, "cfg": 1, "sp": 0, "tp": 1}
    assert (found[7]["tp"], found[7]["cfg"], found[7]["sp"]) == ([6, 7], [5, 7], [7])


def test_dimensions_may_come_in_another_order_and_some_be_missing(gangs, tmp_path):
    found = gangs.run(f"{HERE}:place_in", 4, tmp_path, shape=[2, 2], names=["tp", "sp"])
    assert [groups["sharing"] for groups in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [groups["tp"] for groups in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [groups["cfg"] for groups in found] == [[0], [1], [2], [3]]
    assert found[3]["sizes"] == {"dp": 1, "cfg": 1, "sp": 2, "tp": 2}


def test_d39_of_four_ranks_that_share_without_other_parallelism_one_reads(gangs, tmp_path):
    found = gangs.run(f"{HERE}:place_in", 4, tmp_path, shape=[4, 1, 1], names=["cfg", "sp", "tp"])
    assert [groups["reader"] for groups in found] == [True, False, False, False]
    assert [groups["sharing"] for groups in found] == [[0, 1, 2, 3]] * 4


def be_refused(rank):
    said = []
    for mesh in (
        init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        init_device_mesh("cpu", (2,)),
        DeviceMesh("cpu", torch.tensor([1 - rank]), mesh_dim_names=("tp",)),
    ):
        with pytest.raises(ConfigError) as caught:
            from_device_mesh(mesh)
        said.append(str(caught.value))
    return said


def test_a_mesh_without_known_names_or_without_this_rank_is_refused_in_words(gangs, tmp_path):
    unknown, unnamed, elsewhere = gangs.run(f"{HERE}:be_refused", 2, tmp_path)[0]
    assert "must be named among dp, cfg, sp, tp, got ['pp']" in unknown
    assert "got [] for 1: pass mesh_dim_names" in unnamed
    assert "rank 0 is not in the mesh [1]" in elsewhere
