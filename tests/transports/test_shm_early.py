"""Early words over shm: who waits is told that its payload is being written, and where, and takes neither for it."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from stages import assert_same, full_cache, one_to_one

from omnikv import KVReceiver, KVSender
from omnikv.core.messages import Forming, Soon
from omnikv.errors import ProducerFailed
from omnikv.handoff import cut as cut_module
from omnikv.handoff import part as part_module
from omnikv.handoff.receive import RoleFetch
from omnikv.tensors.kv import DenseSource
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, payload_of, put, take
from omnikv.transports import shm_shelf
from omnikv.transports.shm_shelf import ShmShelf

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

    def _preview(self, payload, view):
        self.views.append(view)
        self.saw.set()

    def outcome(self):
        return self._result.result(timeout=60)


def test_a_target_that_waits_sees_where_its_payload_is_written_once_its_head_is(pair, ends, pool):
    source, target = ends
    payload = payload_of(pair, "r1")
    waiting = Waiting(pool, source, target, payload)
    source.herald([payload])
    with source.reserve(payload, len(CONTENT)) as slot:
        slot.buffer[:4] = b"head"
        slot.written(0, 4)
        assert waiting.saw.wait(60)
        [view] = waiting.views
        assert view.readonly
        assert bytes(view[:4]) == b"head"
        assert len(view) == len(CONTENT)
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
    with source.reserve(payload, len(CONTENT)) as slot:
        slot.written(0, 4)
        assert waiting.saw.wait(60)
        source.fail(payload, "a kernel failed")
    assert isinstance(waiting.outcome(), ProducerFailed)
    put(source, payload, b"again")
    assert take(pair, target, payload) == b"again"


def test_ranges_behind_the_head_show_nothing(pair, ends, pool):
    source, target = ends
    payload = payload_of(pair, "r1")
    waiting = Waiting(pool, source, target, payload)
    with source.reserve(payload, len(CONTENT)) as slot:
        slot.written(4, len(CONTENT))
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
    source.herald([payload])
    put(source, payload, CONTENT)
    with waiting.outcome() as lease:
        assert bytes(lease.buffer) == CONTENT
    assert waiting.views == []


def test_a_preview_that_raises_loses_nothing(pair, ends, pool):
    source, target = ends
    payload = payload_of(pair, "r1")

    def preview(payload, view):
        raise MemoryError("no room for a view")

    def wait():
        return list(target.get_as_ready([payload], deadline=time.monotonic() + 60, preview=preview))

    waiting = pool.submit(wait)
    while not source._offers._waiting:
        time.sleep(0.001)
    with source.reserve(payload, len(CONTENT)) as slot:
        slot.written(0, 4)
        with pytest.raises(MemoryError):
            waiting.result(timeout=60)
        slot.buffer[:] = CONTENT
        slot.publish()
    assert take(pair, target, payload) == CONTENT


class Recorder:
    """A link that keeps what it is given to send."""

    def __init__(self):
        self.said = []

    def send(self, message):
        self.said.append(message)


def test_a_target_that_is_gone_is_told_nothing_more(ends):
    source, _ = ends
    shelf, link, gone = ShmShelf(source.pool, source._lock), Recorder(), Recorder()
    [room] = shelf.take([64])
    shelf._share = lambda link, room: None
    for one in (link, gone):
        shelf.link_ready(one)
        shelf.herald(one, 7)
        shelf.promise(one, 7, room)
    shelf.link_gone(gone)
    shelf.wrote(room, 0, 8)
    shelf.wrote(room, 0, 8)
    assert gone.said == [Soon(7)]
    assert link.said == [Soon(7), Forming(7, room.segment.number, room.offset, room.nbytes)]
    shelf.give(room)


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
