"""D17: a backend whose get blocks does not hold its caller past the deadline, and what comes late is given back."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from omnikv import KVReceiver, KVSender, Route
from omnikv.errors import OmniKVError, ReceiveTimeout, TransportError
from omnikv.testing.conformance import NamedPair, transport_scenarios
from omnikv.testing.transport_pair import lease, payload_of, put, take
from omnikv.transports import bounded
from omnikv.transports.bounded import BoundedTransport
from omnikv.transports.memory import MemoryTransport
from omnikv.transports.registry import register_transport, unregister_transport


class Blocking(MemoryTransport):
    """Whose get waits until the test lets it, whatever its deadline is."""

    capabilities = replace(MemoryTransport.capabilities, keeps_deadlines=False)
    gate = threading.Event()
    inside = threading.Semaphore(0)

    def get(self, payload, *, deadline):
        self.inside.release()
        self.gate.wait(60)
        return super().get(payload, deadline=time.monotonic() + 0.5)


@pytest.fixture
def blocking():
    Blocking.gate, Blocking.inside = threading.Event(), threading.Semaphore(0)
    register_transport("blocking", Blocking)
    yield Blocking
    Blocking.gate.set()
    unregister_transport("blocking")


def test_d17_a_receive_ends_by_its_deadline_and_the_late_payload_is_given_back(blocking, tmp_path):
    route = Route.tp("p", "d", num_kv_heads=1, from_tp=1, to_tp=1, namespace=f"bounded-{tmp_path.name}")
    layers = [(torch.ones(2, 1, 4), torch.ones(2, 1, 4))]
    with KVSender(route, 0, transport="blocking") as sender, KVReceiver(route, 0, transport="blocking") as receiver:
        assert isinstance(receiver._transport, BoundedTransport)
        sender.send("r1", layers)
        started = time.monotonic()
        with pytest.raises(ReceiveTimeout):
            receiver.receive("r1", timeout_s=0.05)
        assert time.monotonic() - started < 30, "it waited for the backend"
        blocking.gate.set()
        with receiver.receive("r1", timeout_s=60) as kv:
            assert torch.equal(kv.layers[0].key, layers[0][0])
        assert sender.drain(timeout_s=60) == 0


def test_d17_the_claim_of_a_call_that_was_given_up_is_released(blocking):
    pair = NamedPair(transport="blocking")
    payload = payload_of(pair, "r1")
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        put(source, payload, b"x")
        assert target.get(payload, deadline=time.monotonic() + 0.01) is None
        blocking.gate.set()
        until = time.monotonic() + 60
        while any(thread.name == "omnikv-memory-get" for thread in threading.enumerate()):
            assert time.monotonic() < until
            source.drain(deadline=time.monotonic() + 0.001)
        assert source.census()["leased"] == 0
        assert take(pair, target, payload) == b"x"


def test_asking_again_does_not_pile_up_threads(blocking):
    pair = NamedPair(transport="blocking")
    payload = payload_of(pair, "r1")
    with pair.open_source(0, (0,), {}), pair.open_target(0, (0,), {}) as target:
        for _ in range(20):
            assert target.get(payload, deadline=time.monotonic() + 0.001) is None
        assert blocking.inside.acquire(timeout=60)
        assert not blocking.inside.acquire(blocking=False)


def test_a_backend_that_hangs_for_everybody_is_said(blocking, monkeypatch):
    monkeypatch.setattr(bounded, "MAX_CALLS", 2)
    pair = NamedPair(transport="blocking")
    with pair.open_source(0, (0,), {}), pair.open_target(0, (0,), {}) as target:
        for number in range(2):
            assert target.get(payload_of(pair, f"r{number}"), deadline=time.monotonic() + 0.001) is None
        with pytest.raises(TransportError, match="2 calls are inside of the backend"):
            target.get(payload_of(pair, "r2"), deadline=time.monotonic() + 0.001)


def test_an_error_that_nobody_foresaw_is_told_to_the_caller(blocking, monkeypatch):
    def stumble(self, payload, *, deadline):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(blocking, "get", stumble)
    pair = NamedPair(transport="blocking")
    with pair.open_target(0, (0,), {}) as target, pytest.raises(OmniKVError, match="ZeroDivisionError: a mistake"):
        lease(pair, target, payload_of(pair, "r1"))


LIVELY = ("put_then_get", "get_then_put", "absent_at_the_deadline", "released_is_found_again", "threads_share_an_end")


@pytest.mark.parametrize("name", LIVELY)
def test_a_bounded_transport_keeps_the_rules(blocking, name):
    class Bound(MemoryTransport):
        capabilities = replace(MemoryTransport.capabilities, keeps_deadlines=False)

    register_transport("bound", Bound)
    try:
        dict(transport_scenarios())[name](NamedPair(transport="bound"))
    finally:
        unregister_transport("bound")


def test_a_transport_that_keeps_deadlines_is_left_as_it_is():
    pair = NamedPair(transport="memory")
    with pair.open_target(0, (0,), {}) as target:
        assert type(target) is MemoryTransport
