"""What a group is: the ranks that run one request in lockstep, and one exchange of ballots between them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from omnikv.core.messages import Ballot, Ruling


class Group(ABC):
    """One rank's view of the ranks it acts in lockstep with. All must call `exchange` for the same requests."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank within the group, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks the group has."""

    @abstractmethod
    def exchange(self, ballot: bytes, *, deadline: float) -> list[bytes]:
        """Every rank's ballot, in rank order, the same list on every rank.

        `deadline` is on the monotonic clock, in seconds.

        Raises:
            VerdictInDoubt: this rank's ballot is out and the others' are not all here by `deadline`; peers may have
                decided either way.
        """


class Agreement(ABC):
    """One rank's seat in the votes of its group: a ballot a request and round in, the group's ruling out."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank within the group, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks the group has."""

    @abstractmethod
    def agree(self, key: str, ballot: Ballot, *, deadline: float) -> Ruling:
        """The ruling on this round of the request `key`; "refetch" asks for another ballot with the next round.

        Every rank votes once in every round, in any order of requests. `deadline` is on the monotonic clock.

        Raises:
            VerdictInDoubt: this rank voted and cannot learn the ruling by `deadline`; tear the group down.
            RemoteProtocolError: a peer does not keep to the protocol; the same holds.
        """
