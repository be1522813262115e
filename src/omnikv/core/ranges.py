"""Which bytes of something have come, when they come in pieces of any order: numbers only, no memory."""

from __future__ import annotations

from bisect import bisect_left

from omnikv.errors import RemoteProtocolError


class ReceivedRanges:
    """The bytes from 0 to `nbytes` that have come; each may come once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.received_nbytes = 0
        # Apart from one another, in order.
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether every byte has come."""
        return self.received_nbytes == self.nbytes

    def check(self, begin: int, end: int) -> None:
        """Nothing, when the bytes from `begin` to `end` may come: they are inside, and none of them has come.

        Raises:
            RemoteProtocolError: they are not, or some have.
        """
        if not 0 <= begin < end <= self.nbytes:
            raise RemoteProtocolError(f"bytes {begin} to {end} of {self.nbytes} are announced")
        at = bisect_left(self._begins, end)
        if at and self._ends[at - 1] > begin:
            come = f"{self._begins[at - 1]} to {self._ends[at - 1]}"
            raise RemoteProtocolError(f"bytes {begin} to {end} are announced, and {come} have come already")

    def add(self, begin: int, end: int) -> None:
        """Nothing; the bytes from `begin` to `end`, one or more, have come.

        Raises:
            RemoteProtocolError: as `check`.
        """
        self.check(begin, end)
        self.received_nbytes += end - begin
        at = bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == end:
            end = self._ends.pop(at)
            del self._begins[at]
        if at and self._ends[at - 1] == begin:
            self._ends[at - 1] = end
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
