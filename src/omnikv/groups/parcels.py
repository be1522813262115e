"""Bytes from one rank of a process group to another, or to all, as tensors: the size first, then the bytes.

The first message of a parcel is always of one size, so a receiver needs to know nothing beforehand: it says what is
coming and how long it is. A sender that has nothing to give says that, and why, in a parcel of its own, so nobody is
left waiting for bytes that never come.

Ranks are those within the group, from 0; torch's own calls want global ones, and this is the only place that
translates them (D39).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from omnikv.errors import ConnectError, RemoteProtocolError


class ParcelKind(enum.IntEnum):
    """NOTHING and DOUBT carry the reason in words, BUNDLE carries bytes; OBJECT says that an object follows."""

    NOTHING = 0
    BUNDLE = 1
    OBJECT = 2
    DOUBT = 3


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is handed over; `data` is 1-D uint8 on the CPU, the sender's own until the call returns."""

    kind: ParcelKind
    data: torch.Tensor

    @classmethod
    def words(cls, kind: ParcelKind, text: str) -> Parcel:
        """A parcel that carries `text`."""
        raw = text.encode("utf-8", "backslashreplace")
        return cls(kind, torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else _no_bytes())

    @property
    def text(self) -> str:
        return bytes(self.data.numpy()).decode("utf-8", "backslashreplace")

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class ParcelPost:
    """One rank's way of giving parcels to the other ranks of a process group with CPU tensors, and of taking theirs.

    All calls block until `deadline` (monotonic seconds) at most. After a call that failed, what is still under way
    between the two may meet the next one, so `broken` says why, and every later call with that peer fails at once. The
    others can still be told what they wait for; then the group is to be torn down.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._failures: dict[str, str] = {}

    @property
    def broken(self) -> str | None:
        """What the first call that failed came to."""
        return next(iter(self._failures.values()), None)

    def send(self, parcel: Parcel, rank: int, *, deadline: float) -> None:
        """Nothing, once `rank` was sent the parcel.

        Raises:
            ConnectError: the peer is gone, or did not take it by the deadline.
        """
        to = dist.get_global_rank(self._group, rank)
        for tensor in _messages(parcel):
            self._finish(partial(dist.isend, tensor, to, group=self._group), f"rank {rank}", deadline)

    def receive(self, rank: int, *, deadline: float) -> Parcel:
        """What `rank` sends; its bytes are the caller's.

        Raises:
            ConnectError: the peer is gone, or sent nothing by the deadline.
            RemoteProtocolError: what it announced is no parcel.
        """
        source = dist.get_global_rank(self._group, rank)

        def take(tensor: torch.Tensor) -> None:
            self._finish(lambda: dist.irecv(tensor, source, group=self._group), f"rank {rank}", deadline)

        return _taken(take)

    def broadcast(self, parcel: Parcel | None, *, deadline: float) -> Parcel:
        """The parcel of the group's rank 0, which gives it here; the others give None.

        Raises:
            ConnectError: a peer is gone, or did not take part by the deadline.
            RemoteProtocolError: what rank 0 announced is no parcel.
        """
        first = dist.get_global_rank(self._group, 0)

        def share(tensor: torch.Tensor) -> None:
            self._finish(lambda: dist.broadcast(tensor, first, group=self._group, async_op=True), "the group", deadline)

        if parcel is None:
            return _taken(share)
        for tensor in _messages(parcel):
            share(tensor)
        return parcel

    def _finish(self, start: Callable[[], dist.Work | None], peer: str, deadline: float) -> None:
        if peer in self._failures:
            raise ConnectError(f"KV cannot be handed on after a call that failed: {self._failures[peer]}")
        try:
            work = start()
            # gloo takes a wait of zero for no limit at all.
            if work is not None:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            self._failures[peer] = f"KV could not be handed on with {peer}: {_gist(error)}"
            raise ConnectError(self._failures[peer]) from error


def _messages(parcel: Parcel) -> list[torch.Tensor]:
    announced = torch.tensor([parcel.kind, parcel.nbytes], dtype=torch.int64)
    # A message without bytes is none to every backend alike, so it is left out.
    return [announced, parcel.data] if parcel.nbytes else [announced]


def _taken(take: Callable[[torch.Tensor], None]) -> Parcel:
    announced = torch.zeros(2, dtype=torch.int64)
    take(announced)
    number, nbytes = announced.tolist()
    if number not in list(ParcelKind) or nbytes < 0:
        raise RemoteProtocolError(f"a peer announced kind {number} of {nbytes} bytes, which is no parcel")
    data = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        take(data)
    return Parcel(ParcelKind(number), data)


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _gist(error: RuntimeError) -> str:
    # gloo says where in its own source an error came from, and what one might do about it in general.
    first = str(error).splitlines()[0]
    return first.rpartition("] ")[2].partition(". This is typically")[0]
