"""Where the ranks of a shm transport listen, and who may speak to them.

A rank listens at an abstract Unix address, a digest of the user, the edge, its side, rank and reader: both stages
compute it without asking anybody, and it vanishes with the process that holds it, so a killed rank leaves nothing
behind. Abstract addresses have no permissions, therefore the user of each peer is asked of the kernel.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import struct
from contextlib import ExitStack
from typing import NamedTuple

from omnikv.core.keys import Edge
from omnikv.errors import TransportError
from omnikv.transports.base import Endpoint, Side
from omnikv.transports.pairing import describe

CONNECTIONS_WAITING = 128
_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    """The process at the other end, as the kernel names it."""

    pid: int
    uid: int
    gid: int


def rank_address(edge: Edge, side: Side, rank: int, reader: int = 0) -> bytes:
    """The abstract address of one reader of a rank: the same in every process of this user, and no other's."""
    text = "\0".join(("omnikv-shm", str(os.geteuid()), edge.encode(), side, str(rank), str(reader)))
    return b"\0omnikv-" + hashlib.blake2b(text.encode(), digest_size=20).hexdigest().encode()


def open_socket() -> socket.socket:
    """A Unix socket of whole packets that never blocks."""
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    return socket.socket(socket.AF_UNIX, kind)


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end of `connection` (for a connecting side: the one that listens)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def is_same_user(peer: Peer) -> bool:
    """Whether `peer` runs as this process's user; only then may it speak."""
    return peer.uid == os.geteuid()


def is_sealed(fd: int, nbytes: int) -> bool:
    """Whether `fd` is memory of exactly `nbytes` that can never shrink, so that reading it cannot fault."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return bool(seals & fcntl.F_SEAL_SHRINK) and os.fstat(fd).st_size == nbytes


def listen(endpoint: Endpoint) -> socket.socket:
    """The socket at which `endpoint` may be reached.

    Raises:
        TransportError: another process serves this rank, or the system refuses.
    """
    address = rank_address(endpoint.edge, endpoint.side, *endpoint.seat)
    try:
        with ExitStack() as on_failure:
            listener = on_failure.enter_context(open_socket())
            listener.bind(address)
            listener.listen(CONNECTIONS_WAITING)
            on_failure.pop_all()
    except OSError as error:
        remedy = "raise the limit that the system names"
        if error.errno == errno.EADDRINUSE:
            remedy = (
                f"{_holder_of(address)} serves this rank already; end it, close the other transport, or give this one "
                "its own rank, replica or namespace"
            )
        raise TransportError(
            f"shm: {describe(endpoint)} cannot listen ({error.strerror}): {remedy}",
            transport="shm",
            endpoint=address[1:].decode(),
            rank=endpoint.rank,
        ) from error
    return listener


def _holder_of(address: bytes) -> str:
    try:
        with open_socket() as probe:
            probe.connect(address)
            return f"process {peer_of(probe).pid}"
    except OSError:
        return "another process"
