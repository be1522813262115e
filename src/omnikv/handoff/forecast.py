"""How the next part from a source is likely to begin: as the latest did, under the name of its own request.

Whoever waits has time to read that head and to make the views of its tensors. Should the part begin like that in the
end, byte by byte, nothing is left to be done for it; else it was done in vain.
"""

from __future__ import annotations

from dataclasses import replace

from omnikv.core.keys import PayloadId
from omnikv.core.messages import MAX_FORMING_HEAD_NBYTES
from omnikv.core.wire import Header
from omnikv.errors import ConfigError
from omnikv.tensors.pack import sealed_head


class Forecast:
    """The latest head of each source of one receiver. Threads may share it."""

    def __init__(self) -> None:
        self._latest: dict[int, Header] = {}

    def note(self, identity: PayloadId, header: Header, nbytes: int) -> None:
        """Nothing; `header` is that of the latest part from its source, of `nbytes` in all."""
        # A peer may state megabytes.
        if header.scope == "header" and nbytes - header.data_nbytes <= MAX_FORMING_HEAD_NBYTES:
            self._latest[identity.source_rank] = header

    def head_of(self, identity: PayloadId) -> bytes:
        """How the part is likely to begin; empty where nothing tells, or the whole part is under a checksum."""
        latest = self._latest.get(identity.source_rank)
        if latest is None or latest.extension is None:
            return b""
        extension = replace(latest.extension, role=identity.role, attempt=identity.attempt)
        try:
            return sealed_head(replace(latest, request_id=identity.transfer_id, extension=extension))
        except ConfigError:
            # A peer's head may say what ours cannot.
            return b""
