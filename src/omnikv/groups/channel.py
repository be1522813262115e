"""A group's own connections for its votes: a star around rank 0, formed once, without collectives that block.

Theory of operation. Rank 0 listens, and every other rank connects to it once (`omnikv.groups.channel_form`). A
follower's ballots go out as one message a call, rulings come back; what a ballot or a ruling does is said by
`omnikv.core.vote` and kept in a ledger (`omnikv.groups.channel_ledger`), one state a request, so that requests never
wait for one another. Sending never blocks, and no thread stands between a caller and its peers: the thread that waits
in `agree` reads the connections itself (`omnikv.groups.channel_switchboard`). A vote that nothing else stands beside
and on which all ranks agree passes the ledgers by (`omnikv.groups.channel_lane`).

A peer whose connection ends is gone at once: the leader then drops what lacks its ballot, a follower that lost the
leader is in doubt. A peer that hangs is noticed by the deadline of each request. The leader stops waiting at the
earliest deadline that it knows of, its own or, where they share a clock, a follower's; a follower waits
`RULING_GRACE_S` longer than its deadline, because a ruling made at the deadline is still under way. After a doubt, or
without its leader, a follower's channel takes no further vote. A peer that says something else than ballots or rulings
in their order is treated as gone, with that as the reason.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Literal

from omnikv.core.messages import Ballot, Ruling
from omnikv.groups.base import Agreement, Group
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_form import connect_star
from omnikv.groups.channel_link import DEAF_AFTER_S
from omnikv.groups.channel_switchboard import Switchboard

RULING_GRACE_S = 0.25


class PendingRuling:
    """A ruling that was asked for and may not be there yet."""

    def __init__(self, switchboard: Switchboard, call: Call, rank: int) -> None:
        self._switchboard = switchboard
        self._call = call
        self._rank = rank

    def done(self) -> bool:
        """Whether `result` returns, or raises, without waiting."""
        return not self._call.left

    def result(self) -> Ruling:
        """The ruling; waits until the vote's deadline at most.

        Raises:
            VerdictInDoubt: this rank voted and cannot learn the ruling; tear the group down.
        """
        self._switchboard.wait(self._call)
        return self._call.outcome(self._rank)[0]


class Channel(Agreement):
    """One rank's seat in its group's votes, over connections of their own; make it with `Channel.form`.

    Threads may share it. A rank votes on a key again only after the ruling on its last vote.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, socket.socket],
        *,
        shares_clock: bool,
        deaf_after_s: float = DEAF_AFTER_S,
    ) -> None:
        """`connections` lead to every other rank at rank 0, to rank 0 elsewhere; they are the channel's from now on.

        `shares_clock` says that all ranks read one monotonic clock. A peer that reads nothing for `deaf_after_s`
        although something waits for it is given up.
        """
        self._rank = rank
        self._size = size
        self._grace_s = RULING_GRACE_S if rank else 0.0
        self._switchboard = Switchboard(rank, size, connections, shares_clock=shares_clock, deaf_after_s=deaf_after_s)

    @classmethod
    def form(
        cls,
        group: Group,
        *,
        facts: Mapping[str, str] | None = None,
        deadline: float,
        address: tuple[str, int] = ("127.0.0.1", 0),
        over: Literal["auto", "tcp"] = "auto",
    ) -> Channel:
        """This rank's channel, once every rank of `group` has one; all of them must call this.

        `facts` are settings by name that must be equal on all ranks. Ranks of one user on one host speak over a Unix
        socket; others, or all with `over="tcp"`, over TCP at rank 0's `address` (port 0: any free one), which all must
        be able to reach. Nothing listens any more when this returns.

        Raises:
            ConfigError: facts differ, or ranks on several hosts were given no address that they can reach; raised on
                every rank.
            ConnectError: not every rank came and proved itself by `deadline`, or rank 0 cannot listen.
            VerdictInDoubt: the group's own exchange failed.
        """
        connections, shares_clock = connect_star(group, dict(facts or {}), deadline, address, over)
        return cls(group.rank, group.size, connections, shares_clock=shares_clock)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def agree(self, key: str, ballot: Ballot, *, deadline: float) -> Ruling:
        call = Call(((key, ballot),), deadline, self._grace_s)
        self._switchboard.run(call)
        return call.outcome(self._rank)[0]

    def agree_many(self, votes: Sequence[tuple[str, Ballot]], *, deadline: float) -> list[Ruling]:
        """The rulings on many requests, in the order of `votes`; their ballots travel together.

        Raises:
            ConfigError: a key is unusable, or comes twice, or the ballots are too long.
            LocalProtocolError: a vote on one of the keys is open, its round is another, or the channel is closed;
                nothing was cast.
            VerdictInDoubt: this rank voted and cannot learn one of the rulings; tear the group down.
        """
        if not votes:
            return []
        call = Call(votes, deadline, self._grace_s)
        self._switchboard.run(call)
        return call.outcome(self._rank)

    def submit(self, key: str, ballot: Ballot, *, deadline: float) -> PendingRuling:
        """The ruling to come; returns at once, and the vote goes on by itself.

        Raises:
            ConfigError, LocalProtocolError, VerdictInDoubt: as `agree_many`; nothing was cast.
        """
        call = Call(((key, ballot),), deadline, self._grace_s)
        self._switchboard.start(call)
        return PendingRuling(self._switchboard, call, self._rank)

    def close(self) -> None:
        """Nothing; ends the connections, and with doubt every vote that is still open. Idempotent."""
        self._switchboard.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
