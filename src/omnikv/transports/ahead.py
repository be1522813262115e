"""What a thread that waits for payloads does before they come: it shows to whoever prepares where they will be.

Called without the lock, like the wait itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from omnikv.transports.ask import Ask
from omnikv.transports.base import Preview
from omnikv.transports.links import Link
from omnikv.transports.window import Window

# What is there already comes sooner than this after it was asked for.
AT_ONCE_S = 0.001


def next_of(asks: Collection[Ask], preview: Preview | None, limit: float) -> Ask | None:
    """An ask that is settled; else one that there is something to tell of, where somebody wants to know in time.

    With the lock.
    """
    settled = next((ask for ask in asks if ask.is_settled), None)
    if settled is not None or preview is None or time.monotonic() >= limit:
        return settled
    return next((ask for ask in asks if ask.forming is not None), None)


def show_likely(asks: Collection[Ask], preview: Preview, window: Window, lock: threading.Lock, limit: float) -> None:
    """Nothing; `preview` knows in which memory the payloads are likely to come, as far as there is time for it."""
    with lock:
        linked = {ask.link: ask for ask in asks if ask.link is not None and not ask.is_settled}
        likely = [(ask, window.expected(link)) for link, ask in linked.items()]
    for ask, view in likely:
        # Each takes a moment, and there may be many.
        if view is not None and time.monotonic() < limit:
            preview(ask.payload, view, b"")


def show_formed(ask: Ask, preview: Preview, lock: threading.Lock, hear: Callable[[Link], None]) -> None:
    """Nothing; `preview` knows where the payload is being written, and the payload itself came if it could."""
    with lock:
        forming, ask.forming = ask.forming, None
    if forming is not None and forming.view is not None:
        preview(ask.payload, forming.view, forming.head)
    with lock:
        if ask.link is not None and not ask.is_settled:
            # It may have come meanwhile; the transport's thread would have to wake this one for it.
            hear(ask.link)
