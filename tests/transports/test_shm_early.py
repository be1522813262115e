"""Early words over shm: who waits is told that its payload is being written, and where, and takes neither for it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import pytest
from stages import assert_same, full_cache, one_to_one

from omnikv import KVReceiver, KVSender
from omnikv.core.messages import MAX_FORMING_HEAD_NBYTES, Forming, Ready, Retired, Segment, Soon
from omnikv.errors import ProducerFailed
from omnikv.handoff import cut as cut_module
from omnikv.handoff import part as part_module
from omnikv.handoff.receive import RoleFetch
from omnikv.tensors.kv import DenseSource
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, payload_of, put, take
from omnikv.transports import shm_shelf, wants
from omnikv.transports.base import PutRequest
from omnikv.transports.shm_link import ShmLink
from omnikv.transports.shm_map import make_segment
from omnikv.transports.shm_window import ShmWindow

CONTENT = b"head" + bytes(4096)


@pytest.fixture
def pair():
    return NamedPair(transport="shm")


@pytest.fixture
def ends(pair):
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        yield source, target


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Waiting:
    """A target that waits in a thread for one payload, and what it was shown before that came."""

    def __init__(self, pool, source, target, payload):
        self.views = []
        self.saw = Event()
        self._result = pool.submit(self._wait, target, payload)
        while not source._offers._waiting:
            time.sleep(0.001)

    def _wait(self, target, payload):
        [(_, outcome)] = target.get_as_ready([payload], deadline=time.monotonic() + 60, preview=self._preview)
        return outcome

    def _preview(self, payload, view, head):
        self.views.append((view, head))
        self.saw.set()

    def outcome(self):
        return self._result.result(timeout=60)


def reserved(source, payload, *, head=b"head"):
    (slot,) = source.reserve_all([PutRequest(payload, len(CONTENT), head=head)], deadline=0.0)
    return slot


def test_a_target_that_waits_hears_where_its_payload_is_written_and_how_it_will_begin(pair, ends, pool):
    source, target = ends
    payload = payload_of(pair, "r1")
    waiting = Waiting(pool, source, target, payload)
    with reserved(source, payload) as slot:
        assert waiting.saw.wait(60)
        [(view, head)] = waiting.views
        assert view.readonly
        assert len(view) == len(CONTENT)
        assert head == b"head"
        slot.buffer[:] = CONTENT
        slot.publish()
    with waiting.outcome() as lease:
        assert bytes(lease.buffer) == bytes(view) == CONTENT
        lease.acknowledge()
    assert drained(pair, source) == 0


def test_what_was_seen_and_then_failed_is_no_payload(pair, ends, pool):
    source, target = ends
    payload = payload_of(pair, "r1")
    waiting = Waiting(pool, source, target, payload)
    with reserved(source, payload):
        assert waiting.saw.wait(60)
        source.fail(payload, "a kernel failed")
    assert isinstance(waiting.outcome(), ProducerFailed)
    put(source, payload, b"again")
    assert take(pair, target, payload) == b"again"


@pytest.mark.parametrize("head", [b"", bytes(MAX_FORMING_HEAD_NBYTES + 1)], ids=["unknown", "too long"])
def test_a_head_that_cannot_be_told_is_not(pair, ends, pool, head):
    source, target = ends
    payload = payload_of(pair, "r1")
    waiting = Waiting(pool, source, target, payload)
    with reserved(source, payload, head=head) as slot:
        slot.written(0, len(CONTENT))
        slot.buffer[:] = CONTENT
        slot.publish()
    with waiting.outcome() as lease:
        assert bytes(lease.buffer) == CONTENT
    assert waiting.views == []


def test_a_busy_source_says_nothing_early(pair, ends, pool, monkeypatch):
    source, target = ends
    monkeypatch.setattr(shm_shelf, "AWAKE_S", 3600.0)
    put(source, payload_of(pair, "r0"), b"x")
    assert take(pair, target, payload_of(pair, "r0")) == b"x"
    payload = payload_of(pair, "r1")
    waiting = Waiting(pool, source, target, payload)
    with reserved(source, payload) as slot:
        slot.buffer[:] = CONTENT
        slot.publish()
    with waiting.outcome() as lease:
        assert bytes(lease.buffer) == CONTENT
    assert not any(head for _, head in waiting.views)


@pytest.fixture
def said(monkeypatch):
    """What sources say ahead, by its kind."""
    kinds = []
    send = ShmLink.send

    def noted(link, message, *more):
        if isinstance(message, Soon | Forming):
            kinds.append(type(message))
        send(link, message, *more)

    monkeypatch.setattr(ShmLink, "send", noted)
    monkeypatch.setattr(shm_shelf, "AWAKE_S", 0.0)
    return kinds


def hand_over(pool, source, target, payload):
    """What a target saw that waited for the payload, once it was shown where that is likely to come."""
    waiting = Waiting(pool, source, target, payload)
    assert payload.transfer_id == "r0" or waiting.saw.wait(60)
    with reserved(source, payload) as slot:
        slot.buffer[:] = CONTENT
        slot.publish()
    with waiting.outcome() as lease:
        assert bytes(lease.buffer) == CONTENT
        lease.acknowledge()
    return waiting.views


@pytest.mark.parametrize(("long_nbytes", "words"), [(1 << 20, [Soon]), (1, [])], ids=["short", "long"])
def test_what_takes_the_place_of_the_latest_is_waited_for_there(
    pair, ends, pool, said, monkeypatch, long_nbytes, words
):
    monkeypatch.setattr(shm_shelf, "LONG_NBYTES", long_nbytes)
    source, target = ends
    hand_over(pool, source, target, payload_of(pair, "r0"))
    assert said == [Forming]
    assert drained(pair, source) == 0
    [(view, head)] = hand_over(pool, source, target, payload_of(pair, "r1"))
    assert (len(view), head) == (len(CONTENT), b"")
    assert said == [Forming, *words]


def test_what_comes_elsewhere_is_shown_where_it_is(pair, ends, pool, said):
    source, target = ends
    hand_over(pool, source, target, payload_of(pair, "r0"))
    assert drained(pair, source) == 0
    with source.reserve(payload_of(pair, "other"), 1):
        hand_over(pool, source, target, payload_of(pair, "r1"))
    assert said == [Forming, Forming]


def test_of_two_that_wait_none_is_shown_what_is_likely(pair, ends):
    source, target = ends
    put(source, payload_of(pair, "r0"), CONTENT)
    assert take(pair, target, payload_of(pair, "r0")) == CONTENT
    views = []
    with ThreadPoolExecutor(1) as pool:
        other = Waiting(pool, source, target, payload_of(pair, "never"))
        deadline = time.monotonic() + 0.1
        found = list(
            target.get_as_ready([payload_of(pair, "r1")], deadline=deadline, preview=lambda *seen: views.append(seen))
        )
        source.fail(payload_of(pair, "never"), "enough")
        assert isinstance(other.outcome(), ProducerFailed)
    assert (found, views) == ([], [])


def test_nothing_more_is_shown_ahead_once_time_is_up(pair):
    with ExitStack() as stack:
        target = stack.enter_context(pair.open_target(0, (0, 1), {}))
        for rank in (0, 1):
            source = stack.enter_context(pair.open_source(rank, (0,), {}))
            put(source, payload_of(pair, "r0", source=rank), CONTENT)
            assert take(pair, target, payload_of(pair, "r0", source=rank)) == CONTENT
        wanted = [payload_of(pair, "r1", source=rank) for rank in (0, 1)]
        deadline, shown = time.monotonic() + 0.2, []

        def preview(payload, view, head):
            shown.append(payload)
            while time.monotonic() < deadline:
                time.sleep(0.001)

        assert list(target.get_as_ready(wanted, deadline=deadline, preview=preview)) == []
    assert len(shown) == 1


def test_who_wants_nothing_waits_for_nothing(pair, monkeypatch):
    monkeypatch.setattr(wants, "AT_ONCE_S", 3600.0)
    with pair.open_target(0, (0,), {}) as target:
        endless = target.get_as_ready([], deadline=time.monotonic() + 7200.0, preview=lambda *seen: None)
        assert list(endless) == []


def test_nothing_is_likely_where_memory_was_retired():
    window, link = ShmWindow(), object()
    fd, room = make_segment(8192)
    window.link_ready(link)
    window.handle(link, Segment(1, 8192), [fd])
    assert window.expected(link) is None
    arrival = window.handle(link, Ready(1, 1, 1, 4096, 100), [])
    assert window.expected(link) is arrival.view
    window.handle(link, Retired(2), [])
    assert window.expected(link) is arrival.view
    window.handle(link, Retired(1), [])
    assert window.expected(link) is None
    os.close(fd)
    del room


def test_a_preview_that_raises_loses_nothing(pair, ends, pool):
    source, target = ends
    payload = payload_of(pair, "r1")

    def preview(payload, view, head):
        raise MemoryError("no room for a view")

    def wait():
        return list(target.get_as_ready([payload], deadline=time.monotonic() + 60, preview=preview))

    waiting = pool.submit(wait)
    while not source._offers._waiting:
        time.sleep(0.001)
    with reserved(source, payload) as slot:
        with pytest.raises(MemoryError):
            waiting.result(timeout=60)
        slot.buffer[:] = CONTENT
        slot.publish()
    assert take(pair, target, payload) == CONTENT


def test_a_receiver_prepares_its_part_before_the_data_is_written_and_reads_it_once(monkeypatch, pool):
    layers = full_cache()
    decoded, prepared = [], Event()

    def decode(*args, **options):
        decoded.append(bytes(args[0]))
        return original(*args, **options)

    original, prepare = part_module.decode_payload, RoleFetch.prepare
    monkeypatch.setattr(part_module, "decode_payload", decode)

    class SlowSource(DenseSource):
        """Gives its elements once a receiver has seen the head."""

        def write_into(self, out):
            assert prepared.wait(60)
            super().write_into(out)

        add_moves = None

    monkeypatch.setattr(cut_module, "DenseSource", SlowSource)
    monkeypatch.setattr(RoleFetch, "prepare", lambda fetch, *what: (prepare(fetch, *what), prepared.set()))
    route = one_to_one(f"test-{secrets.token_hex(8)}")
    with KVSender(route, 0, transport="shm") as sender, KVReceiver(route, 0, transport="shm") as receiver:
        waiting = pool.submit(receiver.receive, "req", timeout_s=60)
        while not sender._transport._offers._waiting:
            time.sleep(0.001)
        sender.send("req", layers)
        with waiting.result(timeout=60) as kv:
            assert_same(kv.layers, layers)
    assert len(decoded) == 1


def test_an_interruption_while_the_payload_is_looked_for_gives_it_to_the_next_who_asks(pair, ends, pool, monkeypatch):
    source, target = ends
    payload = payload_of(pair, "r1")
    shown, published, interrupted = Event(), Event(), Event()

    def preview(payload, view, head):
        [link] = target._target._sources.values()
        receive = link.receive

        def interrupting():
            if threading.current_thread() is not target._loop._thread:
                for _ in receive():
                    interrupted.set()
                    raise KeyboardInterrupt
            elif interrupted.is_set():
                # Too late before.
                yield from receive()

        monkeypatch.setattr(link, "receive", interrupting)
        shown.set()
        assert published.wait(60)

    def wait():
        with pytest.raises(KeyboardInterrupt):
            list(target.get_as_ready([payload], deadline=time.monotonic() + 60, preview=preview))

    waiting = pool.submit(wait)
    while not source._offers._waiting:
        time.sleep(0.001)
    with reserved(source, payload) as slot:
        assert shown.wait(60)
        slot.buffer[:] = CONTENT
        slot.publish()
        published.set()
    waiting.result(timeout=60)
    assert interrupted.is_set()
    assert take(pair, target, payload) == CONTENT
    assert drained(pair, source) == 0
