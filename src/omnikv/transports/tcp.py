"""The transport between hosts: payloads travel over TCP connections whose ends have proved themselves.

Theory of operation. A source listens (`proved_door`); a target calls each of its sources, and calls again while there
is none. On every connection both sides first prove that they know one secret (`omnikv.core.authentication` and
`proved_greeting`), over TLS where that is configured; before that nothing is decoded, remembered or answered beyond a
fixed number of bytes. Over the proved *control link* (`proved_link`) they say Hello and judge each other's facts, and
speak as over every transport: Want, Over, Ack, Return (`wants`, `offers`).

A payload itself never travels over the control link, so that nothing that is said waits behind bytes. The target opens
*lanes* beside it (`tcp_lanes`), proved in the same way and bound to this life of both ends. When a payload is leased to
it, the target pulls it over a lane (`tcp_window`, `tcp_pull`), and the source sends it piece by piece, each pull in its
turn (`tcp_shelf`, `tcp_serve`). The bytes go from the source's warm pool to the target's warm pool; the lease is
readable once they are whole. While a payload is still being written, a target that waits for it already pulls what is
written: those bytes mean nothing before the source publishes, which then has little left to send.

A lane that breaks is opened again, and what it carried goes on where it stopped, within the same lease. A control link
that breaks ends its leases: whoever waits is told at once, the source offers the payloads again, and the target calls
again. A peer whose host is gone is noticed by keep-alive, after `dead_after_s`; one that is there and does not move its
lane, after the same time. Each process is told from its earlier life, so nothing of the old one reaches the new.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from omnikv.core.authentication import Claim
from omnikv.errors import ConfigError
from omnikv.transports.base import Capabilities, Endpoint
from omnikv.transports.links import Link
from omnikv.transports.offers import Offers
from omnikv.transports.pair import PairTransport
from omnikv.transports.proved_address import DEFAULT_LISTEN, Peers
from omnikv.transports.proved_door import LaneCall
from omnikv.transports.proved_sockets import DEFAULT_DEAD_AFTER_S, Meeting, ProvedSockets
from omnikv.transports.proved_stream import Stream
from omnikv.transports.shared_secret import SecretCallback
from omnikv.transports.shm_map import make_private_segment
from omnikv.transports.shm_pool import DEFAULT_SEGMENT_NBYTES, Pool
from omnikv.transports.tcp_lanes import LaneThread
from omnikv.transports.tcp_messages import ToTargetStreamed
from omnikv.transports.tcp_shelf import MAX_LANES_A_PEER, TcpShelf
from omnikv.transports.tcp_window import TcpWindow
from omnikv.transports.tls import Tls
from omnikv.transports.wants import Wants

DEFAULT_LANES = 2


class TcpTransport(PairTransport):
    """Moves payloads between processes that reach each other by TCP, on one host or several.

    A source listens at `listen`, "host:port" with port 0 for any free one; `address` says which it became. A target
    takes `peers`: the addresses of its sources by rank, as a table, or as a function that gives None while an address
    is not known (it is called under the transport's lock and must return at once).

    Who may connect is who knows the secret: `secret` (a function that returns it), or `secret_file`, or the variables
    OMNIKV_SECRET and OMNIKV_SECRET_FILE. Without any of them ends on loopback use the secret of their user
    (`shared_secret`), and others need `tls` (`tls.Tls`, or a mapping with its fields).

    A source's payloads lie in a pool of `pool_nbytes`, what a target receives in one of `landing_nbytes` (None: 2 GiB,
    or half of the memory allowed where that is less); both grow by `segment_nbytes`. `lanes` is how many connections
    carry payloads from one source. `dead_after_s` is how long a peer that does not answer is held for alive.
    `counters` counts what went wrong with peers, by kind.

    Raises:
        ConfigError: a setting is wrong, or an address beyond loopback has neither a secret nor TLS.
        TransportUnavailable: this is not Linux.
        TransportError: the address is taken, or the system refuses.
    """

    name: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        cross_process=True, cross_host=True, shared_memory=False, notices_peer_death=True
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        listen: str = DEFAULT_LISTEN,
        peers: Peers | None = None,
        secret: SecretCallback | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        tls: Tls | Mapping[str, Any] | None = None,
        pool_nbytes: int | None = None,
        landing_nbytes: int | None = None,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
        lanes: int = DEFAULT_LANES,
        dead_after_s: float = DEFAULT_DEAD_AFTER_S,
    ) -> None:
        if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= MAX_LANES_A_PEER:
            raise ConfigError(f"tcp: lanes must be 1 to {MAX_LANES_A_PEER}, got {lanes!r}")
        meeting = Meeting(
            listen=listen, peers=peers, secret=secret, secret_file=secret_file, tls=tls, dead_after_s=dead_after_s
        )
        self._sockets = ProvedSockets(endpoint, meeting, self, to_target=ToTargetStreamed)
        is_source = endpoint.side == "source"
        setting, nbytes = ("pool_nbytes", pool_nbytes) if is_source else ("landing_nbytes", landing_nbytes)
        self._pool = Pool(nbytes, segment_nbytes, make=make_private_segment, transport=self.name, setting=setting)
        self._num_lanes = lanes
        self._dead_after_s = float(dead_after_s)
        self._lanes: LaneThread | None = None
        with ExitStack() as on_failure:
            on_failure.callback(self._close_lanes)
            super().__init__(endpoint, self._sockets, shelf=self._open_shelf, window=self._open_window)
            on_failure.pop_all()
        self._lanes_here().start()

    @property
    def address(self) -> str:
        """Where this source may be called, "host:port"; a target listens nowhere and has the empty text."""
        return self._sockets.address

    @property
    def pool(self) -> Pool:
        """The memory of this end: a source's payloads, or what a target has received."""
        return self._pool

    def close(self) -> None:
        """Stop serving, end the threads, give descriptors and memory back; views stay readable. Idempotent."""
        super().close()
        if os.getpid() == self._pid:
            self._close_lanes()

    def forget(self, link: Link) -> None:
        """Nothing; ends a link that took too long. Call with the lock."""
        self._loop.forget(link)

    def lane_up(self, stream: Stream, peer: Claim, call: LaneCall | None) -> None:
        """Nothing; a lane is proved: one that `call` was made for, or one that a target opened. Call with the lock."""
        if call is not None:
            self._window.lane_up(stream, call)
        else:
            self._shelf.lane_up(stream, peer, self._loop.count)

    def let_go_of_lanes(self) -> None:
        """Nothing; in a forked child, closes its copies of the lanes' descriptors. Call with the lock."""
        self._lanes_here().let_go()

    def _open_shelf(self) -> TcpShelf:
        self._shelf = TcpShelf(self._pool, self._open_lanes(), self._lock, self._room_came_back)
        return self._shelf

    def _room_came_back(self) -> None:
        assert isinstance(self._source, Offers)
        self._source.room_came_back()

    def _open_window(self) -> TcpWindow:
        self._window = TcpWindow(
            self._pool, self._open_lanes(), self._lock, self._num_lanes, self._sockets, self._wants_here
        )
        return self._window

    def _wants_here(self) -> Wants:
        assert isinstance(self._target, Wants)
        return self._target

    def _open_lanes(self) -> LaneThread:
        self._lanes = LaneThread(
            f"omnikv-tcp-lanes-{self._endpoint.side}-{self._endpoint.rank}",
            self._lock,
            stall_s=self._dead_after_s,
            count=lambda kind, text: self._loop.count(kind, text),
            fault=self._break_down,
        )
        return self._lanes

    def _lanes_here(self) -> LaneThread:
        assert self._lanes is not None
        return self._lanes

    def _close_lanes(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    def _break_down(self, fault: BaseException) -> None:
        with self._lock:
            self._sockets.door.break_down(fault)
