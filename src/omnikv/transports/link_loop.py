"""The one thread of a transport between processes: it keeps the connections, greets the peers, passes on what they say.

Both sides say Hello at once on every connection and judge the other's. A link is *ready* when the peer's Hello fits; it
is *refused* when it does not, or when the peer says so. Refused links stay open and silent, so that the reason stands
exactly as long as the peer that gave it. Links that are not ready are few: beyond a bound the oldest is closed.

The thread sleeps in `select` until something comes, or until the door or the role has something to do at a set time.

A forked child has no such thread, only copies of the descriptors; it closes them, because an end that a child keeps
open would hide its parent's death from the peers and block the parent's address. A fork waits for the lock, under which
every descriptor comes and goes, so that the child knows all of them and finds the lock free.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any, Protocol

from omnikv.core.messages import Hello, Refused, spell_reason
from omnikv.errors import ConnectError, RemoteProtocolError, TransportError
from omnikv.transports.base import Endpoint, Seat
from omnikv.transports.bell import LONGEST_WAIT_S
from omnikv.transports.links import Door, Knock, Link
from omnikv.transports.pairing import describe, hello_mismatch

MAX_UNREADY_LINKS = 64
# The longest that a fork waits for a transport, should its lock be held by the very thread that forks.
FORK_WAIT_S = 1.0

_forking = threading.local()
_open_loops: weakref.WeakSet[LinkLoop] = weakref.WeakSet()


class Role(Protocol):
    """What a source or target does with its links; called with the transport's lock held."""

    @property
    def due_at(self) -> float | None:
        """When `on_time` wants to be called next, on the monotonic clock; None while nothing is to be done."""

    def on_time(self, now: float) -> None:
        """`due_at` has come."""

    def link_ready(self, link: Link) -> None:
        """The peer's Hello fits."""

    def link_refused(self, link: Link) -> None:
        """One side refuses the other; `link.refusal` says why."""

    def link_gone(self, link: Link) -> None:
        """The connection ended."""

    def handle(self, link: Link, message: Any, extra: Any) -> None:
        """A ready peer said something, and this came along with it."""

    def stopped(self, error: BaseException | None) -> None:
        """The thread ends, by `close` (None) or by an error."""


class Sockets(Protocol):
    """What a transport brings: its door, and its links.

    `max_strangers` is how many connections may be up, beside those of the peers, whose greeting has not ended.
    """

    max_strangers: int

    def open_door(
        self,
        adopt: Callable[[socket.socket, Seat | None], None],
        count: Callable[[str, str], None],
        wake: Callable[[], None],
    ) -> Door:
        """The open door. `adopt` takes each new connection, with the seat that was knocked on or None; `count` counts
        and logs what goes wrong; `wake` makes the transport's thread look at `retry_at`.

        Raises:
            TransportError: the address is taken, or the system refuses.
        """

    def open_link(self, connection: socket.socket, seat: Seat | None, watch: Callable[[Link], None]) -> Link:
        """The link over `connection`; it calls `watch` with itself when its queue starts or ends."""


class LinkLoop:
    """Listens for the peers of `endpoint` and keeps the links to them. `name` is the transport's.

    Raises:
        TransportError: another process serves this rank, or the system refuses.
    """

    def __init__(
        self, name: str, endpoint: Endpoint, hello: Hello, role: Role, sockets: Sockets, lock: threading.Lock
    ) -> None:
        self.counters: dict[str, int] = {}
        # What ended the thread, where it was not `close`.
        self.ended_by: BaseException | None = None
        self._name = name
        self._log = logging.getLogger(f"omnikv.{name}")
        self._endpoint = endpoint
        self._hello = hello
        self._role = role
        self._sockets = sockets
        self.lock = lock
        self._unready: dict[Link, None] = {}
        self._ready: set[Link] = set()
        # Links whose end has begun. One is left here only where Ctrl-C came in between.
        self._ending: dict[Link, None] = {}
        self._logged: set[str] = set()
        self._closing = False
        # Every peer may knock and be knocked on at the same time, as all do when a stage starts.
        self._max_unready = sockets.max_strangers + 2 * len(endpoint.peers())
        # Until when the thread sleeps; infinite while it has no reason to wake by itself, and 0 while it is awake.
        self._sleeps_until = 0.0
        self._door = sockets.open_door(self._adopt, self.count, self._wake)
        try:
            self._selector = selectors.DefaultSelector()
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            self._door.close()
            raise TransportError(f"{name}: {describe(endpoint)} cannot start: {error}", transport=name) from error
        self._door.watch(self._selector)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        thread_name = f"omnikv-{name}-{endpoint.side}-{endpoint.rank}"
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is served any more: after `close`, or after an error that was logged."""
        return self._closing

    def start(self) -> None:
        """Nothing; starts the thread and knocks on every peer. Call once, without the lock."""
        _open_loops.add(self)
        self._thread.start()
        with self.lock:
            for seat in self._endpoint.peers():
                with suppress(ConnectError):
                    # Counted and logged by then, and said again to whoever asks for a payload of that peer.
                    self._door.knock(seat)

    def knock(self, seat: Seat) -> Knock:
        """What came of connecting to the peer at `seat`; a connection that is being greeted counts as answered.

        Raises:
            ConnectError: the peer's address is held by somebody who is no peer.
        """
        return Knock.ANSWERED if self.is_greeting(seat) else self._door.knock(seat)

    def is_greeting(self, seat: Seat) -> bool:
        """Whether a connection to the peer at `seat` is up whose greeting has not ended."""
        return any(link.seat == seat and link.refusal is None for link in self._unready)

    def wake_by(self, due_at: float) -> None:
        """Nothing; the role's `due_at` has become `due_at`: the thread wakes in time. Call with the lock."""
        if due_at < self._sleeps_until and not self._closing:
            self._wake()

    def hear(self, link: Link) -> None:
        """Nothing; takes what `link` has brought, in the caller's thread and at once. Call with the lock.

        Ctrl-C comes to callers' threads only, and may lose a message that was read: the link ends with it, so that the
        peer takes back what it gave.
        """
        if link in self._ready:
            with ExitStack() as on_interruption:
                on_interruption.callback(self.forget, link)
                self._hear(link)
                on_interruption.pop_all()

    def forget(self, link: Link) -> None:
        """Nothing; ends `link` and tells the role. Idempotent; where it was interrupted, the next call, or the thread,
        does what is left, and may tell the role again.
        """
        try:
            if link in self._ready or link in self._unready:
                if link.has_stalled:
                    self.count("stuck_peers", f"peer {link.seat} ({link.who}) reads nothing: cut off")
                self._ending[link] = None
                self._ready.discard(link)
                self._unready.pop(link, None)
            if link in self._ending:
                # Not registered, or closed besides, where an interruption came in between.
                with suppress(KeyError, ValueError):
                    self._selector.unregister(link.connection)
                link.close()
                self._role.link_gone(link)
                del self._ending[link]
        finally:
            if link in self._ending:
                self._wake()

    def forget_earlier(self, link: Link) -> None:
        """Nothing; ends the other links to the same life of the peer: it speaks over one, so they are dead."""
        for other in [one for one in self._ready if one is not link and one.life == link.life]:
            self.forget(other)

    def count(self, kind: str, text: str) -> None:
        """Nothing; counts an event of `kind`, and logs the first one of each kind with its `text`."""
        self.counters[kind] = self.counters.get(kind, 0) + 1
        level = logging.DEBUG if kind in self._logged else logging.WARNING
        self._logged.add(kind)
        self._log.log(level, "%s: %s: %s", self._name, describe(self._endpoint), text)

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
        for link in (*self._ready, *self._unready, *self._ending):
            link.close()
        self._door.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._serve():
                pass
        except Exception as caught:  # edge: top of the thread; whoever waits must be told  # noqa: BLE001
            self._log.exception("%s: %s: its thread ends", self._name, describe(self._endpoint))
            error = caught
        with self.lock:
            self._closing = True
            self.ended_by = error
            self._tear_down(error)

    def _serve(self) -> bool:
        with self.lock:
            times = [due_at for due_at in (self._door.retry_at, self._role.due_at) if due_at is not None]
            self._sleeps_until = min(times, default=math.inf)
        # Cut, since the system refuses to sleep for very long; waking early does nothing.
        timeout_s = min(max(0.0, self._sleeps_until - time.monotonic()), LONGEST_WAIT_S) if times else None
        events = self._selector.select(timeout_s)
        with self.lock:
            self._sleeps_until = 0.0
            for key, mask in events:
                if isinstance(key.data, Link):
                    self._turn(key.data, mask)
                elif key.data is not None:
                    key.data()
                else:
                    os.eventfd_read(self._wake_fd)
            while self._ending:
                self.forget(next(iter(self._ending)))
            self._door.retry_if_due()
            due_at, now = self._role.due_at, time.monotonic()
            if due_at is not None and due_at <= now:
                self._role.on_time(now)
            return not self._closing

    def _tear_down(self, error: BaseException | None) -> None:
        # All of it, whatever one of them raises.
        with ExitStack() as until_gone:
            until_gone.callback(os.close, self._wake_fd)
            until_gone.callback(self._door.close)
            until_gone.callback(self._selector.close)
            until_gone.callback(_open_loops.discard, self)
            links = [*self._ready, *self._unready]
            for link in (*links, *self._ending):
                until_gone.callback(self.forget, link)
            for link in links:
                link.flush()
            # Before the links end, so that whoever waits hears of this end's closing and not of its peers'.
            self._role.stopped(error)

    def _adopt(self, connection: socket.socket, seat: Seat | None) -> None:
        # A link that has not said Hello would be waited for in vain.
        with ExitStack() as on_interruption:
            on_interruption.callback(connection.close)
            while len(self._unready) >= self._max_unready:
                text = f"more than {self._max_unready} connections without a Hello: the oldest is closed"
                self.count("evicted", text)
                self.forget(next(iter(self._unready)))
            link = self._sockets.open_link(connection, seat, self._watch)
            on_interruption.callback(self.forget, link)
            self._unready[link] = None
            self._selector.register(connection, selectors.EVENT_READ, link)
            link.send(self._hello)
            on_interruption.pop_all()

    def _watch(self, link: Link) -> None:
        if link in self._ready or link in self._unready:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_queue else 0)
            self._selector.modify(link.connection, wanted, link)

    def _turn(self, link: Link, mask: int) -> None:
        if link not in self._ready and link not in self._unready:
            return
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if mask & selectors.EVENT_READ:
            self._hear(link)
        if link.is_over:
            self.forget(link)

    def _hear(self, link: Link) -> None:
        try:
            with closing(link.receive()) as messages:
                for message, extra in messages:
                    self._dispatch(link, message, extra)
        except RemoteProtocolError as error:
            who = f"peer {link.seat}" if link.peer else "a stranger"
            self.count("refused_message", f"{who} ({link.who}) is refused: {error}")
            link.refusal = str(error)
            link.send(Refused(spell_reason(link.refusal)))
            self.forget(link)
        if link.is_over:
            self.forget(link)

    def _dispatch(self, link: Link, message: Any, extra: Any) -> None:
        if isinstance(message, Hello):
            self._greet(link, message)
        elif isinstance(message, Refused):
            self._refuse(link, link.refusal or f"it says: {message.reason}")
        elif link.is_ready:
            self._role.handle(link, message, extra)
        elif link.peer is None:
            raise RemoteProtocolError(f"{type(message).__name__} came before Hello")

    def _greet(self, link: Link, peer: Hello) -> None:
        seat = Seat(peer.rank, peer.reader)
        if link.peer is not None or link.seat not in (None, seat):
            raise RemoteProtocolError(f"an unexpected Hello of {seat}")
        link.peer, link.seat = peer, seat
        reason = hello_mismatch(self._endpoint, self._hello, peer)
        if reason is not None:
            self.count("refused_peers", f"{peer.side} {seat} (pid {peer.pid}) does not fit: {reason}")
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
