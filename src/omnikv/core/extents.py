"""Room in one stretch of memory, handed out best fit and joined again when it comes back; numbers only, no memory.

Holes are kept sorted by offset and never touch one another: giving room back joins it with its neighbours at once, so
that whatever order things end in, an empty stretch is one hole again.
"""

from __future__ import annotations

from bisect import bisect_left

from omnikv.errors import ConfigError, LocalProtocolError


class Extents:
    """The free and taken room of `nbytes` bytes, in multiples of `align_nbytes`.

    Raises:
        ConfigError: `align_nbytes` is not positive, or `nbytes` is not a positive multiple of it.
    """

    def __init__(self, nbytes: int, *, align_nbytes: int) -> None:
        if align_nbytes <= 0 or nbytes <= 0 or nbytes % align_nbytes:
            raise ConfigError(f"a stretch of {nbytes} bytes is no positive multiple of {align_nbytes} bytes")
        self.nbytes = nbytes
        self.align_nbytes = align_nbytes
        self._hole_starts = [0]
        self._hole_ends = [nbytes]
        self._taken: dict[int, int] = {}

    @property
    def free_nbytes(self) -> int:
        """How many bytes are in holes, of whatever size."""
        return self.nbytes - sum(self._taken.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    def take(self, nbytes: int) -> int | None:
        """The offset of room for `nbytes` in the smallest hole that has it, or None; 0 bytes take one unit too."""
        size = self.round_up(nbytes)
        best: int | None = None
        for index, (start, end) in enumerate(self._holes()):
            hole = end - start
            if hole >= size and (best is None or hole < self._hole_ends[best] - self._hole_starts[best]):
                best = index
                if hole == size:
                    break
        if best is None:
            return None
        offset = self._hole_starts[best]
        self._taken[offset] = size
        if offset + size == self._hole_ends[best]:
            del self._hole_starts[best], self._hole_ends[best]
        else:
            self._hole_starts[best] = offset + size
        return offset

    def give(self, offset: int) -> None:
        """Nothing; the room that `take` gave at `offset` is free again.

        Raises:
            LocalProtocolError: nothing is taken at `offset`.
        """
        size = self._taken.pop(offset, None)
        if size is None:
            raise LocalProtocolError(f"no room is taken at offset {offset}; it was given back before or never taken")
        start, end = offset, offset + size
        index = bisect_left(self._hole_starts, start)
        if index < len(self._hole_starts) and self._hole_starts[index] == end:
            end = self._hole_ends.pop(index)
            del self._hole_starts[index]
        if index and self._hole_ends[index - 1] == start:
            self._hole_ends[index - 1] = end
        else:
            self._hole_starts.insert(index, start)
            self._hole_ends.insert(index, end)

    def round_up(self, nbytes: int) -> int:
        """The room that `nbytes` take: the next multiple of the alignment, at least one unit."""
        return max(1, -(-nbytes // self.align_nbytes)) * self.align_nbytes

    def _holes(self) -> zip[tuple[int, int]]:
        return zip(self._hole_starts, self._hole_ends, strict=True)
