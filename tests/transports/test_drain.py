"""What `drain` and `wait_until_free` wait for: that nobody reads what was sent, and its room is there for others."""

import contextlib
import time

import pytest
from tcp_ends import TcpPair, TcpWorld

from omnikv.errors import ConfigError, PutRejected
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, lease, payload_of, put
from omnikv.transports.base import PutRequest

SOON_S = 60.0
POOL_NBYTES = 1 << 20
NBYTES = POOL_NBYTES * 3 // 5


@pytest.fixture(params=["memory", "shm", "tcp"])
def pair(request):
    return TcpPair() if request.param == "tcp" else NamedPair(transport=request.param)


def test_what_was_aborted_while_it_is_read_is_drained_for(pair, in_thread):
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payload = payload_of(pair, "read")
        put(source, payload, b"x")
        held = lease(pair, target, payload)
        source.abort(payload, "the client went away")
        assert source.drain(deadline=0.0) == 1
        waiting = in_thread(drained, pair, source)
        held.release()
        assert waiting.result(timeout=SOON_S) == 0


def test_what_was_never_published_is_not_drained_for(pair):
    with pair.open_source(0, (0,), {}) as source, source.reserve(payload_of(pair, "written"), 1):
        assert source.drain(deadline=0.0) == 0


def test_a_source_that_ended_is_not_drained_for_although_a_lane_still_reads():
    with contextlib.ExitStack() as stack:
        world = TcpWorld(stack)
        source, payload = world.source(pool_nbytes=POOL_NBYTES), world.payload("first")
        target, shelf = world.target(), source._shelf
        put(source, payload, bytes(NBYTES))
        with target.get(payload, deadline=time.monotonic() + SOON_S):
            ((link, shown),) = shelf._shown.items()
            (token,) = shown
            read_still = shelf.pin(link, token)
            source.close()
        assert source.drain(deadline=0.0) == 0
        shelf.release(read_still)
        assert source.drain(deadline=0.0) == 0


def is_free(source, payload, timeout_s=0.0):
    return source.wait_until_free([payload], deadline=time.monotonic() + timeout_s)


def test_one_payload_is_waited_for_whatever_becomes_of_others(pair, in_thread):
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        read, unread = payload_of(pair, "read"), payload_of(pair, "unread")
        assert is_free(source, read)
        put(source, read, b"x")
        put(source, unread, b"y")
        assert not is_free(source, read)
        waiting = in_thread(is_free, source, read, SOON_S)
        with lease(pair, target, read) as held:
            assert not is_free(source, read)
            held.acknowledge()
        assert waiting.result(timeout=SOON_S)
        assert not is_free(source, unread)
        assert not source.wait_until_free([read, unread], deadline=0.0)


def test_what_was_aborted_while_it_is_read_is_free_once_its_reader_is_done(pair, in_thread):
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payload = payload_of(pair, "read")
        put(source, payload, b"x")
        held = lease(pair, target, payload)
        source.abort(payload, "the client went away")
        assert not is_free(source, payload)
        waiting = in_thread(is_free, source, payload, SOON_S)
        held.release()
        assert waiting.result(timeout=SOON_S)


def test_what_expires_is_free(pair):
    with pair.open_source(0, (0,), {}, payload_ttl_s=0.05) as source:
        payload = payload_of(pair, "nobody comes for it")
        put(source, payload, b"x")
        assert is_free(source, payload, SOON_S)
        assert source.census()["expired"] == 1


def test_what_is_written_is_not_free_until_its_writer_gives_it_up(pair, in_thread):
    with pair.open_source(0, (0,), {}) as source:
        payload = payload_of(pair, "written")
        with source.reserve(payload, 1):
            waiting = in_thread(is_free, source, payload, SOON_S)
            assert not is_free(source, payload)
        assert waiting.result(timeout=SOON_S)


def test_what_never_got_room_is_free_when_nobody_waits_for_room_any_more(pair, in_thread):
    with pair.open_source(0, (0,), {}) as source:
        put(source, payload_of(pair, "fills it"), bytes(pair.pool_nbytes * 9 // 10))
        payload = payload_of(pair, "waits")
        wanted = [PutRequest(payload, pair.pool_nbytes // 2)]
        entering = in_thread(lambda: source.reserve_all(wanted, deadline=time.monotonic() + 0.5))
        while source.census()["announced"] == 0 and not entering.done():
            pass
        assert is_free(source, payload, SOON_S)
        with pytest.raises(PutRejected):
            entering.result(timeout=SOON_S)


def test_a_target_is_not_asked_what_is_free(pair):
    with pair.open_target(0, (0,), {}) as target, pytest.raises(ConfigError, match="source"):
        is_free(target, payload_of(pair, "r1"))
