"""A receiver that waits prepares for a part like the latest, and takes no other for it."""

from __future__ import annotations

import secrets
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch
from stages import assert_same, full_cache, one_to_one

from omnikv import KVReceiver, KVSender, LayerKV
from omnikv.core.keys import Edge, PayloadId
from omnikv.core.messages import MAX_FORMING_HEAD_NBYTES
from omnikv.core.wire import Extension, Header
from omnikv.core.wire_decode import decode_head
from omnikv.handoff import part as part_module
from omnikv.handoff.forecast import Forecast
from omnikv.handoff.receive import RoleFetch
from omnikv.tensors.pack import sealed_head
from omnikv.transports import shm_shelf

HEADER = Header(
    request_id="r0",
    num_layers=0,
    spans=(),
    data_nbytes=0,
    metadata={"model": "tiny"},
    extension=Extension(source_rank=0, target_rank=1, role="primary", attempt=0, heads=(0, 1)),
    scope="header",
)


def identity(**changes):
    edge = Edge(from_stage="a", to_stage="b")
    return PayloadId(**{"edge": edge, "transfer_id": "r1", "source_rank": 0, "target_rank": 1} | changes)


def foretold(header, wanted, nbytes=100):
    forecast = Forecast()
    forecast.note(identity(), header, nbytes)
    return forecast.head_of(wanted)


def test_the_next_head_is_the_latest_under_its_own_name():
    wanted = identity(role="negative", attempt=2)
    head = foretold(HEADER, wanted)
    expected = replace(HEADER, request_id="r1", extension=replace(HEADER.extension, role="negative", attempt=2))
    assert head == sealed_head(expected)
    assert decode_head(head, len(head)).request_id == "r1"


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        (replace(HEADER, scope="all"), 100),
        (replace(HEADER, extension=None), 100),
        (HEADER, MAX_FORMING_HEAD_NBYTES + 1),
        (replace(HEADER, metadata={"x": float("inf")}), 100),
    ],
    ids=["a checksum over the data", "a released engine's", "too long", "not to be spelled"],
)
def test_where_nothing_can_be_foretold_nothing_is(header, nbytes):
    assert foretold(header, identity(), nbytes) == b""


def test_nothing_is_foretold_of_another_source():
    assert foretold(HEADER, identity(source_rank=1)) == b""


class Stages:
    """A sender and a receiver, whose heads read and whose parts prepared are counted."""

    def __init__(self, sender, receiver, monkeypatch, pool):
        self.sender, self.receiver = sender, receiver
        self._pool = pool
        self.decoded = 0
        self._prepared = Event()
        decode, prepare = part_module.decode_payload, RoleFetch.prepare

        def counted(*args, **options):
            self.decoded += 1
            return decode(*args, **options)

        def noted(fetch, *what):
            prepare(fetch, *what)
            self._prepared.set()

        monkeypatch.setattr(part_module, "decode_payload", counted)
        monkeypatch.setattr(RoleFetch, "prepare", noted)

    def hand_over(self, request_id, layers, **keywords):
        """The layers that a receiver got that waits, and how many heads were read once it was sent."""
        self._prepared.clear()
        waiting = self._pool.submit(self.receiver.receive, request_id, timeout_s=60)
        is_first = request_id == "r0"
        assert is_first or self._prepared.wait(60)
        while not self.sender._transport._offers._waiting:
            time.sleep(0.001)
        before = self.decoded
        self.sender.send(request_id, layers, **keywords)
        with waiting.result(timeout=60) as kv:
            assert_same(kv.layers, layers)
            assert kv.metadata == keywords.get("metadata", {})
        assert self.sender.drain(timeout_s=60) == 0
        return self.decoded - before


@pytest.fixture
def stages(monkeypatch):
    route = one_to_one(f"test-{secrets.token_hex(8)}")
    with (
        ThreadPoolExecutor(1) as pool,
        KVSender(route, 0, transport="shm") as sender,
        KVReceiver(route, 0, transport="shm") as receiver,
    ):
        yield Stages(sender, receiver, monkeypatch, pool)


@pytest.mark.parametrize("long_nbytes", [0, 1 << 30], ids=["long", "short"])
def test_a_part_like_the_latest_is_read_before_it_is_sent(stages, monkeypatch, long_nbytes):
    monkeypatch.setattr(shm_shelf, "LONG_NBYTES", long_nbytes)
    stages.hand_over("r0", full_cache(), metadata={"step": 1})
    for request_id in ("r1", "r2"):
        layers = [LayerKV(key + 1, value - 1) for key, value in full_cache()]
        assert stages.hand_over(request_id, layers, metadata={"step": 1}) == 0


def as_integers(layers):
    return [LayerKV(*(tensor.view(torch.int32) for tensor in layer)) for layer in layers]


UNLIKE = {
    "another dtype of as many bytes": (as_integers(full_cache()), {}),
    "another shape of as many bytes": ([LayerKV(*(x.reshape(10, 3, 2) for x in one)) for one in full_cache()], {}),
    "fewer tokens": (full_cache(num_tokens=4), {}),
    "other layers": (full_cache(num_layers=3), {}),
    "other metadata": (full_cache(), {"metadata": {"step": 2}}),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_a_part_unlike_the_latest_is_read_for_itself(stages, unlike):
    layers, keywords = UNLIKE[unlike]
    stages.hand_over("r0", full_cache())
    stages.hand_over("r1", layers, **keywords)
    # And back, into room that may have held the other.
    stages.hand_over("r2", full_cache())


def test_a_receiver_without_time_to_wait_gets_what_is_there(stages):
    stages.hand_over("r0", full_cache())
    stages.sender.send("r1", full_cache())
    with stages.receiver.receive("r1", timeout_s=0) as kv:
        assert_same(kv.layers, full_cache())


def test_a_receiver_that_goes_on_waiting_lets_go_of_memory_that_is_given_up(monkeypatch):
    prepare, held, kept = RoleFetch.prepare, [], []

    def noted(fetch, identity, memory, head):
        prepare(fetch, identity, memory, head)
        if memory:
            held.append(weakref.ref(memory))
            kept.append(fetch._prepared[identity] is not None)

    route = one_to_one(f"test-{secrets.token_hex(8)}")
    options = {"pool_nbytes": 1 << 20, "segment_nbytes": 1 << 19}
    with (
        ThreadPoolExecutor(1) as pool,
        KVSender(route, 0, transport="shm", options=options) as sender,
        KVReceiver(route, 0, transport="shm") as receiver,
    ):
        sender.send("r0", full_cache())
        receiver.receive("r0", timeout_s=60).close()
        assert sender.drain(timeout_s=60) == 0
        monkeypatch.setattr(RoleFetch, "prepare", noted)
        waiting = pool.submit(receiver.receive, "r1", timeout_s=60)
        while not kept:
            time.sleep(0.001)
        # Needs the whole pool, and nobody waits for it.
        sender.send("other", [LayerKV(*(torch.zeros(3500, 3, 8) for _ in range(2)))])
        deadline = time.monotonic() + 60
        while held[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (kept, held[0]()) == ([True], None)
        receiver.receive("other", timeout_s=60).close()
        sender.send("r1", full_cache())
        with waiting.result(timeout=60) as kv:
            assert_same(kv.layers, full_cache())
