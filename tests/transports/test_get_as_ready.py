"""The built-in transports wait for several payloads at once: what is known first is given first."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from omnikv.errors import ProducerFailed, TransportError
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, payload_of, put, take
from omnikv.transports.base import Lease


@pytest.fixture(params=["memory", "shm"])
def pair(request):
    return NamedPair(transport=request.param)


@pytest.fixture
def ends(pair):
    with (
        pair.open_source(0, (0,), {}) as first,
        pair.open_source(1, (0,), {}) as second,
        pair.open_target(0, (0, 1), {}) as target,
    ):
        yield first, second, target


def far():
    return time.monotonic() + 60


def test_a_failure_is_given_while_another_payload_is_still_waited_for(pair, ends):
    first, second, target = ends
    slow, failed = payload_of(pair, "slow", source=0), payload_of(pair, "failed", source=1)
    with closing(target.get_as_ready([slow, failed], deadline=far())) as arrivals, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, arrivals)
        second.fail(failed, "evicted")
        known, error = waiting.result(timeout=60)
        assert known == failed
        assert isinstance(error, ProducerFailed)
        put(first, slow, b"late")
        known, lease = next(arrivals)
        assert known == slow
        assert bytes(lease.buffer) == b"late"
        lease.acknowledge()
        assert next(arrivals, None) is None


def test_payloads_come_in_the_order_in_which_they_are_ready(pair, ends):
    first, second, target = ends
    sources = {0: first, 1: second}
    payloads = [payload_of(pair, f"r{number}", source=source) for number, source in itertools.product(range(3), (0, 1))]
    with closing(target.get_as_ready(payloads, deadline=far())) as arrivals:
        for payload in reversed(payloads):
            put(sources[payload.source_rank], payload, payload.transfer_id.encode())
            known, lease = next(arrivals)
            assert known == payload
            lease.acknowledge()
        assert next(arrivals, None) is None
    assert drained(pair, first) == drained(pair, second) == 0


def test_what_is_not_waited_for_any_more_stays_with_its_sender(pair, ends):
    first, _second, target = ends
    payloads = [payload_of(pair, name) for name in ("a", "b", "c")]
    for payload in payloads:
        put(first, payload, payload.transfer_id.encode())
    with closing(target.get_as_ready(payloads, deadline=far())) as arrivals:
        _, lease = next(arrivals)
        lease.release()
    assert [take(pair, target, payload) for payload in payloads] == [b"a", b"b", b"c"]
    assert drained(pair, first) == 0


def test_closing_the_transport_ends_the_wait(pair, ends):
    first, _second, target = ends
    del first
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(list, target.get_as_ready([payload_of(pair, "never")], deadline=far()))
        target.close()
        try:
            outcomes = [outcome for _, outcome in waiting.result(timeout=60)]
        except TransportError as error:
            outcomes = [error]
    assert all(isinstance(outcome, TransportError) and not isinstance(outcome, Lease) for outcome in outcomes)
    assert outcomes
