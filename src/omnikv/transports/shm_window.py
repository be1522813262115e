"""How a shm target sees its sources' payloads: it maps each segment shared with it, once, and reads in place."""

from __future__ import annotations

from typing import Any

from omnikv.core.messages import Forming, Ready, Retired, Segment, Soon
from omnikv.errors import RemoteProtocolError
from omnikv.transports.links import Link
from omnikv.transports.shm_address import is_sealed
from omnikv.transports.shm_map import map_for_reading
from omnikv.transports.shm_pool import MAX_SEGMENTS
from omnikv.transports.window import Arrival, Preparation, Vanished


class ShmWindow:
    """The segments that sources share with this target. A mapping ends with the last view of it."""

    def __init__(self) -> None:
        self._segments: dict[Link, dict[int, memoryview]] = {}
        # Where the latest payload of each source lay, or is being written.
        self._latest: dict[Link, tuple[int, int, memoryview]] = {}

    def handle(self, link: Link, message: Any, extra: list[int]) -> Arrival | Preparation | Vanished | None:
        """The payload that lies ready in shared memory, or will; maps a shared segment, and forgets a retired one.

        Raises:
            RemoteProtocolError: descriptors that belong to nothing, memory that could vanish, or no such place.
        """
        if bool(extra) != isinstance(message, Segment):
            raise RemoteProtocolError("a descriptor belongs to a Segment and to nothing else")
        if isinstance(message, Ready):
            return Arrival(message.ask, message.lease, self._find(link, message))
        if isinstance(message, Forming):
            return Preparation(message.ask, self._find(link, message), message.head)
        if isinstance(message, Soon):
            return Preparation(message.ask)
        if isinstance(message, Segment):
            self._map(link, message, extra)
        elif isinstance(message, Retired):
            self._segments[link].pop(message.segment, None)
            if link in self._latest and self._latest[link][0] == message.segment:
                del self._latest[link]
            return Vanished()
        return None

    def expected(self, link: Link) -> memoryview | None:
        """Where the latest payload lay: a source that takes room and gives it back takes the same again."""
        latest = self._latest.get(link)
        return None if latest is None else latest[2]

    def link_ready(self, link: Link) -> None:
        """A source that has shared nothing yet."""
        self._segments[link] = {}

    def link_gone(self, link: Link) -> None:
        """Nothing; forgets its segments, which stay mapped while they are read."""
        self._segments.pop(link, None)
        self._latest.pop(link, None)

    def given_up(self, link: Link, ask: int) -> None:
        """Nothing; what is not asked for costs nothing here."""

    def close(self) -> None:
        """Nothing; forgets all."""
        self._segments.clear()
        self._latest.clear()

    def _find(self, link: Link, told: Ready | Forming) -> memoryview:
        segment = self._segments[link].get(told.segment)
        if segment is None or told.offset + told.nbytes > segment.nbytes:
            raise RemoteProtocolError(f"a payload outside of shared memory: {told}")
        latest = self._latest.get(link)
        if latest is not None and latest[:2] == (told.segment, told.offset) and len(latest[2]) == told.nbytes:
            # The very same view, so that it is seen at once to be what was prepared for.
            return latest[2]
        view = segment[told.offset : told.offset + told.nbytes]
        self._latest[link] = told.segment, told.offset, view
        return view

    def _map(self, link: Link, shared: Segment, fds: list[int]) -> None:
        segments = self._segments[link]
        if len(fds) != 1 or shared.segment in segments or len(segments) >= MAX_SEGMENTS:
            raise RemoteProtocolError(
                f"segment {shared.segment} comes with {len(fds)} descriptors, or again, or after {MAX_SEGMENTS} others"
            )
        if not is_sealed(fds[0], shared.nbytes):
            raise RemoteProtocolError(f"segment {shared.segment} is no sealed memory of {shared.nbytes} bytes")
        try:
            segments[shared.segment] = map_for_reading(fds[0], shared.nbytes)
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(
                f"segment {shared.segment} of {shared.nbytes} bytes cannot be mapped: {error}"
            ) from error
