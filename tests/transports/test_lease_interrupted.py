"""A lease whose end is interrupted, by Ctrl-C for one, can still be ended; nothing stays leased that nobody holds."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from omnikv.core.messages import Ready
from omnikv.errors import AlreadyConsumed
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, lease, payload_of, put, take
from omnikv.transports import wants
from omnikv.transports.bell import Bell
from omnikv.transports.shm_link import ShmLink


class Interrupting:
    """A lock at which Ctrl-C comes the first time that it is waited for."""

    def __init__(self, lock):
        self._lock = lock
        self._was_interrupted = False

    def __enter__(self):
        if not self._was_interrupted:
            self._was_interrupted = True
            raise KeyboardInterrupt
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def interrupt_next(transport, monkeypatch):
    target = transport._target
    holder, name = (target._exchange, "lock") if hasattr(target, "_exchange") else (target, "_lock")
    monkeypatch.setattr(holder, name, Interrupting(getattr(holder, name)))


@pytest.fixture(params=["memory", "shm"])
def pair(request):
    return NamedPair(transport=request.param)


@pytest.mark.parametrize("end", ["acknowledge", "release"])
def test_a_lease_whose_end_was_interrupted_is_ended_by_the_next_one(pair, monkeypatch, end):
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payload = payload_of(pair, "r1")
        put(source, payload, b"payload")
        held = lease(pair, target, payload)
        with monkeypatch.context() as patched:
            interrupt_next(target, patched)
            with pytest.raises(KeyboardInterrupt):
                getattr(held, end)()
        held.release() if end == "release" else held.acknowledge()
        if end == "release":
            lease(pair, target, payload).acknowledge()
        assert drained(pair, source) == 0


def test_a_payload_that_was_handed_over_as_ctrl_c_came_is_used_once(monkeypatch):
    pair = NamedPair(transport="shm")
    send = ShmLink.send

    def interrupted(link, message, *more):
        send(link, message, *more)
        if isinstance(message, Ready):
            raise KeyboardInterrupt

    with (
        ThreadPoolExecutor(1) as pool,
        pair.open_source(0, (0,), {}) as source,
        pair.open_target(0, (0,), {}) as target,
    ):
        payload = payload_of(pair, "r1")
        waiting = pool.submit(lease, pair, target, payload)
        while not source._offers._waiting:
            time.sleep(0.001)
        slot = source.reserve(payload, len(b"once"))
        slot.buffer[:] = b"once"
        with monkeypatch.context() as patched:
            patched.setattr(ShmLink, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                slot.publish()
        waiting.result(timeout=60).acknowledge()
        assert drained(pair, source) == 0
        with pytest.raises(AlreadyConsumed):
            target.get(payload, deadline=time.monotonic())
        put(source, payload, b"again")
        assert take(pair, target, payload) == b"again"


def test_a_last_look_that_was_interrupted_leaves_no_lease(monkeypatch):
    pair = NamedPair(transport="shm")

    class InterruptedBell(Bell):
        def wait_for(self, look, deadline):
            super().wait_for(look, deadline)
            raise KeyboardInterrupt

    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payload = payload_of(pair, "r1")
        put(source, payload, b"payload")
        with monkeypatch.context() as patched:
            patched.setattr(wants, "Bell", InterruptedBell)
            with pytest.raises(KeyboardInterrupt):
                target.others_ready(payload, deadline=time.monotonic() + pair.patience_s)
        assert not target._target._asks
        assert take(pair, target, payload) == b"payload"


def test_a_get_that_is_interrupted_as_it_gives_up_asks_no_longer(monkeypatch):
    pair = NamedPair(transport="shm")

    class LastBell(Bell):
        def wait_for(self, look, deadline):
            super().wait_for(look, deadline)
            interrupt_next(target, patched)

    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payload = payload_of(pair, "r1")
        with monkeypatch.context() as patched:
            patched.setattr(wants, "Bell", LastBell)
            with pytest.raises(KeyboardInterrupt):
                target.get(payload, deadline=time.monotonic() + 0.01)
        assert not target._target._asks
        put(source, payload, b"payload")
        assert take(pair, target, payload) == b"payload"


def test_an_answer_whose_giving_back_was_interrupted_frees_its_room_once(monkeypatch):
    pair = NamedPair(transport="shm")
    freed = []

    def free():
        freed.append(1)
        raise KeyboardInterrupt

    class LastBell(Bell):
        def wait_for(self, look, deadline):
            super().wait_for(look, deadline)
            (ask,) = target._target._asks.values()
            ask.lease.arrival = replace(ask.lease.arrival, free=free)

    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payload = payload_of(pair, "r1")
        put(source, payload, b"payload")
        with monkeypatch.context() as patched:
            patched.setattr(wants, "Bell", LastBell)
            with pytest.raises(KeyboardInterrupt):
                target.get(payload, deadline=time.monotonic() + pair.patience_s)
        assert freed == [1]
        assert take(pair, target, payload) == b"payload"


def test_threads_that_end_one_lease_at_once_end_it_once(pair):
    with (
        pair.open_source(0, (0,), {}) as source,
        pair.open_target(0, (0,), {}) as target,
        ThreadPoolExecutor(4) as threads,
    ):
        for number in range(50):
            payload = payload_of(pair, f"r{number}")
            put(source, payload, b"payload")
            held = lease(pair, target, payload)
            for done in [threads.submit(held.acknowledge) for _ in range(4)]:
                done.result(timeout=60)
        assert drained(pair, source) == 0
        assert source.census()["released"] == 50
