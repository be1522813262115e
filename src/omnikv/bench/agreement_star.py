"""The least that a vote among processes can cost in Python: the floor under the channel's figures.

The same star as a channel's over plain sockets. Ballots are encoded, sent, and compared as bytes at rank 0, which
answers with one byte. Nothing else is there that makes a vote: no keys, deadlines, rulings, threads, peers that fail.
"""

from __future__ import annotations

import secrets
import select
import socket
from collections.abc import Sequence

import msgspec

from omnikv.core.messages import Ballot
from omnikv.groups.base import Group

_READ_NBYTES = 65536
_GIVE_UP_AFTER_S = 60.0
_ALIKE = b"1"
_NOT_ALIKE = b"0"

_encode = msgspec.msgpack.Encoder().encode


class BareStar:
    """One rank's end of the star."""

    def __init__(self, group: Group, *, deadline: float) -> None:
        """All ranks of `group` make theirs at once."""
        self._leads = group.rank == 0
        self._epoll = select.epoll()
        if self._leads:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                name = b"\0omnikv-bench-" + secrets.token_hex(16).encode()
                listener.bind(name)
                listener.listen(group.size)
                group.exchange(name, deadline=deadline)
                ends = [listener.accept()[0] for _ in range(1, group.size)]
        else:
            self._leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._leader.connect(group.exchange(b"", deadline=deadline)[0])
            ends = [self._leader]
        self._ends = {end.fileno(): end for end in ends}
        for end in ends:
            self._epoll.register(end, select.EPOLLIN)

    def agree(self, votes: Sequence[tuple[str, Ballot]]) -> bool:
        """Whether every rank casts the same."""
        encoded = _encode(votes)
        if not self._leads:
            self._leader.send(encoded)
            self._epoll.poll(_GIVE_UP_AFTER_S)
            return self._leader.recv(1) == _ALIKE
        left, is_alike = len(self._ends), True
        while left:
            for fd, _ in self._epoll.poll(_GIVE_UP_AFTER_S):
                is_alike &= self._ends[fd].recv(_READ_NBYTES) == encoded
                left -= 1
        for end in self._ends.values():
            end.send(_ALIKE if is_alike else _NOT_ALIKE)
        return is_alike

    def close(self) -> None:
        """Nothing; ends the connections."""
        self._epoll.close()
        for end in self._ends.values():
            end.close()
