"""The transport over NIXL: payloads are read by UCX, over the fastest network that it finds between two hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from omnikv.transports.base import Capabilities, Endpoint
from omnikv.transports.nixl_engine import NixlEngine
from omnikv.transports.one_sided import OneSidedTransport
from omnikv.transports.proved_address import DEFAULT_LISTEN, Peers
from omnikv.transports.proved_sockets import DEFAULT_DEAD_AFTER_S, Meeting
from omnikv.transports.shared_secret import SecretCallback
from omnikv.transports.shm_pool import DEFAULT_SEGMENT_NBYTES
from omnikv.transports.tls import Tls


class NixlTransport(OneSidedTransport):
    """Moves payloads between processes by NIXL, which picks the network; the variable UCX_TLS narrows the choice.

    `listen`, `peers`, `secret`, `secret_file`, `tls`, `dead_after_s`, `pool_nbytes`, `landing_nbytes` and
    `segment_nbytes` are those of `tcp.TcpTransport`: they settle who meets whom, over the link that is proved. UCX's
    own connections are not: over TCP they let anybody read or write this process's memory who reaches its port.

    With `lend`, a source's targets read paged caches where they lie, and nothing is gathered. Its caller promises to
    leave a request's blocks as they are until `census()["lent"]` says that none are lent, whatever becomes of it.

    Raises:
        ConfigError: a setting is wrong, or an address beyond loopback has neither a secret nor TLS.
        TransportUnavailable: this is not Linux, or NIXL is missing or does not start.
        TransportError: the address is taken, or the system refuses.
    """

    name: ClassVar[str] = "nixl"
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
        dead_after_s: float = DEFAULT_DEAD_AFTER_S,
        pool_nbytes: int | None = None,
        landing_nbytes: int | None = None,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
        lend: bool = False,
    ) -> None:
        meeting = Meeting(
            listen=listen, peers=peers, secret=secret, secret_file=secret_file, tls=tls, dead_after_s=dead_after_s
        )
        super().__init__(
            endpoint,
            meeting,
            NixlEngine,
            pool_nbytes=pool_nbytes,
            landing_nbytes=landing_nbytes,
            segment_nbytes=segment_nbytes,
            lend=lend,
        )
