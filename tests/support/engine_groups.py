"""Groups as engines have them, for tests: by their object methods alone, between threads or over torch.distributed."""

from __future__ import annotations

import itertools
import pickle
import queue
from types import SimpleNamespace

from omnikv.core.receive_role import ReceiveLayout, choose_role

DIMENSIONS = ("tp", "sp", "cfg", "dp")


class ThreadCoordinator:
    """One rank's view of ranks that are threads; a receive gives up rather than hang. `calls` notes its own."""

    def __init__(self, rank, size, mail):
        self.rank_in_group, self.world_size, self._mail, self.calls = rank, size, mail, []

    @classmethod
    def of(cls, size):
        mail = {(source, target): queue.Queue() for source in range(size) for target in range(size)}
        return [cls(rank, size, mail) for rank in range(size)]

    def send_object(self, obj, dst):
        self.calls.append(("send", dst))
        self._mail[self.rank_in_group, dst].put(obj)

    def recv_object(self, src):
        self.calls.append(("recv", src))
        return self._mail[src, self.rank_in_group].get(timeout=20)

    def broadcast_object(self, obj=None, src=0):
        self.calls.append(("broadcast", src))
        if self.rank_in_group != src:
            return self._mail[src, self.rank_in_group].get(timeout=20)
        for rank in range(self.world_size):
            if rank != src:
                self._mail[src, rank].put(obj)
        return obj


class GlooCoordinator:
    """A group of real processes with an engine's object methods, over torch.distributed on the CPU."""

    def __init__(self, ranks):
        import torch.distributed as dist

        self.ranks = list(ranks)
        self.cpu_group = dist.new_group(self.ranks, backend="gloo")
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else -1
        self.calls = []

    def send_object(self, obj, dst):
        import torch
        import torch.distributed as dist

        self.calls.append(("send", dst))
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        dist.send(torch.tensor([data.numel()]), self.ranks[dst], group=self.cpu_group)
        dist.send(data, self.ranks[dst], group=self.cpu_group)

    def recv_object(self, src):
        import torch
        import torch.distributed as dist

        self.calls.append(("recv", src))
        size = torch.empty(1, dtype=torch.long)
        dist.recv(size, self.ranks[src], group=self.cpu_group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, self.ranks[src], group=self.cpu_group)
        return pickle.loads(data.numpy().tobytes())

    def broadcast_object(self, obj=None, src=0):
        import torch.distributed as dist

        self.calls.append(("broadcast", src))
        box = [obj]
        dist.broadcast_object_list(box, self.ranks[src], group=self.cpu_group)
        return box[0]


class ObjectsOnly:
    """A coordinator without its process group: what an engine's group is to somebody who sees the methods alone."""

    def __init__(self, coordinator):
        self._coordinator = coordinator

    def __getattr__(self, name):
        if name == "cpu_group":
            raise AttributeError(name)
        return getattr(self._coordinator, name)


def rank_groups(dimension, **sizes):
    """The global ranks of each group along one dimension, in the order in which engines number ranks."""
    sizes = {name: sizes.get(name, 1) for name in DIMENSIONS}
    places = list(itertools.product(*(range(sizes[name]) for name in reversed(DIMENSIONS))))
    at = DIMENSIONS[::-1].index(dimension)
    groups = {}
    for rank, place in enumerate(places):
        groups.setdefault(place[:at] + place[at + 1 :], []).append(rank)
    return list(groups.values())


def thread_world(**sizes):
    """One layout a rank of a world of threads, with the groups that an engine would set up for these sizes."""
    count = 1
    for name in DIMENSIONS:
        count *= sizes.get(name, 1)
    world = ThreadCoordinator.of(count)
    views = [SimpleNamespace(world=world[rank]) for rank in range(count)]
    for dimension in DIMENSIONS:
        for ranks in rank_groups(dimension, **sizes):
            for rank, view in zip(ranks, ThreadCoordinator.of(len(ranks)), strict=True):
                setattr(views[rank], dimension, view)
    return [layout_of(view, **sizes) for view in views]


def layout_of(view, **sizes):
    """The layout that a rank with these groups reads from its engine."""
    place = {
        "tp_active": sizes.get("tp", 1) > 1,
        "cfg_size": view.cfg.world_size,
        "cfg_rank": view.cfg.rank_in_group,
        "sp_size": view.sp.world_size,
        "sp_rank": view.sp.rank_in_group,
    }
    replicas = view.dp.world_size
    role = choose_role(
        **place, world_size=view.world.world_size, world_rank=view.world.rank_in_group, replicas=replicas
    )
    return ReceiveLayout(
        role=role,
        **place,
        cfg_group=view.cfg,
        sp_group=view.sp,
        world=view.world,
        tp_group=view.tp,
        tp_size=view.tp.world_size,
        replicas=replicas,
    )
