"""The one thread of a shm transport: it keeps the connections, greets the peers, and passes on what they say.

Both sides say Hello at once on every connection and judge the other's. A link is *ready* when the peer's Hello fits; it
is *refused* when it does not, or when the peer says so. Refused links stay open and silent, so that the reason stands
exactly as long as the peer that gave it. Links that are not ready are few: beyond a bound the oldest is closed.

The thread sleeps in `select` without a timeout, except while the door (`shm_door`) has something to try again.

A forked child has no such thread, only copies of the descriptors; it closes them, because an end that a child keeps
open would hide its parent's death from the peers and block the parent's address. A fork waits for the lock, under which
every descriptor comes and goes, so that the child knows all of them and finds the lock free.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
import weakref
from typing import Any, Protocol

import msgspec

from omnikv.core.messages import MAX_MESSAGE_NBYTES, Hello, Refused, spell_reason
from omnikv.errors import RemoteProtocolError, TransportError
from omnikv.transports.base import Endpoint
from omnikv.transports.pairing import describe, hello_mismatch
from omnikv.transports.shm_door import Door, Knock
from omnikv.transports.shm_link import Link

MAX_UNREADY_LINKS = 64
# The longest that a fork waits for a transport, should its lock be held by the very thread that forks.
FORK_WAIT_S = 1.0

log = logging.getLogger("omnikv.shm")
_forking = threading.local()
_open_loops: weakref.WeakSet[LinkLoop] = weakref.WeakSet()


class Role(Protocol):
    """What a source or target does with its links; called with the transport's lock held."""

    decoder: msgspec.msgpack.Decoder[Any]

    def link_ready(self, link: Link) -> None:
        """The peer's Hello fits."""

    def link_refused(self, link: Link) -> None:
        """One side refuses the other; `link.refusal` says why."""

    def link_gone(self, link: Link) -> None:
        """The connection ended."""

    def handle(self, link: Link, message: Any, fds: list[int]) -> None:
        """A ready peer said something. Descriptors are closed afterwards."""

    def stopped(self, error: BaseException | None) -> None:
        """The thread ends, by `close` (None) or by an error."""


class LinkLoop:
    """Listens for the peers of `endpoint` and keeps the links to them.

    Raises:
        TransportError: another process serves this rank.
    """

    def __init__(self, endpoint: Endpoint, hello: Hello, role: Role, lock: threading.Lock) -> None:
        self.counters: dict[str, int] = {}
        # What ended the thread, where it was not `close`.
        self.ended_by: BaseException | None = None
        self._endpoint = endpoint
        self._hello = hello
        self._role = role
        self.lock = lock
        self._unready: dict[Link, None] = {}
        self._ready: set[Link] = set()
        self._logged: set[str] = set()
        self._closing = False
        # Every peer may knock and be knocked on at the same time, as all do when a stage starts.
        self._max_unready = MAX_UNREADY_LINKS + 2 * len(endpoint.peer_ranks)
        self._buffer = bytearray(MAX_MESSAGE_NBYTES)
        self._door = Door(endpoint, self._adopt, self.count, self._wake)
        try:
            self._selector = selectors.DefaultSelector()
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            self._door.close()
            raise TransportError(f"shm: {describe(endpoint)} cannot start: {error}", transport="shm") from error
        self._door.watch(self._selector)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        name = f"omnikv-shm-{endpoint.side}-{endpoint.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is served any more: after `close`, or after an error that was logged."""
        return self._closing

    def start(self) -> None:
        """Nothing; starts the thread and knocks on every peer. Call once, without the lock."""
        _open_loops.add(self)
        self._thread.start()
        with self.lock:
            for rank in self._endpoint.peer_ranks:
                self._door.knock_quietly(rank)

    def knock(self, rank: int) -> Knock:
        """What came of connecting to peer `rank`; a connection that is being greeted counts as answered.

        Raises:
            ConnectError: another user's process holds the peer's address.
        """
        return Knock.ANSWERED if self.is_greeting(rank) else self._door.knock(rank)

    def is_greeting(self, rank: int) -> bool:
        """Whether a connection to peer `rank` is up whose greeting has not ended."""
        return any(link.rank == rank and link.refusal is None for link in self._unready)

    def forget(self, link: Link) -> None:
        """Nothing; ends `link` and tells the role. Idempotent."""
        if link not in self._ready and link not in self._unready:
            return
        self._ready.discard(link)
        self._unready.pop(link, None)
        if link.was_stuck:
            self.count("stuck_peers", f"peer rank {link.rank} (pid {link.credentials.pid}) reads nothing: cut off")
        self._selector.unregister(link.connection)
        link.close()
        self._role.link_gone(link)

    def count(self, kind: str, text: str) -> None:
        """Nothing; counts an event of `kind`, and logs the first one of each kind with its `text`."""
        self.counters[kind] = self.counters.get(kind, 0) + 1
        level = logging.DEBUG if kind in self._logged else logging.WARNING
        self._logged.add(kind)
        log.log(level, "shm: %s: %s", describe(self._endpoint), text)

    def close(self) -> None:
        """Nothing; ends every link and the thread. Idempotent; call without the lock."""
        with self.lock:
            if not self._closing:
                self._closing = True
                self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def let_go(self) -> None:
        """Nothing; in a forked child, closes its copies of the descriptors. Call with the lock."""
        self._closing = True
        for link in (*self._ready, *self._unready):
            link.close()
        self._door.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._serve():
                pass
        except Exception as caught:  # edge: top of the transport's thread; whoever waits must be told
            log.exception("shm: %s: its thread ends", describe(self._endpoint))
            error = caught
        with self.lock:
            self._closing = True
            self.ended_by = error
            self._tear_down(error)

    def _serve(self) -> bool:
        with self.lock:
            retry_at = self._door.retry_at
        timeout_s = None if retry_at is None else max(0.0, retry_at - time.monotonic())
        events = self._selector.select(timeout_s)
        with self.lock:
            for key, mask in events:
                if isinstance(key.data, Link):
                    self._turn(key.data, mask)
                elif key.data is not None:
                    key.data()
                else:
                    os.eventfd_read(self._wake_fd)
            self._door.retry_if_due()
            return not self._closing

    def _tear_down(self, error: BaseException | None) -> None:
        links = [*self._ready, *self._unready]
        for link in links:
            link.flush()
        # Before the links end, so that whoever waits hears of this end's closing and not of its peers'.
        self._role.stopped(error)
        for link in links:
            self.forget(link)
        _open_loops.discard(self)
        self._selector.close()
        self._door.close()
        os.close(self._wake_fd)

    def _adopt(self, connection: socket.socket, rank: int | None) -> None:
        while len(self._unready) >= self._max_unready:
            self.count("evicted", f"more than {self._max_unready} connections without a Hello: the oldest is closed")
            self.forget(next(iter(self._unready)))
        link = Link(connection, rank, self._role.decoder, self._watch)
        self._unready[link] = None
        self._selector.register(connection, selectors.EVENT_READ, link)
        link.send(self._hello)

    def _watch(self, link: Link) -> None:
        if link in self._ready or link in self._unready:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_queue else 0)
            self._selector.modify(link.connection, wanted, link)

    def _turn(self, link: Link, mask: int) -> None:
        if link not in self._ready and link not in self._unready:
            return
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if not mask & selectors.EVENT_READ:
            return
        try:
            for message, fds in link.receive(self._buffer):
                try:
                    self._dispatch(link, message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except RemoteProtocolError as error:
            who = f"peer rank {link.rank}" if link.peer else "a stranger"
            self.count("refused_message", f"{who} (pid {link.credentials.pid}) is refused: {error}")
            link.refusal = str(error)
            link.send(Refused(spell_reason(link.refusal)))
            self.forget(link)
        if link.is_over:
            self.forget(link)

    def _dispatch(self, link: Link, message: Any, fds: list[int]) -> None:
        if isinstance(message, Hello):
            self._greet(link, message)
        elif isinstance(message, Refused):
            self._refuse(link, link.refusal or f"it says: {message.reason}")
        elif link.is_ready:
            self._role.handle(link, message, fds)
        elif link.peer is None:
            raise RemoteProtocolError(f"{type(message).__name__} came before Hello")

    def _greet(self, link: Link, peer: Hello) -> None:
        if link.peer is not None or (link.rank is not None and link.rank != peer.rank):
            raise RemoteProtocolError(f"an unexpected Hello of rank {peer.rank}")
        link.peer, link.rank = peer, peer.rank
        reason = hello_mismatch(self._hello, peer, self._endpoint.peer_ranks)
        if reason is not None:
            self.count("refused_peers", f"{peer.side} rank {peer.rank} (pid {peer.pid}) does not fit: {reason}")
            link.send(Refused(spell_reason(reason)))
            self._refuse(link, reason)
        elif link.refusal is None:
            del self._unready[link]
            self._ready.add(link)
            link.is_ready = True
            self._role.link_ready(link)

    def _refuse(self, link: Link, reason: str) -> None:
        link.refusal = reason
        link.is_ready = False
        self._ready.discard(link)
        self._unready[link] = None
        self._role.link_refused(link)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)


def _before_fork() -> None:
    _forking.loops = [loop for loop in list(_open_loops) if loop.lock.acquire(timeout=FORK_WAIT_S)]


def _after_fork_in_parent() -> None:
    for loop in _forking.loops:
        loop.lock.release()


def _after_fork_in_child() -> None:
    for loop in list(_open_loops):
        loop.let_go()
    _open_loops.clear()
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
