"""Groups over `torch.distributed`, and over any engine's group that can send, receive and broadcast objects.

`TorchDistGroup` gathers ballots as bytes in CPU tensors, so nothing is pickled, and holds the deadline through the
work handle. After `VerdictInDoubt` the process group still has the unfinished collective in it: tear it down.

`EngineGroup` uses the three object methods that engines publish (`send_object`, `recv_object`, `broadcast_object`,
with `rank_in_group` and `world_size`). They block without a deadline, so each exchange runs in a thread of its own that
is given up, not stopped, when the deadline passes.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.base import Group
from omnikv.groups.blocking import UNENDED, run_until

# Ballots up to this size need one collective; a longer one costs a second.
_FRAME_NBYTES = 2048
_LENGTH_NBYTES = 8


class TorchDistGroup(Group):
    """The ranks of a `torch.distributed` process group with CPU tensors (gloo)."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """`process_group` None means the default group.

        Raises:
            ConfigError: torch.distributed is not initialised, this process is not in the group, or the group's
                backend takes no CPU tensors.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group before making a group")
        backend = dist.get_backend(process_group)
        if "gloo" not in backend and "mpi" not in backend:
            raise ConfigError(
                f"the process group's backend {backend!r} takes no CPU tensors; pass dist.new_group(backend='gloo')"
            )
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ConfigError("this process is not a member of the process group")
        self._group = process_group
        self._rank = rank
        self._size = dist.get_world_size(process_group)
        self._broken: str | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, ballot: bytes, *, deadline: float) -> list[bytes]:
        if self._broken is not None:
            raise VerdictInDoubt(f"this group failed before ({self._broken}); tear it down", rank=self._rank)
        self._broken = UNENDED
        ballots = self._gather_ballots(ballot, deadline)
        self._broken = None
        return ballots

    def _gather_ballots(self, ballot: bytes, deadline: float) -> list[bytes]:
        frames = self._all_gather(_framed(ballot, _FRAME_NBYTES), deadline)
        lengths = [int.from_bytes(frame[:_LENGTH_NBYTES], "little") for frame in frames]
        longest = max(lengths) + _LENGTH_NBYTES
        if longest > _FRAME_NBYTES:
            frames = self._all_gather(_framed(ballot, longest), deadline)
        return [frame[_LENGTH_NBYTES : _LENGTH_NBYTES + length] for frame, length in zip(frames, lengths, strict=True)]

    def _all_gather(self, frame: bytearray, deadline: float) -> list[bytes]:
        mine = torch.frombuffer(frame, dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            work = dist.all_gather(everyone, mine, group=self._group, async_op=True)
            # gloo takes a wait of zero for no limit at all.
            remaining_s = max(deadline - time.monotonic(), 0.001)
            if work is not None:
                work.wait(timedelta(seconds=remaining_s))
        except RuntimeError as error:
            self._broken = str(error).splitlines()[0]
            raise VerdictInDoubt(
                f"rank {self._rank} cast its ballot and did not learn its {self._size - 1} peers': {self._broken}",
                rank=self._rank,
            ) from error
        return [bytes(tensor.numpy()) for tensor in everyone]


def _framed(ballot: bytes, frame_nbytes: int) -> bytearray:
    frame = bytearray(frame_nbytes)
    frame[:_LENGTH_NBYTES] = len(ballot).to_bytes(_LENGTH_NBYTES, "little")
    room = frame_nbytes - _LENGTH_NBYTES
    frame[_LENGTH_NBYTES : _LENGTH_NBYTES + min(len(ballot), room)] = ballot[:room]
    return frame


class EngineGroup(Group):
    """The ranks of an engine's group coordinator, by its object methods."""

    def __init__(self, coordinator: Any) -> None:
        """`coordinator` has `rank_in_group`, `world_size`, `send_object`, `recv_object` and `broadcast_object`.

        Raises:
            ConfigError: one of them is missing.
        """
        wanted = ("rank_in_group", "world_size", "send_object", "recv_object", "broadcast_object")
        missing = [name for name in wanted if not hasattr(coordinator, name)]
        if missing:
            raise ConfigError(f"{type(coordinator).__name__} cannot serve as a group: it lacks {', '.join(missing)}")
        self._coordinator = coordinator
        self._broken: str | None = None

    @property
    def rank(self) -> int:
        return int(self._coordinator.rank_in_group)

    @property
    def size(self) -> int:
        return int(self._coordinator.world_size)

    def exchange(self, ballot: bytes, *, deadline: float) -> list[bytes]:
        if self._broken is not None:
            raise VerdictInDoubt(f"this group failed before ({self._broken}); tear it down", rank=self.rank)
        self._broken = UNENDED
        answer, failure = run_until(
            lambda: self._gather_and_broadcast(ballot), deadline, name=f"omnikv-vote-{self.rank}"
        )
        if answer is not None:
            self._broken = None
            return answer[0]
        self._broken = str(failure) if failure else "the peers did not answer by the deadline"
        raise VerdictInDoubt(
            f"rank {self.rank} cast its ballot and did not learn its {self.size - 1} peers': {self._broken}",
            rank=self.rank,
        ) from failure

    def _gather_and_broadcast(self, ballot: bytes) -> list[bytes]:
        coordinator = self._coordinator
        if self.rank == 0:
            ballots = [ballot, *(coordinator.recv_object(src=source) for source in range(1, self.size))]
            coordinator.broadcast_object(ballots, src=0)
            return ballots
        coordinator.send_object(ballot, dst=0)
        received: list[bytes] = coordinator.broadcast_object(None, src=0)
        return received
