"""The door of a channel: both sides prove that they know the group's token before a word of the vote is taken.

The caller greets with its rank and a nonce. Rank 0 answers with a nonce of its own and HMAC-SHA256 of both under the
token; the caller checks that and answers with its own proof. Each proof names its side and the rank, so neither can be
sent back or used for another. When all ranks have proved themselves, rank 0 welcomes them all; until then nobody is
in. Over a Unix socket the kernel is asked as well that the other side runs as the same user.

Frames are short and bounded here, strangers are turned away one line each, and no one of them can hold up another:
rank 0 serves all who knock in turn, and beyond a number of them turns the oldest away.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from contextlib import ExitStack

import msgspec

from omnikv.core.messages import ChannelChallenge, ChannelGreeting, ChannelProof, ChannelWelcome
from omnikv.errors import ConnectError, RemoteProtocolError
from omnikv.groups.channel_link import LENGTH_NBYTES, Link

NONCE_NBYTES = 32
MAX_HANDSHAKE_NBYTES = 256
# Strangers who may stand at the door at once, beside the ranks that are awaited.
MAX_STRANGERS = 128
_RETRY_S = 0.005
# A caller waits so much longer than the deadline, so that rank 0 is the one to say who is missing.
_PATIENCE_S = 0.25
_CREDENTIALS = struct.Struct("3i")

_encode = msgspec.msgpack.Encoder().encode
_decode_from_caller = msgspec.msgpack.Decoder(ChannelGreeting | ChannelProof).decode
_decode_from_leader = msgspec.msgpack.Decoder(ChannelChallenge | ChannelWelcome).decode

log = logging.getLogger("omnikv.channel")


def prove(token: bytes, side: str, rank: int, caller_nonce: bytes, leader_nonce: bytes) -> bytes:
    """The proof that `side` ("leader" or "caller") of rank `rank`'s connection knows `token`."""
    text = b"/".join((b"omnikv-channel", side.encode(), str(rank).encode())) + b"/" + caller_nonce + leader_nonce
    return hmac.digest(token, text, hashlib.sha256)


def admit_all(listener: socket.socket, size: int, token: bytes, deadline: float) -> dict[int, socket.socket]:
    """The connections of ranks 1 to `size` - 1, each proved, when all are there.

    Raises:
        ConnectError: not all came by `deadline`, or one that had come went away.
    """
    door = _Door(listener, size, token)
    with ExitStack() as on_failure:
        on_failure.callback(door.close, keep_admitted=False)
        while len(door.admitted) < size - 1:
            door.serve(deadline)
        on_failure.pop_all()
    return door.welcome()


class _Guest:
    """Somebody at the door: `rank` is what it says, `is_proved` whether we believe it."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Link(connection, max_frame_nbytes=MAX_HANDSHAKE_NBYTES)
        self.rank = -1
        self.proof = b""
        self.is_proved = False


class _Door:
    """Rank 0's side, serving all who knock at once."""

    def __init__(self, listener: socket.socket, size: int, token: bytes) -> None:
        self.admitted: dict[int, _Guest] = {}
        self._size = size
        self._token = token
        self._listener = listener
        self._guests: dict[_Guest, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self, deadline: float) -> None:
        """Nothing; waits for those at the door and takes what they say.

        Raises:
            ConnectError: the deadline passed, or a rank that was in went away.
        """
        wait_s = deadline - time.monotonic()
        if wait_s <= 0:
            absent = sorted(set(range(1, self._size)) - set(self.admitted))
            raise ConnectError(
                f"ranks {absent} did not join the channel by the deadline: see their own logs",
                transport="channel",
                rank=0,
            )
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._let_in()
            elif key.data in self._guests:
                self._hear(key.data)

    def welcome(self) -> dict[int, socket.socket]:
        """The connections of all who are in, told so; everybody else is sent away."""
        for guest in self.admitted.values():
            guest.link.send(_encode(ChannelWelcome()))
        self.close(keep_admitted=True)
        return {rank: guest.link.connection for rank, guest in sorted(self.admitted.items())}

    def close(self, *, keep_admitted: bool) -> None:
        """Nothing; sends guests away."""
        self._selector.close()
        for guest in self._guests:
            if not (keep_admitted and guest.is_proved):
                guest.link.close()

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # It went away before it was let in, or no descriptor is free for it now.
            return
        if not _is_same_user(connection):
            log.warning("turned away a process of another user that called the channel")
            connection.close()
            return
        guest = _Guest(connection)
        self._guests[guest] = None
        self._selector.register(connection, selectors.EVENT_READ, guest)
        strangers = [guest for guest in self._guests if not guest.is_proved]
        if len(strangers) > MAX_STRANGERS + self._size:
            self._turn_away(strangers[0], "others wait behind it and it has not proved itself")

    def _hear(self, guest: _Guest) -> None:
        try:
            guest.link.receive(lambda _, frame: self._take(guest, frame))
        except (msgspec.DecodeError, UnicodeDecodeError, RemoteProtocolError) as error:
            guest.link.ended = str(error)
        if guest.link.ended is None:
            return
        if guest.is_proved:
            raise ConnectError(
                f"rank {guest.rank} left while the channel was being formed: {guest.link.ended}",
                transport="channel",
                rank=0,
            )
        self._turn_away(guest, guest.link.ended)

    def _take(self, guest: _Guest, frame: bytes) -> None:
        message = _decode_from_caller(frame)
        if isinstance(message, ChannelGreeting) and not guest.proof:
            if not 0 < message.rank < self._size:
                raise RemoteProtocolError(f"it calls itself rank {message.rank} of {self._size}")
            nonce = secrets.token_bytes(NONCE_NBYTES)
            guest.rank = message.rank
            guest.proof = prove(self._token, "caller", message.rank, message.nonce, nonce)
            answer = ChannelChallenge(nonce, prove(self._token, "leader", message.rank, message.nonce, nonce))
            guest.link.send(_encode(answer))
        elif isinstance(message, ChannelProof) and guest.proof and not guest.is_proved:
            if not hmac.compare_digest(message.proof, guest.proof):
                raise RemoteProtocolError("it does not know the group's token")
            if guest.rank in self.admitted:
                raise RemoteProtocolError(f"rank {guest.rank} is in already")
            guest.is_proved = True
            self.admitted[guest.rank] = guest
        else:
            raise RemoteProtocolError(f"it sent a {type(message).__name__} out of turn")

    def _turn_away(self, guest: _Guest, why: str) -> None:
        log.warning("turned away a caller of the channel: %s", why)
        del self._guests[guest]
        self._selector.unregister(guest.link.connection)
        guest.link.close()


def join(
    family: socket.AddressFamily, address: bytes | tuple[str, int], rank: int, token: bytes, deadline: float
) -> socket.socket:
    """The connection of rank `rank` to rank 0, proved by both and welcomed.

    Raises:
        ConnectError: rank 0 cannot be reached, is not who it should be, or does not welcome us by `deadline`.
    """
    try:
        connection = _connect(family, address, deadline)
    except OSError as error:
        raise _cannot_join(rank, address, f"it cannot be reached ({error.strerror or error})") from error
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        try:
            _introduce(connection, rank, token, deadline + _PATIENCE_S)
        except (msgspec.DecodeError, UnicodeDecodeError, RemoteProtocolError, OSError) as error:
            raise _cannot_join(rank, address, str(error)) from error
        on_failure.pop_all()
    return connection


def _connect(family: socket.AddressFamily, address: bytes | tuple[str, int], deadline: float) -> socket.socket:
    while (connection := _connect_once(family, address, max(deadline - time.monotonic(), 0.001))) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, "rank 0's queue stayed full")
        time.sleep(_RETRY_S)
    return connection


def _connect_once(
    family: socket.AddressFamily, address: bytes | tuple[str, int], wait_s: float
) -> socket.socket | None:
    with ExitStack() as on_failure:
        connection = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.settimeout(wait_s)
        try:
            connection.connect(address)
        except BlockingIOError:
            # A Unix listener whose queue is full says so at once instead of letting the caller wait.
            return None
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_failure.pop_all()
        return connection


def _introduce(connection: socket.socket, rank: int, token: bytes, deadline: float) -> None:
    if not _is_same_user(connection):
        raise RemoteProtocolError("a process of another user answers there")
    nonce = secrets.token_bytes(NONCE_NBYTES)
    _say(connection, ChannelGreeting(rank, nonce))
    challenge = _decode_from_leader(_next_frame(connection, deadline))
    if not isinstance(challenge, ChannelChallenge) or not hmac.compare_digest(
        challenge.proof, prove(token, "leader", rank, nonce, challenge.nonce)
    ):
        raise RemoteProtocolError("what answers there does not know the group's token")
    _say(connection, ChannelProof(prove(token, "caller", rank, nonce, challenge.nonce)))
    if not isinstance(_decode_from_leader(_next_frame(connection, deadline)), ChannelWelcome):
        raise RemoteProtocolError("it answered out of turn")


def _say(connection: socket.socket, message: msgspec.Struct) -> None:
    payload = _encode(message)
    connection.sendall(len(payload).to_bytes(LENGTH_NBYTES, "big") + payload)


def _next_frame(connection: socket.socket, deadline: float) -> bytes:
    """One frame and not a byte more: what follows the last one here is the channel's."""
    length = int.from_bytes(_receive_exactly(connection, LENGTH_NBYTES, deadline), "big")
    if length > MAX_HANDSHAKE_NBYTES:
        raise RemoteProtocolError(f"it announced a frame of {length} bytes while the channel was being formed")
    return _receive_exactly(connection, length, deadline)


def _receive_exactly(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            data = connection.recv(nbytes - len(received))
        except TimeoutError as error:
            raise RemoteProtocolError(
                "it did not answer by the deadline, so a rank of the group is missing or refused"
            ) from error
        if not data:
            raise RemoteProtocolError("it closed the connection while the channel was being formed")
        received += data
    return received


def _is_same_user(connection: socket.socket) -> bool:
    if connection.family != socket.AF_UNIX:
        return True
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _cannot_join(rank: int, address: bytes | tuple[str, int], why: str) -> ConnectError:
    name = address.decode(errors="replace").lstrip("\0") if isinstance(address, bytes) else f"{address[0]}:{address[1]}"
    return ConnectError(
        f"rank {rank} cannot join its group's channel at rank 0 ({name}): {why}",
        transport="channel",
        endpoint=name,
        rank=rank,
    )
