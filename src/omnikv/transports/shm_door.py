"""How connections of a shm transport come up: it listens at its own address and knocks on its peers'.

What the system refuses for the moment (a peer's full backlog, no descriptor left) is tried again a little later; the
time of that is `retry_at`, and None nearly always. All of it happens under the transport's lock.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from omnikv.errors import ConnectError
from omnikv.transports.base import Endpoint, Seat, Side
from omnikv.transports.links import Door, Knock
from omnikv.transports.pairing import describe
from omnikv.transports.shm_address import is_same_user, listen, open_socket, peer_of, rank_address

RETRY_S = 0.02
ACCEPTED_A_TURN = 64


class ShmDoor(Door):
    """The listener of `endpoint`. `adopt` takes each connection of the own user, with the seat that was knocked on or
    None; `count` counts and logs what goes wrong; `wake` makes the transport's thread look at `retry_at`.

    Raises:
        TransportError: another process serves this rank.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        adopt: Callable[[socket.socket, Seat | None], None],
        count: Callable[[str, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._adopt = adopt
        self._count = count
        self._wake = wake
        self._redial: set[Seat] = set()
        self._listener = listen(endpoint)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Nothing; `selector` reports `accept` when somebody knocks."""
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """Nothing; takes those who knock, as far as they run as the own user."""
        for _ in range(ACCEPTED_A_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self._count("accept_failed", f"cannot accept a connection ({error.strerror}); trying again")
                self._selector.unregister(self._listener)
                self._retry_soon()
                return
            connection.setblocking(False)
            peer = peer_of(connection)
            if is_same_user(peer):
                self._adopt(connection, None)
            else:
                self._count("refused_foreign_user", f"user {peer.uid} (pid {peer.pid}) knocked and was turned away")
                connection.close()

    def knock(self, seat: Seat) -> Knock:
        """What came of connecting to the peer at `seat`.

        Raises:
            ConnectError: another user's process holds the peer's address.
        """
        peer_side: Side = "target" if self._endpoint.side == "source" else "source"
        try:
            connection = open_socket()
        except OSError as error:
            self._count("knock_failed", f"cannot knock on peer {seat} ({error.strerror}); trying again")
            return self._knock_later(seat)
        try:
            connection.connect(rank_address(self._endpoint.edge, peer_side, *seat))
        except BlockingIOError:
            connection.close()
            return self._knock_later(seat)
        except OSError:
            connection.close()
            return Knock.NOBODY
        peer = peer_of(connection)
        if not is_same_user(peer):
            connection.close()
            text = f"the address of peer {seat} is held by process {peer.pid} of another user (uid {peer.uid})"
            self._count("refused_foreign_user", text)
            raise ConnectError(
                f"shm: {describe(self._endpoint)}: {text}; both stages must run as the same user",
                transport="shm",
                rank=seat.rank,
            )
        self._adopt(connection, seat)
        return Knock.ANSWERED

    def retry_if_due(self) -> None:
        """Nothing; does again what was refused, once `retry_at` has come."""
        if self.retry_at is None or time.monotonic() < self.retry_at:
            return
        self.retry_at = None
        if self._listener.fileno() not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self.accept)
        seats, self._redial = self._redial, set()
        for seat in seats:
            with suppress(ConnectError):
                # Counted and logged by then, and said again to whoever asks for a payload of that peer.
                self.knock(seat)

    def close(self) -> None:
        """Nothing; nobody is let in any more."""
        self._listener.close()

    def _knock_later(self, seat: Seat) -> Knock:
        self._redial.add(seat)
        self._retry_soon()
        return Knock.BUSY

    def _retry_soon(self) -> None:
        if self.retry_at is None:
            self.retry_at = time.monotonic() + RETRY_S
            self._wake()
