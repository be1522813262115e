"""Whole messages in a stream of bytes: a length in four bytes, most significant first, and that many bytes.

No I/O: bytes go in as they came, frames come out. What a stranger announces is not believed: a length over the bound is
refused before a byte of it is kept, so nobody makes this side hold more than one frame and one read.
"""

from __future__ import annotations

from collections.abc import Iterator

from omnikv.errors import ConfigError, RemoteProtocolError

LENGTH_NBYTES = 4
MAX_LENGTH = 2**32 - 1


def frame(payload: bytes) -> bytes:
    """`payload` as it travels."""
    return len(payload).to_bytes(LENGTH_NBYTES, "big") + payload


class FrameCutter:
    """Cuts one stream into its frames, none longer than `max_frame_nbytes`."""

    def __init__(self, max_frame_nbytes: int) -> None:
        if not 0 < max_frame_nbytes <= MAX_LENGTH:
            raise ConfigError(f"a frame's bound must be from 1 to {MAX_LENGTH} bytes, got {max_frame_nbytes}")
        self._max_frame_nbytes = max_frame_nbytes
        self._rest = b""

    @property
    def held_nbytes(self) -> int:
        """How many bytes of an unfinished frame are kept."""
        return len(self._rest)

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The frames that `received` completes. Take all of them before feeding more.

        Raises:
            RemoteProtocolError: a frame is announced that is longer than allowed, or empty.
        """
        stream = self._rest + received if self._rest else received
        self._rest = b""
        at = 0
        while len(stream) - at >= LENGTH_NBYTES:
            length = int.from_bytes(stream[at : at + LENGTH_NBYTES], "big")
            if not 0 < length <= self._max_frame_nbytes:
                raise RemoteProtocolError(
                    f"a message of {length} bytes is announced, 1 to {self._max_frame_nbytes} are taken"
                )
            end = at + LENGTH_NBYTES + length
            if end > len(stream):
                break
            yield stream[at + LENGTH_NBYTES : end]
            at = end
        self._rest = stream[at:]
