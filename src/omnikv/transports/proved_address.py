"""Where ranks that meet over TCP listen and call: addresses, who may listen where, ports by formula.

`transport` is the name of the transport, for messages.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

from omnikv.core.topology import kv_zmq_port
from omnikv.errors import ConfigError, TransportError
from omnikv.transports.base import Endpoint
from omnikv.transports.pairing import describe

# Every rank of a large stage may call at once when it starts.
CONNECTIONS_WAITING = 4096
DEFAULT_LISTEN = "127.0.0.1:0"

Peers: TypeAlias = "Mapping[int, str] | Callable[[int], str | None]"


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: object, setting: str, transport: str) -> Address:
    """The address that `text` spells as "host:port" (IPv6 hosts in brackets); `setting` is named where it is none.

    Raises:
        ConfigError: it is no address, or the port is no port.
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{transport}: {setting} must be an address like 10.0.0.7:5600 or [::1]:5600, got {text!r}")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether `host` is this very host and cannot be called from another."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def source_address(host: str, base_port: int, from_stage: int, *, rank: int = 0, replica: int = 0) -> str:
    """The address of a source by the published formula, with a term for stage, rank and replica: nobody is asked.

    The port is `base_port` + 100 + replica * 1024 + rank * KV_RANK_PORT_STRIDE + stage, as released engines compute it.

    Raises:
        TopologyError: the stage does not fit in a rank's stride, a term is negative, or the port is no port.
    """
    return str(Address(host, kv_zmq_port(base_port, from_stage, rank, replica)))


def listen(endpoint: Endpoint, address: Address, transport: str) -> socket.socket:
    """The socket at which `endpoint` may be called; port 0 takes any free one.

    Raises:
        TransportError: the port is taken, or this host has no such address.
    """
    try:
        with ExitStack() as on_failure:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            listener = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # A restart may not have to wait for the last life's connections to be forgotten.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(CONNECTIONS_WAITING)
            on_failure.pop_all()
    except OSError as error:
        remedy = "choose an address of this host for the option listen"
        if error.errno == errno.EADDRINUSE:
            remedy = (
                f"another process, or this rank's other transport, holds port {address.port} of {address.host}: end "
                "it, or change the option listen (port 0 takes any free one; the formula of `source_address` has terms "
                "for stage, rank and replica)"
            )
        raise TransportError(
            f"{transport}: {describe(endpoint)} cannot listen at {address} ({error.strerror or error}): {remedy}",
            transport=transport,
            endpoint=str(address),
            rank=endpoint.rank,
        ) from error
    return listener


class PeerBook:
    """Where the sources of a target listen: given at the start, or asked of the caller whenever one is called.

    Raises:
        ConfigError: it is neither a table nor a function, or an address in it is none.
    """

    def __init__(self, peers: Peers | None, transport: str) -> None:
        if peers is not None and not callable(peers) and not isinstance(peers, Mapping):
            raise ConfigError(
                f"{transport}: peers must map source ranks to addresses, or be a function that does, got {peers!r}"
            )
        self._transport = transport
        self._peers = peers
        if isinstance(peers, Mapping):
            # Keys come as text where the table was read from a file.
            known = {int(rank): parse_address(text, f"peers[{rank}]", transport) for rank, text in peers.items()}
            self._peers = {rank: str(address) for rank, address in known.items()}
        self._resolved: dict[Address, tuple[socket.AddressFamily, tuple[object, ...]]] = {}

    @property
    def is_table(self) -> bool:
        """Whether all addresses were given at the start."""
        return not callable(self._peers)

    def known(self) -> list[Address]:
        """The addresses that were given at the start."""
        if not isinstance(self._peers, Mapping):
            return []
        return [parse_address(text, "peers", self._transport) for text in self._peers.values()]

    def find(self, rank: int) -> Address | None:
        """Where source `rank` listens, or None while nobody has said.

        Raises:
            ConfigError: a table was given that has no such rank, or a function raised or gave no address.
        """
        if isinstance(self._peers, Mapping):
            if rank not in self._peers:
                raise ConfigError(
                    f"{self._transport}: the option peers has no address for source rank {rank}; it knows ranks "
                    f"{sorted(self._peers)}"
                )
            return parse_address(self._peers[rank], f"peers[{rank}]", self._transport)
        if self._peers is None:
            raise ConfigError(
                f"{self._transport}: a target needs the option peers: a table of source ranks and addresses "
                "(`transport.address` of each source), or a function from rank to address"
            )
        try:
            text = self._peers(rank)
        except Exception as error:  # edge: the caller's own function, called from the transport's thread
            raise ConfigError(
                f"{self._transport}: the function peers failed for source rank {rank}: {error!r}"
            ) from error
        if text is None:
            return None
        return parse_address(text, f"what the function peers gave for rank {rank}", self._transport)

    def resolve(self, address: Address) -> tuple[socket.AddressFamily, tuple[object, ...]]:
        """The socket family and address to connect to. Names are looked up once, which may take as long as it takes.

        Raises:
            OSError: no such host.
        """
        if address not in self._resolved:
            family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            self._resolved[address] = (family, place)
        return self._resolved[address]
