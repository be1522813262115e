"""A receive by key that acts alone: it acknowledges what it uses, and gives back what it cannot use."""

from __future__ import annotations

import threading
import time

from omnikv.handoff.keyed_receive import KeyedFetch, fetch_until


def receive_kv(connector, request_id, route, *, timeout_s=0.0, device=None, closing=None):
    fetch = KeyedFetch(connector, request_id, route, device=device, closing=closing or threading.Event())
    try:
        fetch_until(fetch, until=time.monotonic() + timeout_s)
        received = fetch.require()
        fetch.acknowledge()
        return received
    finally:
        fetch.give_back()
