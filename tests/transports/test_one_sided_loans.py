"""Payloads that stay in their callers' memory: read there, known to the engine once, and given back at every end."""

import ctypes

import msgspec
import pytest
from one_sided_ends import PATIENCE_S, CopyingEngine, copying_world, soon, take, until

from omnikv.core.lending import MAX_SPANS, Loan, Memory, Span
from omnikv.core.messages import MAX_MESSAGE_NBYTES
from omnikv.errors import Aborted, ConfigError, Expired, PutRejected, TransportError
from omnikv.transports import one_sided_loans
from omnikv.transports.base import Endpoint
from omnikv.transports.one_sided_loans import LentMemory
from omnikv.transports.one_sided_messages import Placed
from omnikv.transports.registry import open_transport


class Cache:
    """A caller's memory: 8 blocks of 64 bytes, each filled with its number."""

    def __init__(self):
        self.room = ctypes.create_string_buffer(b"".join(bytes([block]) * 64 for block in range(8)), 512)
        self.address = ctypes.addressof(self.room)
        self.has_gone = False

    def memory(self, nbytes=512):
        return Memory(self.address, nbytes, self.room, lambda: self.has_gone)

    def loan(self, *blocks):
        lent = [Span(True, self.address + 64 * block, 64) for block in blocks]
        return Loan((Span(False, 0, 4), *lent, Span(False, 16, 4)), (self.memory(),))


@pytest.fixture
def world():
    with copying_world() as opened:
        yield opened


def lend(source, payload, loan):
    with source.reserve(payload, 20) as slot:
        slot.buffer[:] = b"head" + b"-" * 12 + b"tail"
        slot.lend(loan)
        slot.publish()


def as_sent(*blocks):
    return b"head" + b"".join(bytes([block]) * 64 for block in blocks) + b"tail"


def test_lent_blocks_come_in_their_order_between_what_was_written_and_are_given_back(world):
    source, target, cache = world.source(lend=True), world.target(), Cache()
    lend(source, world.payload("r"), cache.loan(5, 2, 3))
    assert source.census()["lent"] == 1
    assert take(target, world.payload("r")) == as_sent(5, 2, 3)
    assert source.drain(deadline=soon()) == 0
    assert source.census()["lent"] == 0


def test_lent_memory_is_free_when_its_payload_was_aborted_and_its_reader_is_done(world, in_thread):
    source, target, cache = world.source(lend=True), world.target(), Cache()
    payload = world.payload("r")
    lend(source, payload, cache.loan(5))
    held = target.get(payload, deadline=soon())
    source.abort(payload, "nobody needs it")
    assert not source.wait_until_free([payload], deadline=0.0)
    waiting = in_thread(lambda: source.wait_until_free([payload], deadline=soon()))
    held.release()
    assert waiting.result(timeout=PATIENCE_S)
    assert source.census()["lent"] == 0


def test_a_cache_is_registered_once_however_many_payloads_are_lent_of_it(world):
    source, target, cache = world.source(lend=True), world.target(), Cache()
    for number in range(200):
        lend(source, world.payload(f"r{number}"), cache.loan(number % 8))
        assert take(target, world.payload(f"r{number}")) == as_sent(number % 8)
    until(lambda: source.census()["lent"] == 0)
    assert sorted(source.engine.registered.values()) == [512, 1 << 20]


def test_memory_that_is_gone_is_unregistered_when_other_memory_is_lent(world):
    source, target, old, new = world.source(lend=True), world.target(), Cache(), Cache()
    lend(source, world.payload("old"), old.loan(1))
    take(target, world.payload("old"))
    until(lambda: source.census()["lent"] == 0)
    old.has_gone = True
    lend(source, world.payload("new"), new.loan(1))
    assert old.address not in source.engine.registered
    assert take(target, world.payload("new")) == as_sent(1)


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_what_is_called_off_while_it_is_read_stays_lent_until_it_is_not(world, in_thread, how):
    source, target, cache = world.source(lend=True), world.target(), Cache()
    target.engine.may_end.clear()
    lend(source, world.payload("r"), cache.loan(4))
    reading = in_thread(target.get, world.payload("r"), deadline=soon())
    assert target.engine.started.acquire(timeout=PATIENCE_S)
    getattr(source, how)(world.payload("r"), "not needed")
    assert source.census()["lent"] == 1
    target.engine.may_end.set()
    reading.result().acknowledge()
    until(lambda: source.census()["lent"] == 0)


def test_what_is_called_off_or_dropped_before_anyone_reads_is_given_back_at_once(world):
    source, target, cache = world.source(lend=True), world.target(), Cache()
    lend(source, world.payload("r"), cache.loan(4))
    source.abort(world.payload("r"), "not needed")
    assert source.census()["lent"] == 0
    with pytest.raises(Aborted):
        target.get(world.payload("r"), deadline=soon())
    with source.reserve(world.payload("s"), 20) as slot:
        slot.lend(cache.loan(1))
    assert source.census()["lent"] == 0


def test_what_expires_is_given_back(world):
    source, cache = world.source(lend=True, payload_ttl_s=0.02), Cache()
    target = world.target()
    lend(source, world.payload("r"), cache.loan(4))
    until(lambda: source.census()["lent"] == 0)
    with pytest.raises(Expired):
        target.get(world.payload("r"), deadline=soon())


def test_memory_that_a_dead_target_may_still_read_is_held_for_a_while(world, in_thread):
    source, cache = world.source(lend=True), Cache()
    target = world.target()
    target.engine.may_end.clear()
    lend(source, world.payload("r"), cache.loan(4))
    reading = in_thread(target.get, world.payload("r"), deadline=soon())
    assert target.engine.started.acquire(timeout=PATIENCE_S)
    in_thread(target.close)
    assert isinstance(reading.exception(), TransportError)
    until(lambda: source.census()["leased"] == 0)
    source.abort(world.payload("r"), "its target is gone")
    assert source.census()["lent"] == 0
    target.engine.may_end.set()


def test_the_longest_list_of_places_fits_one_message():
    places = ((2**64 - 1, 2**64 - 1),) * MAX_SPANS
    assert len(msgspec.msgpack.encode(Placed(2**64 - 1, 2**64 - 1, places))) <= MAX_MESSAGE_NBYTES


def test_a_transport_that_does_not_lend_says_so(world):
    source = world.source()
    assert "lent" not in source.census()
    endpoint = Endpoint(edge=world.edge, side="source", rank=3, peer_ranks=(0,))
    with pytest.raises(ConfigError, match="lend is an option of nixl alone"):
        open_transport("tcp", endpoint, {"lend": True})
    with (
        open_transport("memory", endpoint) as memory,
        memory.reserve(world.payload("r", source=3), 4) as slot,
        pytest.raises(ConfigError, match="copies what it sends"),
    ):
        slot.lend(Loan((), ()))


class TestLentMemory:
    """What the engine is told of, and what is held."""

    def lent(self, linger_s=0.0):
        self.engine = CopyingEngine()
        return LentMemory(self.engine, transport="copying", linger_s=linger_s)

    def test_a_larger_stretch_takes_the_place_of_a_smaller_once_that_is_given_back(self):
        lent, cache = self.lent(), Cache()
        small = lent.hold([cache.memory(64)])
        with pytest.raises(PutRejected, match="are lent now") as refused:
            lent.hold([Cache().memory(), cache.memory(512)])
        assert refused.value.retryable
        lent.let_go(small, is_read=False)
        lent.hold([cache.memory(512)])
        assert self.engine.registered[cache.address] == 512

    def test_memory_is_held_while_it_is_lent_and_longer_where_it_may_be_read(self):
        lent, cache = self.lent(linger_s=1000.0), Cache()
        (first,) = lent.hold([cache.memory()])
        lent.hold([cache.memory()])
        lent.let_go([first], is_read=False)
        assert first.owner is cache.room
        lent.let_go([first], is_read=True)
        assert first.owner is cache.room
        lent.hold([Cache().memory()])
        assert first.owner is cache.room

    def test_no_more_than_so_many_are_kept_and_those_lent_are(self, monkeypatch):
        monkeypatch.setattr(one_sided_loans, "MAX_REGISTERED", 3)
        lent, caches = self.lent(), [Cache() for _ in range(6)]
        lent.hold([caches[0].memory()])
        for cache in caches[1:]:
            lent.let_go(lent.hold([cache.memory()]), is_read=False)
        assert len(self.engine.registered) == 3
        assert caches[0].address in self.engine.registered

    def test_caches_without_end_are_refused_in_plain_words(self, monkeypatch):
        monkeypatch.setattr(one_sided_loans, "MAX_EVER", 2)
        lent, caches = self.lent(), [Cache() for _ in range(3)]
        lent.hold([cache.memory() for cache in caches[:2]])
        with pytest.raises(TransportError, match="make the caches once"):
            lent.hold([caches[2].memory()])

    def test_closing_tells_the_engine_to_forget_all(self):
        lent, cache = self.lent(), Cache()
        lent.hold([cache.memory()])
        lent.close(is_read=False)
        assert not self.engine.registered
        with pytest.raises(TransportError, match="it is closed"):
            lent.hold([cache.memory()])
