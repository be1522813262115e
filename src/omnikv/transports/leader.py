"""How a thread that waits for an answer reads the link itself, so that no other thread has to be woken first.

Theory of operation. What comes over a link wakes the transport's thread, which settles the ask and wakes the thread
that waits: two wake-ups, one after the other, and the interpreter handed over in between. So one waiting thread at a
time *leads*: while it sleeps, the links that its asks went over are lent to it, and the transport's thread does not
watch them. It handles whatever comes, for other threads too, as the transport's thread would, under the same lock.
Whatever else ends its wait (the end of a link, a withdrawal, the closing of the transport) rings it like any sleeper.

The main thread never leads: an interruption (Ctrl-C), which strikes no other thread, could lose what it had just read.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection

from omnikv.transports.link_loop import LinkLoop
from omnikv.transports.links import Link

# Each is lent and given back once a wait, so many are left to the transport's thread.
MAX_LED_LINKS = 4


class Leader:
    """A `Bell`'s sleeper that also wakes when something comes over one of `links`, and hears it. Call it in one thread.

    Raises:
        OSError: the system gives no more descriptors.
    """

    def __init__(self, loop: LinkLoop, links: Collection[Link]) -> None:
        self._loop = loop
        self._links = {link.connection.fileno(): link for link in links}
        self._is_rung = False
        self._is_awake = False
        self._bell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        for fd in (*self._links, self._bell_fd):
            self._poll.register(fd, select.POLLIN)

    def empty(self) -> bool:
        """Whether nobody has rung since it last woke."""
        return not self._is_rung

    def put(self, item: None) -> None:
        """Nothing; wakes it. Call with the lock."""
        self._is_rung = True
        # What it hears itself need not wake it.
        if not self._is_awake:
            os.eventfd_write(self._bell_fd, 1)

    def get(self, *, timeout: float) -> None:
        """Nothing, once it was rung, has heard something or `timeout` seconds have passed. Call without the lock."""
        ready = self._poll.poll(timeout * 1000)
        with self._loop.lock:
            self._is_awake = True
            for fd, _ in ready:
                if fd == self._bell_fd:
                    os.eventfd_read(fd)
                else:
                    self._loop.hear_lent(self._links[fd])
            self._is_awake = self._is_rung = False

    def end(self) -> None:
        """Nothing; gives the links back. Call without the lock, when nothing rings it any more."""
        with self._loop.lock:
            self._loop.take_back()
        os.close(self._bell_fd)


def lead(loop: LinkLoop, links: Collection[Link]) -> Leader | None:
    """The calling thread's sleeper as the one that leads, or None where it may not. `end` it. Call without the lock."""
    if threading.current_thread() is threading.main_thread() or not 0 < len(links) <= MAX_LED_LINKS:
        return None
    with loop.lock:
        if not loop.lend(links):
            return None
        try:
            return Leader(loop, links)
        except OSError:
            loop.take_back()
            return None
