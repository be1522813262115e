"""A group whose ranks are threads of one process: the simplest one that keeps deadlines, used by tests and examples."""

from __future__ import annotations

import threading
import time

from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.base import Group


class _Meeting:
    """What the ranks share: the ballots of every round that some rank has not read yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.readers: dict[int, int] = {}
        self.broken: str | None = None


class ThreadGroup(Group):
    """One rank of a group of threads; make all of them with `ThreadGroup.create(size)`."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._round = 0

    @classmethod
    def create(cls, size: int) -> list[ThreadGroup]:
        """The `size` ranks of a new group, in rank order.

        Raises:
            ConfigError: `size` is not positive.
        """
        if size < 1:
            raise ConfigError(f"a group has at least one rank, got size {size}")
        meeting = _Meeting(size)
        return [cls(meeting, rank) for rank in range(size)]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def exchange(self, ballot: bytes, *, deadline: float) -> list[bytes]:
        meeting, number = self._meeting, self._round
        self._round += 1
        with meeting.changed:
            ballots = meeting.rounds.setdefault(number, {})
            ballots[self._rank] = ballot
            meeting.changed.notify_all()
            # A complete round is an answer even past the deadline: every other rank sees it complete too.
            while len(ballots) < meeting.size:
                remaining_s = deadline - time.monotonic()
                if meeting.broken is None and remaining_s > 0:
                    meeting.changed.wait(remaining_s)
                    continue
                missing = sorted(set(range(meeting.size)) - set(ballots))
                meeting.broken = meeting.broken or f"rank {self._rank} gave up waiting for ranks {missing}"
                meeting.changed.notify_all()
                raise VerdictInDoubt(
                    f"the ballots of ranks {missing} did not arrive by the deadline ({meeting.broken}); "
                    "tear this group down",
                    rank=self._rank,
                )
            self._forget_when_read(number)
            return [ballots[rank] for rank in range(meeting.size)]

    def _forget_when_read(self, number: int) -> None:
        meeting = self._meeting
        meeting.readers[number] = meeting.readers.get(number, 0) + 1
        if meeting.readers[number] == meeting.size:
            del meeting.rounds[number], meeting.readers[number]
