"""The sockets of a transport whose ends meet over TCP and prove themselves: a source listens, a target calls.

Who may connect is who knows the secret, or holds a certificate; what is said over the proved links is the transport's.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from omnikv.core.authentication import LIFE_NBYTES, NONCE_NBYTES, Claim, digest_edge
from omnikv.core.messages import ToSource
from omnikv.errors import ConfigError, TransportUnavailable
from omnikv.transports.base import Endpoint, Seat
from omnikv.transports.links import Link
from omnikv.transports.pairing import describe
from omnikv.transports.proved_address import DEFAULT_LISTEN, Address, PeerBook, Peers, is_loopback, parse_address
from omnikv.transports.proved_address import listen as listen_at
from omnikv.transports.proved_door import MAX_GREETING, LaneOwner, ProvedDoor
from omnikv.transports.proved_greeting import Identity
from omnikv.transports.proved_link import ProvedLink
from omnikv.transports.shared_secret import SECRET_VARIABLE, SecretCallback, find_secret, user_secret
from omnikv.transports.tls import Tls, as_tls

DEFAULT_DEAD_AFTER_S = 10.0
GREETING_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How an end meets its peers; see `tcp.TcpTransport` for what each setting means."""

    listen: str = DEFAULT_LISTEN
    peers: Peers | None = None
    secret: SecretCallback | None = None
    secret_file: str | os.PathLike[str] | None = None
    tls: Tls | Mapping[str, Any] | None = None
    dead_after_s: float = DEFAULT_DEAD_AFTER_S


class ProvedSockets:
    """The TCP sockets of one end. `transport` takes what becomes of them.

    `to_source` and `to_target` are the unions of the messages that either side may be sent.

    Raises:
        ConfigError: a setting is wrong, or an address beyond loopback has neither a secret nor TLS.
        TransportUnavailable: this is not Linux, or no secret of this user can be made.
    """

    max_strangers = MAX_GREETING

    def __init__(
        self, endpoint: Endpoint, meeting: Meeting, transport: LaneOwner, *, to_source: Any = ToSource, to_target: Any
    ) -> None:
        name, dead_after_s = transport.name, meeting.dead_after_s
        if not sys.platform.startswith("linux"):
            raise TransportUnavailable(f"{name}: needs Linux, this is {sys.platform}", transport=name)
        if not isinstance(dead_after_s, (int, float)) or not 1 <= dead_after_s < math.inf:
            raise ConfigError(
                f"{name}: dead_after_s must be a finite number of seconds, 1 or more, got {dead_after_s!r}"
            )
        is_source = endpoint.side == "source"
        self.door: ProvedDoor
        self.address = ""
        self._endpoint = endpoint
        self._wanted = parse_address(meeting.listen, "listen", name)
        self._peers = PeerBook(meeting.peers, name)
        reached = [self._wanted] if is_source else self._peers.known()
        secret = find_secret(meeting.secret, meeting.secret_file, os.environ)
        self._identity = _identity_of(endpoint, reached, secret, as_tls(meeting.tls), name)
        if not is_source:
            for rank in endpoint.peer_ranks if self._peers.is_table else ():
                self._peers.find(rank)
        self._dead_after_s = float(dead_after_s)
        self._transport = transport
        self._from_peer = to_source if is_source else to_target

    def open_door(
        self,
        adopt: Callable[[socket.socket, Seat | None], None],
        count: Callable[[str, str], None],
        wake: Callable[[], None],
    ) -> ProvedDoor:
        """The door: open at a source, and shut at a target, which calls.

        Raises:
            TransportError: the address is taken, or this host has no such address.
        """
        listener = None
        if self._endpoint.side == "source":
            listener = listen_at(self._endpoint, self._wanted, self._transport.name)
            self.address = str(Address(self._wanted.host, listener.getsockname()[1]))
        self.door = ProvedDoor(
            self._endpoint,
            self._identity,
            listener,
            self._peers,
            greeting_s=GREETING_S,
            dead_after_s=self._dead_after_s,
            from_peer=self._from_peer,
            adopt=adopt,
            count=count,
            wake=wake,
            transport=self._transport,
        )
        return self.door

    def open_link(self, connection: socket.socket, seat: Seat | None, watch: Callable[[Link], None]) -> ProvedLink:
        """The link over one connection, which greets before anything else."""
        return self.door.open_link(connection, seat, watch)


def _identity_of(
    endpoint: Endpoint, reached: list[Address], secret: bytes | None, tls: Tls | None, transport: str
) -> Identity:
    exposed = [address for address in reached if not is_loopback(address.host)]
    if exposed and secret is None and tls is None:
        raise ConfigError(
            f"{transport}: {describe(endpoint)} is to use {exposed[0]}, which others than this host can reach, with "
            f"nothing to tell who may connect: set {SECRET_VARIABLE} (or secret_file=, secret=) to one secret at all "
            "ranks, or give tls="
        )
    claim = Claim(
        purpose="control",
        side=endpoint.side,
        rank=endpoint.rank,
        reader=endpoint.reader,
        edge=digest_edge(endpoint.edge.encode()),
        life=os.urandom(LIFE_NBYTES),
    )
    return Identity(
        claim=claim,
        secret=b"" if secret is None and tls is not None else secret or user_secret(),
        is_users_own=secret is None and tls is None,
        accepting=None if tls is None else tls.accepting(),
        calling=None if tls is None else tls.calling(),
        nonce=partial(os.urandom, NONCE_NBYTES),
    )
