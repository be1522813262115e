"""Memory that peers write into on their own: nobody gets it while a write may still come, and all of it comes back."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from omnikv.errors import LocalProtocolError, PutRejected
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import lease, pattern, payload_of, put
from omnikv.transports.landing import LandingPool

KIB = 1024


def pool_of(nbytes, grace_s=60.0):
    return LandingPool("test", memoryview(bytearray(nbytes)), grace_s=grace_s)


def far():
    return time.monotonic() + 60


class OneSidedWriter:
    """Carries payloads from a slow, faulty transport into landing rooms, when it is let, whoever has them by then."""

    def __init__(self, pair, source, target):
        self.pair, self.source, self.target = pair, source, target
        self.may_write = threading.Event()
        self.threads = ThreadPoolExecutor(1)

    def write(self, room, payload):
        into = room.view

        def carry():
            with lease(self.pair, self.target, payload) as found:
                self.may_write.wait(60)
                into[:] = found.buffer
                found.acknowledge()
            room.written()

        return self.threads.submit(carry)


@pytest.fixture
def writer():
    pair = NamedPair(transport="faulty", options={"faults": {"seed": 3, "delay": 1.0, "duplicate": 0.5}})
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        made = OneSidedWriter(pair, source, target)
        yield made
        made.may_write.set()
        made.threads.shutdown()


def test_d27_pages_of_an_aborted_receive_are_not_handed_out_while_the_write_is_in_flight(writer):
    pool = pool_of(KIB)
    first = payload_of(writer.pair, "A")
    put(writer.source, first, pattern(first, KIB))
    room = pool.take(KIB, "peer", deadline=0.0)
    writing = writer.write(room, first)
    room.abandon()
    assert pool.quarantined_nbytes == KIB
    with pytest.raises(LocalProtocolError, match="quarantined"):
        _ = room.view
    with pytest.raises(PutRejected) as refused:
        pool.take(KIB, "peer", deadline=time.monotonic() + 0.01)
    assert refused.value.retryable
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, KIB, "other peer", deadline=far())
        writer.may_write.set()
        writing.result()
        second = waiting.result()
    second.view[:] = b"B" * KIB
    room.written()
    room.abandon()
    assert bytes(second.view) == b"B" * KIB
    second.written()
    second.abandon()
    assert pool.free_nbytes == KIB


def test_d27_a_fenced_writer_frees_its_rooms_at_once_and_nobody_elses():
    pool = pool_of(2 * KIB)
    mine, theirs = pool.take(KIB, "fenced", deadline=0.0), pool.take(KIB, "other", deadline=0.0)
    mine.abandon()
    theirs.abandon()
    pool.fenced("fenced")
    assert (pool.free_nbytes, pool.quarantined_nbytes) == (KIB, KIB)


def test_d26_a_hundred_aborted_receives_of_killed_senders_leave_the_whole_capacity():
    pool = pool_of(4 * KIB, grace_s=0.002)
    for number in range(100):
        room = pool.take(4 * KIB, f"sender {number}", deadline=far())
        room.view[:] = b"x" * (4 * KIB)
        room.abandon()
        pool.writer_gone(f"sender {number}")
        pool.writer_gone(f"sender {number}")
    pool.take(4 * KIB, "the next", deadline=far()).written()
    assert pool.quarantined_nbytes == 0


def test_d26_whoever_waits_is_let_in_by_a_grace_that_begins_while_it_waits():
    pool = pool_of(KIB, grace_s=0.05)
    room = pool.take(KIB, "sender", deadline=0.0)
    room.abandon()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, KIB, "other", deadline=far())
        pool.writer_gone("sender")
        assert len(waiting.result(timeout=60).view) == KIB


def test_what_landed_stays_although_its_writer_is_gone():
    pool = pool_of(KIB, grace_s=0.0)
    room = pool.take(KIB, "sender", deadline=0.0)
    room.view[:] = b"z" * KIB
    room.written()
    pool.writer_gone("sender")
    pool.fenced("sender")
    assert bytes(room.view) == b"z" * KIB
    assert pool.free_nbytes == 0


def test_more_than_there_ever_is_is_refused_for_good():
    with pytest.raises(PutRejected) as refused:
        pool_of(KIB).take(2 * KIB, "sender", deadline=far())
    assert not refused.value.retryable
