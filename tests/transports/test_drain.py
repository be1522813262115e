"""What `drain` waits for: not that readers are done with payloads alone, but that room for others is there again."""

import contextlib
import time

import pytest
from tcp_ends import TcpPair, TcpWorld

from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, lease, payload_of, put

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
