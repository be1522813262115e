"""One payload at a tcp source: which of its bytes are final, and in which order they go out.

Ranges go out in the order in which they were written, which lets them travel while the rest is being written; a pull
that comes again after a lane broke gets what is left in that same order. Of all ranges only the last still changes: it
grows at its end when what is written next continues it, so that writers of neighbouring ranges make long pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omnikv.transports.links import Link
from omnikv.transports.shm_pool import Room
from omnikv.transports.tcp_messages import PIECE_NBYTES


@dataclass(slots=True, eq=False)
class Stretch:
    """One payload's bytes. `written` are its ranges in the order in which they became final, in large pieces.

    Changed with the transport's lock, and read without it.
    """

    room: Room
    token: int
    written: list[tuple[int, int]] = field(default_factory=list)
    # Ranges too small to be sent by themselves, where they begin and where they end: neighbours are joined.
    small: dict[int, int] = field(default_factory=dict)
    small_from_end: dict[int, int] = field(default_factory=dict)
    # Whether it is whole, and whether its life is over; `pins` counts the pulls that read it.
    is_whole: bool = False
    is_over: bool = False
    pins: int = 0
    shown_to: set[Link] = field(default_factory=set)

    def wrote(self, begin: int, end: int) -> bool:
        """Whether there is more to send by now: these bytes are final, and with their neighbours enough for a piece."""
        begin = self.small_from_end.pop(begin, begin)
        self.small.pop(begin, None)
        after = self.small.pop(end, None)
        if after is not None:
            del self.small_from_end[after]
            end = after
        if end - begin < PIECE_NBYTES:
            self.small[begin] = end
            self.small_from_end[end] = begin
            return False
        if self.written and self.written[-1][1] == begin:
            self.written[-1] = (self.written[-1][0], end)
        else:
            self.written.append((begin, end))
        return True

    def finish(self) -> None:
        """Nothing; all that was not given to be sent before is now."""
        if not self.is_whole:
            at = 0
            for begin, end in [*sorted(self.written), (self.room.nbytes, self.room.nbytes)]:
                if begin > at:
                    self.written.append((at, begin))
                at = end
            self.is_whole = True


class Sending:
    """One pull that is being answered: where in the order of the payload's ranges it is. For the lane thread."""

    def __init__(self, pull: int, stretch: Stretch, skip_nbytes: int) -> None:
        self.pull = pull
        self.stretch = stretch
        self.is_stopped = False
        self._index = 0
        self._within = skip_nbytes

    @property
    def has_piece(self) -> bool:
        """Whether something can be said now: bytes, or that there will be none."""
        return not self.is_stopped and (self.stretch.is_over or self._seek())

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to say."""
        return self.is_stopped or (self.stretch.is_whole and not self.stretch.is_over and not self._seek())

    def next_piece(self, longest_nbytes: int) -> tuple[int, memoryview]:
        """Where the next bytes belong, and they themselves: none where the payload is gone."""
        if self.stretch.is_over:
            self.is_stopped = True
            return 0, memoryview(b"")
        begin, end = self.stretch.written[self._index]
        start = begin + self._within
        stop = min(end, start + longest_nbytes)
        self._within += stop - start
        return start, self.stretch.room.view[start:stop]

    def _seek(self) -> bool:
        """Whether there are bytes to send, after stepping over ranges that are sent; the last may still grow."""
        written = self.stretch.written
        # Counted first: a range that another one follows by then grows no more.
        count = len(written)
        while self._index < count:
            begin, end = written[self._index]
            if self._within < end - begin:
                return True
            if self._index + 1 == count:
                return False
            self._within -= end - begin
            self._index += 1
        return False
