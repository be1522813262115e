"""How one rank gives a payload to the ranks below it, and takes one from the rank above, within one group.

Two ways, chosen by what is equal on every rank of the group. `PackedCalls` needs a process group with CPU tensors: the
payload goes as one tensor of bytes whose size is agreed on first (`omnikv.groups.parcels`), and a rank that passes it
on passes on the same bytes. `ObjectCalls` needs the three object methods alone, and is what released engines do; a
payload with something in it that cannot be packed goes that way too, announced by a parcel.

What is given is a request's payload, None for nothing, or `DOUBT` from a leader that does not know which way its peers
go.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from omnikv.core.roles import Payload
from omnikv.errors import ConfigError
from omnikv.groups.parcels import Parcel, ParcelKind, ParcelPost
from omnikv.tensors.bundle import pack, unpack
from omnikv.tensors.place import detach_from_buffers

logger = logging.getLogger("omnikv.distribute")

# What followers hear in place of KV, or of the last word, from a leader that does not know which way its peers go.
DOUBT = "omnikv: the verdict is in doubt"


@dataclass(frozen=True, slots=True)
class Given:
    """A payload on its way down; `parcel` holds it packed, so that a rank which passes it on need not pack it again."""

    payload: Any = None
    parcel: Parcel | None = None


NOTHING = Given()


class LevelCalls(Protocol):
    """One rank's calls in one group. Every rank of the group makes the matching ones, in the same order."""

    def send(self, given: Given, rank: int) -> None:
        """Nothing; `rank` is sent the payload."""

    def receive(self) -> Given:
        """What rank 0 sent to this rank alone."""

    def broadcast(self, given: Given) -> None:
        """Nothing; every other rank is given the payload of this one, which is rank 0."""

    def receive_broadcast(self) -> Given:
        """What rank 0 gave to all."""


class ObjectCalls:
    """By an engine's `send_object`, `recv_object` and `broadcast_object`, which pickle what they are given."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, given: Given, rank: int) -> None:
        self._group.send_object(detach_from_buffers(given.payload), dst=rank)

    def receive(self) -> Given:
        return Given(self._group.recv_object(src=0))

    def broadcast(self, given: Given) -> None:
        self._group.broadcast_object(detach_from_buffers(given.payload), src=0)

    def receive_broadcast(self) -> Given:
        return Given(self._group.broadcast_object(None, src=0))


class PackedCalls:
    """By tensors over the group's `cpu_group`; `deadline` is on the monotonic clock, in seconds."""

    def __init__(self, group: Any, *, deadline: float) -> None:
        self._objects = ObjectCalls(group)
        self._post = ParcelPost(group.cpu_group)
        self._deadline = deadline

    def send(self, given: Given, rank: int) -> None:
        parcel = as_parcel(given)
        self._post.send(parcel, rank, deadline=self._deadline)
        if parcel.kind is ParcelKind.OBJECT:
            self._objects.send(given, rank)

    def receive(self) -> Given:
        parcel = self._post.receive(0, deadline=self._deadline)
        return self._objects.receive() if parcel.kind is ParcelKind.OBJECT else _as_given(parcel)

    def broadcast(self, given: Given) -> None:
        parcel = as_parcel(given)
        self._post.broadcast(parcel, deadline=self._deadline)
        if parcel.kind is ParcelKind.OBJECT:
            self._objects.broadcast(given)

    def receive_broadcast(self) -> Given:
        parcel = self._post.broadcast(None, deadline=self._deadline)
        return self._objects.receive_broadcast() if parcel.kind is ParcelKind.OBJECT else _as_given(parcel)


def takes_packed(group: Any) -> bool:
    """Whether an engine's group can carry tensors on the CPU; the same on every rank of it."""
    process_group = getattr(group, "cpu_group", None)
    is_known = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
    return is_known and "gloo" in dist.get_backend(process_group)


def as_parcel(given: Given) -> Parcel:
    """What goes first: the payload packed, as it came where it came packed, or what there is in place of it."""
    if given.parcel is not None:
        return given.parcel
    if given.payload is None:
        return Parcel.words(ParcelKind.NOTHING, "")
    if given.payload == DOUBT:
        return Parcel.words(ParcelKind.DOUBT, DOUBT)
    try:
        return Parcel(ParcelKind.BUNDLE, pack(given.payload))
    except ConfigError as error:
        logger.debug("a payload goes as an object: %s", error)
        return Parcel.words(ParcelKind.OBJECT, "")


def _as_given(parcel: Parcel) -> Given:
    if parcel.kind is ParcelKind.NOTHING:
        return NOTHING
    if parcel.kind is ParcelKind.DOUBT:
        return Given(DOUBT)
    payload: Payload = unpack(parcel.data)
    return Given(payload, parcel)
