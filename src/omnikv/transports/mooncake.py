"""The transport over Mooncake's transfer engine: payloads are read by RDMA where there is any, by its TCP where not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from omnikv.errors import ConfigError
from omnikv.transports.base import Capabilities, Endpoint
from omnikv.transports.mooncake_engine import mooncake_engine
from omnikv.transports.one_sided import OneSidedTransport
from omnikv.transports.proved_address import DEFAULT_LISTEN, Peers, parse_address
from omnikv.transports.proved_sockets import DEFAULT_DEAD_AFTER_S, Meeting
from omnikv.transports.shared_secret import SecretCallback
from omnikv.transports.shm_pool import DEFAULT_SEGMENT_NBYTES
from omnikv.transports.tls import Tls

_ANY_HOST = ("0.0.0.0", "::", "*", "")


class MooncakeTransport(OneSidedTransport):
    """Moves payloads between processes by Mooncake's engine, with its `protocol` ("tcp", "rdma") and `devices`.

    `listen`, `peers`, `secret`, `secret_file`, `tls`, `dead_after_s`, `pool_nbytes`, `landing_nbytes` and
    `segment_nbytes` are those of `tcp.TcpTransport`: they settle who meets whom, over the link that is proved. The
    engine's own connections are not: it lets anybody read or write registered memory who reaches its port.

    `host` is this machine's address for the engine's peers; None is the host of `listen`, where that is one.

    Raises:
        ConfigError: a setting is wrong, or an address beyond loopback has neither a secret nor TLS.
        TransportUnavailable: this is not Linux, or the engine is missing or does not start.
        TransportError: the address is taken, or the system refuses.
    """

    name: ClassVar[str] = "mooncake"
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
        host: str | None = None,
        protocol: str = "tcp",
        devices: str = "",
    ) -> None:
        meeting = Meeting(
            listen=listen, peers=peers, secret=secret, secret_file=secret_file, tls=tls, dead_after_s=dead_after_s
        )
        if host is None:
            host = parse_address(listen, "listen", self.name).host
        if host in _ANY_HOST:
            raise ConfigError(
                f"{self.name}: listen={listen!r} is no address that a peer's engine can reach: give this machine's as "
                "the option host"
            )
        super().__init__(
            endpoint,
            meeting,
            partial(mooncake_engine, host, protocol, devices),
            pool_nbytes=pool_nbytes,
            landing_nbytes=landing_nbytes,
            segment_nbytes=segment_nbytes,
        )
