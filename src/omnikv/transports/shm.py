"""The transport between processes of one host: payloads lie in shared memory, small messages say where.

Theory of operation. A source owns a pool of memfd segments that it touches once and reuses for life (`shm_pool`). Every
rank listens at an abstract Unix address that both stages compute from user, edge, side, rank and reader
(`shm_address`), and knocks on its peers when it opens; since each listens before it knocks, whoever comes second meets
the other, and nobody polls. Over a connection (`shm_door`, `shm_link`, and `link_loop` for what all transports share)
both say Hello with their identity and facts and judge the other's; only the same user may speak. A target then sends
Want (`wants`); the source answers Ready at once or when the payload is published, straight from the publishing thread,
or Over (`offers`, with the table of `ledger`). Who waits already is told by Forming where the payload is being written
and how it will begin, so that it is awake and prepared; of one that takes the place of the latest it knows, and is only
woken, by Soon (`shm_shelf`). Before the first Ready in a segment its descriptor travels over the connection, once; the
target maps it and reads the payload in place (`shm_window`). Ack ends the payload's life at the source, Return makes it
ready again, and so does the end of the connection. When several connections of one pair come up, the target uses the
first whose greeting ends and closes the others; the source answers on whichever it was asked.

A source that dies closes its connection: waiting gets fail at once, while data that is leased already stays readable,
because the reader's mapping keeps the memory alive. Nothing has a name in a file system, so a kill leaves nothing
behind and a restart works at once.

Both stages must share the network namespace (abstract addresses belong to one) and the user. A forked child has no use
of its parent's transport: it closes its copies of the descriptors, and every call raises.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from omnikv.errors import TransportUnavailable
from omnikv.transports.base import Capabilities, Endpoint, Seat
from omnikv.transports.link_loop import MAX_UNREADY_LINKS
from omnikv.transports.links import Link
from omnikv.transports.pair import PairTransport
from omnikv.transports.shm_door import ShmDoor
from omnikv.transports.shm_link import ShmLink
from omnikv.transports.shm_pool import DEFAULT_SEGMENT_NBYTES, Pool
from omnikv.transports.shm_shelf import ShmShelf
from omnikv.transports.shm_window import ShmWindow


def is_debugging() -> bool:
    """Whether the environment asks for checks that cost time: OMNIKV_DEBUG is set, to anything but 0."""
    return os.environ.get("OMNIKV_DEBUG", "0") not in ("", "0")


class ShmSockets:
    """The Unix sockets of one end."""

    max_strangers = MAX_UNREADY_LINKS

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def open_door(
        self,
        adopt: Callable[[socket.socket, Seat | None], None],
        count: Callable[[str, str], None],
        wake: Callable[[], None],
    ) -> ShmDoor:
        """The door at this end's own address."""
        return ShmDoor(self._endpoint, adopt, count, wake)

    def open_link(self, connection: socket.socket, seat: Seat | None, watch: Callable[[Link], None]) -> ShmLink:
        """The link over one connection, which understands what this side is told."""
        return ShmLink(connection, seat, self._endpoint.side, watch)


class ShmTransport(PairTransport):
    """Moves payloads between processes of one host and user, through a pool of shared memory.

    `pool_nbytes` bounds a source's pool (None: 2 GiB, or half of the memory allowed where that is less), which grows by
    `segment_nbytes` or by a payload's size where that is more; the first `prefault_nbytes` of it are made at the start,
    which takes about a millisecond a MiB that the first payloads would wait for else. With `debug` (None: where the
    environment has OMNIKV_DEBUG) what is released is overwritten with ones, so that a stale read shows. A target
    ignores these. `counters` counts what went wrong with peers, by kind.

    Raises:
        ConfigError: a size is wrong or more than the system allows, or the facts are too long for one message.
        TransportUnavailable: this is not Linux.
        TransportError: another process serves this rank, or the system refuses.
    """

    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        cross_process=True, cross_host=False, shared_memory=True, notices_peer_death=True
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        pool_nbytes: int | None = None,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
        prefault_nbytes: int = 0,
        debug: bool | None = None,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise TransportUnavailable(f"shm: needs Linux, this is {sys.platform}", transport=self.name)
        is_source = endpoint.side == "source"
        self._pool = Pool(
            pool_nbytes if is_source else None,
            segment_nbytes,
            prefault_nbytes=prefault_nbytes if is_source else 0,
            poison=is_debugging() if debug is None else debug,
        )
        super().__init__(endpoint, ShmSockets(endpoint), shelf=partial(ShmShelf, self._pool), window=ShmWindow)

    @property
    def pool(self) -> Pool:
        """The source's memory; a target's stays empty."""
        return self._pool
