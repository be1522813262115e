"""The connections of one rank's channel, and the threads that take turns at reading them.

All state is under one lock; only waiting happens outside it. A call that is alone first goes down the lane
(`omnikv.groups.channel_lane`). Whoever else waits for a call polls the connections itself unless another thread does so
already; then it sleeps on a bell of its own, which rings when its call is settled, when its time runs out sooner, or
when the polling is handed to it. A thread of the switchboard's own, the *pump*, exists while calls are unattended
(submitted, and nobody waits for them) or while a queue has to be emptied.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from omnikv.errors import LocalProtocolError, VerdictInDoubt
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_follower import FollowerLedger
from omnikv.groups.channel_lane import PATIENCE_S, Lane
from omnikv.groups.channel_leader import LeaderLedger
from omnikv.groups.channel_ledger import Ledger
from omnikv.groups.channel_link import Link

# Reads of one peer in a row when a deadline has passed: what it said before must still count.
LAST_READS = 1024
# Without a limit, room for a thousand is made at each poll.
_EVENTS_AT_ONCE = 16
_READABLE = select.EPOLLIN
_HAS_ROOM = select.EPOLLOUT

log = logging.getLogger("omnikv.channel")


class Switchboard:
    """One rank's connections, its ledger, and whoever waits. Calls go in, and settled they come out."""

    def __init__(
        self, rank: int, size: int, connections: Mapping[int, socket.socket], *, shares_clock: bool, deaf_after_s: float
    ) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._links = {
            peer: Link(connection, peer, deaf_after_s=deaf_after_s, on_queue=self._mind_queue)
            for peer, connection in connections.items()
        }
        lines = {peer: link.send for peer, link in self._links.items()}
        self._ledger: Ledger[Any]
        self._ledger = FollowerLedger(rank, lines, shares_clock=shares_clock) if rank else LeaderLedger(size, lines)
        self._lane = Lane(self._lock, self._ledger, self._links.values())
        self._by_fd = {link.connection.fileno(): link for link in self._links.values()}
        self._epoll = select.epoll()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for fd in (*self._by_fd, self._nudge):
            self._epoll.register(fd, _READABLE)
        self._is_polled = False
        self._polled_until = 0.0
        self._sleepers: list[threading.Condition] = []
        self._unattended: set[Call] = set()
        self._pump: threading.Thread | None = None
        self._pump_runs = False
        self._pump_bell = threading.Condition(self._lock)
        self._is_closed = False
        # A lane needs every peer; without peers there is nothing to read.
        self._has_all = bool(self._links)

    def run(self, call: Call) -> None:
        """Nothing; casts the ballots of `call` and returns when each of its requests has a ruling or is in doubt.

        Raises:
            LocalProtocolError: it cannot be cast, and was not.
            VerdictInDoubt: this rank votes no more.
        """
        with self._lock:
            if self._ledger.broken is not None:
                raise self._refusal(call)
            hoped = None
            is_alone = self._has_all and not self._is_polled and not self._pump_runs
            if call.is_first and is_alone and call.due > time.monotonic() + PATIENCE_S:
                hoped = self._ledger.cast_alone(call)
            if hoped is None:
                self._lane.leave()
                self._ledger.cast(call)
            else:
                self._is_polled, self._polled_until = True, 0.0
                try:
                    self._lane.run(call, *hoped)
                finally:
                    self._is_polled = False
                    if self._lane.read or call.left:
                        self._take_over(call)
            if call.left:
                self._wait(call)
            elif self._sleepers or self._pump_runs:
                self._hand_on()

    def start(self, call: Call) -> None:
        """Nothing; casts the ballots of `call` and lets the pump see to it.

        Raises:
            LocalProtocolError, VerdictInDoubt: as `run`.
        """
        with self._lock:
            if self._ledger.broken is not None:
                raise self._refusal(call)
            self._lane.leave()
            self._ledger.cast(call)
            self._leave(call)

    def wait(self, call: Call) -> None:
        """Nothing; returns when every request of `call` has its ruling or is in doubt."""
        with self._lock:
            if call.left:
                self._attend(call)
                self._wait(call)

    def close(self) -> None:
        """Nothing; every open vote is in doubt, connections, descriptors and threads go. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lane.leave()
            self._ledger.abandon("this rank closed its channel")
            self._pump_bell.notify_all()
            os.eventfd_write(self._nudge, 1)
            while self._is_polled:
                self._sleep(threading.Condition(self._lock), None)
            self._hand_on()
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._epoll.close()
            os.close(self._nudge)
        if self._pump is not None and self._pump is not threading.current_thread():
            self._pump.join()

    # Everything below is called with the lock held.

    def _refusal(self, call: Call) -> LocalProtocolError | VerdictInDoubt:
        if self._is_closed:
            return LocalProtocolError("this channel is closed: form another before the next vote")
        return VerdictInDoubt(
            f"rank {self._rank} takes no vote on {call.votes[0][0]!r}: its channel failed before "
            f"({self._ledger.broken}); tear this group down",
            request_id=call.votes[0][0],
            rank=self._rank,
        )

    def _wait(self, call: Call) -> None:
        try:
            while call.left:
                wait_s = call.due - time.monotonic()
                if self._lane.is_reading:
                    self._sleep(call.bell or self._give_bell(call), max(wait_s, PATIENCE_S))
                elif wait_s <= 0:
                    self._end_waiting(call)
                elif self._is_polled:
                    self._sleep(call.bell or self._give_bell(call), wait_s)
                else:
                    self._turn(call.due, wait_s)
        finally:
            # An interrupted wait must not leave the request without anybody who minds its deadline.
            if call.left:
                self._leave(call)
            if self._sleepers or self._pump_runs:
                self._hand_on()

    def _take_over(self, call: Call) -> None:
        """Nothing; the ledger takes up the call that went alone, unless it has, and is told what was read for it."""
        self._lane.leave()
        read, self._lane.read = self._lane.read, []
        for link, data in read:
            if not self._is_closed and link.rank in self._links:
                link.take_in(data, self._ledger.hear)
                if link.ended is not None:
                    self._drop(link, link.ended)
        if self._lane.is_interrupted:
            self._leave(call)

    def _give_bell(self, call: Call) -> threading.Condition:
        call.bell = threading.Condition(self._lock)
        return call.bell

    def _sleep(self, bell: threading.Condition, wait_s: float | None) -> None:
        self._sleepers.append(bell)
        try:
            bell.wait(wait_s)
        finally:
            self._sleepers.remove(bell)

    def _hand_on(self) -> None:
        """Nothing; if nobody polls, one of those who sleep is woken to do it."""
        if self._is_polled:
            return
        if self._sleepers:
            self._sleepers[0].notify_all()
        elif self._pump_runs:
            self._pump_bell.notify_all()

    def _turn(self, until: float, wait_s: float) -> None:
        """Nothing; waits for peers outside the lock, and then takes what they say."""
        self._is_polled, self._polled_until = True, until
        self._lock.release()
        try:
            events = self._epoll.poll(wait_s, _EVENTS_AT_ONCE)
        finally:
            self._lock.acquire()
            self._is_polled = False
        if self._is_closed:
            return
        hear = self._ledger.hear
        for fd, mask in events:
            link = self._by_fd.get(fd)
            if link is None:
                if fd == self._nudge:
                    os.eventfd_read(self._nudge)
                continue
            if mask & _HAS_ROOM:
                self._flush(link)
            if mask != _HAS_ROOM:
                link.receive(hear)
                if link.ended is not None:
                    self._drop(link, link.ended)

    def _drop(self, link: Link, cause: str) -> None:
        log.info("rank %d: rank %d is gone: %s", self._rank, link.rank, cause)
        self._epoll.unregister(link.connection)
        del self._by_fd[link.connection.fileno()], self._links[link.rank]
        link.close()
        self._has_all = False
        self._ledger.lose(link.rank, cause)

    def _end_waiting(self, call: Call) -> None:
        """Nothing; reads what was said in time, and then lets the time of `call` be over."""
        for link in tuple(self._links.values()):
            for _ in range(LAST_READS):
                if link.ended is not None or not link.receive(self._ledger.hear):
                    break
            if link.ended is not None:
                self._drop(link, link.ended)
        now = time.monotonic()
        if call.left and call.due <= now:
            self._ledger.expire(call, now)

    def _mind_queue(self, link: Link) -> None:
        """Nothing; from now on what waits for the peer is sent when there is room."""
        self._epoll.modify(link.connection, _READABLE | _HAS_ROOM)
        self._start_pump()

    def _flush(self, link: Link) -> None:
        link.flush()
        if not link.queue:
            self._epoll.modify(link.connection, _READABLE)

    def _leave(self, call: Call) -> None:
        """Nothing; from now on the pump minds `call`."""
        if not call.left:
            return
        if call.bell is not None:
            call.bell.notify_all()
        self._unattended.add(call)
        call.watch, call.bell = self._unattended, self._pump_bell
        self._start_pump()
        self._pump_bell.notify_all()
        if self._is_polled and call.due < self._polled_until:
            os.eventfd_write(self._nudge, 1)

    def _attend(self, call: Call) -> None:
        """Nothing; a thread waits for `call` itself from now on."""
        if call.watch is None:
            return
        call.watch = call.bell = None
        self._unattended.discard(call)
        if not self._pump_is_needed():
            # It hands the polling on to whoever waits, so that answers do not take the way over its thread.
            self._pump_bell.notify_all()
            os.eventfd_write(self._nudge, 1)

    def _pump_is_needed(self) -> bool:
        return not self._is_closed and (bool(self._unattended) or any(link.queue for link in self._links.values()))

    def _start_pump(self) -> None:
        if self._pump_runs:
            return
        if self._pump is not None:
            # It has let go of the lock for good, or this thread would not hold it.
            self._pump.join()
        self._pump_runs = True
        self._pump = threading.Thread(target=self._run_pump, name=f"omnikv-channel-{self._rank}", daemon=True)
        self._pump.start()

    def _run_pump(self) -> None:
        with self._lock:
            try:
                while self._pump_is_needed():
                    self._pump_once()
            # edge: top of a background thread; nobody would mind the submitted votes any more, so they are in doubt.
            except Exception as error:
                log.exception("rank %d: the channel's thread failed", self._rank)
                self._ledger.abandon(f"the channel's own thread failed: {error!r}")
            finally:
                self._pump_runs = False
                self._hand_on()

    def _pump_once(self) -> None:
        due = min((call.due for call in self._unattended), default=time.monotonic() + 60)
        wait_s = due - time.monotonic()
        if self._lane.is_reading:
            self._pump_bell.wait(max(wait_s, PATIENCE_S))
        elif wait_s <= 0:
            for call in [call for call in self._unattended if call.due <= due]:
                self._end_waiting(call)
        elif self._is_polled:
            self._pump_bell.wait(wait_s)
        else:
            self._turn(due, wait_s)
