"""What holds over any engine that reads on its own: codes, deadlines, deaths and memory, with one that copies."""

import os
import sys
import threading
import time

import pytest
from one_sided_ends import PATIENCE_S, CopyingEngine, copying_world, put, soon, take, until

from omnikv.errors import ProducerFailed, PutRejected, TransportError, TransportUnavailable
from omnikv.transports.base import Endpoint, PutRequest
from omnikv.transports.registry import open_transport


@pytest.fixture
def world():
    with copying_world() as opened:
        yield opened


@pytest.mark.parametrize("code", [-1, -2, -800, "NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_BACKEND", 0])
@pytest.mark.parametrize("when", ["refusals", "endings"])
def test_d32_every_code_of_a_failed_read_is_kept_and_the_payload_is_still_there(world, code, when):
    source, target = world.source(), world.target()
    put(source, world.payload("r"))
    getattr(target.engine, when).extend([code] * 3)
    with pytest.raises(TransportError, match=rf"the engine says {code}; .*get it again"):
        target.get(world.payload("r"), deadline=soon())
    assert take(target, world.payload("r")) == b"payload"
    assert source.drain(deadline=soon()) == 0


def test_d32_one_bad_read_is_tried_again_unseen(world):
    source, target = world.source(), world.target()
    put(source, world.payload("r"))
    target.engine.endings.append(-1)
    assert take(target, world.payload("r")) == b"payload"
    assert target.engine.ended == 2


@pytest.mark.parametrize("gate", ["may_start", "may_end"])
def test_d11_a_deadline_holds_while_the_engine_blocks_and_what_comes_late_is_nobodys(world, gate):
    source, target = world.source(), world.target()
    put(source, world.payload("r"), b"L" * 4096)
    getattr(target.engine, gate).clear()
    began = time.monotonic()
    assert target.get(world.payload("r"), deadline=began + 0.1) is None
    assert time.monotonic() - began < 5
    assert target.engine.started.acquire(timeout=PATIENCE_S)
    held = target.pool.used_nbytes
    assert held >= 4096
    getattr(target.engine, gate).set()
    until(lambda: target.pool.used_nbytes == 0)
    assert take(target, world.payload("r")) == b"L" * 4096


def test_a_source_whose_engine_blocks_delays_no_other_source(world):
    slow, quick = world.source(0), world.source(1)
    put(slow, world.payload("r", 0))
    put(quick, world.payload("r", 1))
    engine, hold = CopyingEngine(), threading.Event()
    start = engine.start

    def start_unless_slow(source, *where):
        if source == slow.engine.name:
            assert hold.wait(60)
        return start(source, *where)

    engine.start = start_unless_slow
    target = world.target(sources=(0, 1), engine=engine)
    try:
        outcomes = target.get_as_ready([world.payload("r", 0), world.payload("r", 1)], deadline=soon())
        first, lease = next(outcomes)
        assert first.source_rank == 1
        lease.acknowledge()
        outcomes.close()
    finally:
        hold.set()


def test_a_source_that_dies_while_it_is_read_is_known_at_once_and_its_bytes_never_show(world):
    source, target = world.source(), world.target()
    put(source, world.payload("r"), b"D" * 4096)
    target.engine.may_end.clear()
    threading.Thread(target=lambda: (target.engine.started.acquire(timeout=PATIENCE_S), source.close())).start()
    with pytest.raises(ProducerFailed):
        target.get(world.payload("r"), deadline=soon())
    assert target.pool.used_nbytes > 0
    target.engine.endings.append("the peer is gone")
    target.engine.may_end.set()
    until(lambda: target.pool.used_nbytes == 0)
    until(lambda: not target.engine.sources)


def test_room_is_waited_for_first_come_first_served(world):
    source = world.source(pool_nbytes=8 << 20)
    target = world.target(landing_nbytes=1 << 20)
    for name in ("a", "b"):
        put(source, world.payload(name), name.encode() * (1 << 20))
    first = target.get(world.payload("a"), deadline=soon())
    assert target.get(world.payload("b"), deadline=time.monotonic() + 0.05) is None
    first.acknowledge()
    assert take(target, world.payload("b")) == b"b" * (1 << 20)
    assert source.drain(deadline=soon()) == 0


def test_a_payload_that_can_never_land_is_an_error_that_names_the_option(world):
    source, target = world.source(), world.target(landing_nbytes=1 << 20)
    put(source, world.payload("big"), bytes(2 << 20))
    with pytest.raises(TransportError, match=r"landing_nbytes is 1048576; raise it"):
        target.get(world.payload("big"), deadline=soon())
    source.abort(world.payload("big"), "too big")
    put(source, world.payload("small"))
    assert take(target, world.payload("small")) == b"payload"


def test_the_source_gives_no_room_away_that_is_still_being_read(world):
    source, target = world.source(pool_nbytes=1 << 20), world.target()
    put(source, world.payload("r"), b"R" * (1 << 20))
    target.engine.may_end.clear()
    assert target.get(world.payload("r"), deadline=time.monotonic() + 0.1) is None
    source.abort(world.payload("r"), "nobody needs it")
    with pytest.raises(PutRejected):
        source.reserve(world.payload("next"), 1 << 20)
    target.engine.may_end.set()
    (slot,) = source.reserve_all([PutRequest(world.payload("next"), 1 << 20)], deadline=soon())
    slot.drop()


def test_an_engine_that_must_be_served_is_served_while_something_is_read_and_sleeps_otherwise(world):
    source = world.source(engine=CopyingEngine(needs_serving=True))
    target = world.target()
    put(source, world.payload("r"))
    target.engine.may_end.clear()
    lease = []
    reader = threading.Thread(target=lambda: lease.append(target.get(world.payload("r"), deadline=soon())))
    reader.start()
    for _ in range(5):
        assert source.engine.served.acquire(timeout=PATIENCE_S)
    target.engine.may_end.set()
    reader.join()
    # Held, but read: a lease costs the source nothing.
    until(lambda: not source._shelf._server._is_expected)
    lease[0].acknowledge()


def test_memory_is_registered_once_and_given_back_at_the_end(world):
    source, target = world.source(), world.target()
    for number in range(20):
        put(source, world.payload(f"r{number}"))
        assert take(target, world.payload(f"r{number}")) == b"payload"
    assert len(source.engine.registered) == len(target.engine.registered) == 1
    for end in (target, source):
        end.close()
        assert end.engine.registered == {}


@pytest.mark.slow
def test_d32_a_thousand_peers_leave_no_handle_thread_or_descriptor(world):
    source = world.source()

    def meet_one(number):
        payload = world.payload(f"r{number}")
        with world.target() as target:
            put(source, payload)
            assert take(target, payload) == b"payload"
        assert not target.engine.sources
        assert not target.engine.registered

    def handles():
        until(lambda: not source._shelf._read)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    meet_one(0)
    before = handles()
    for number in range(1, 1001):
        meet_one(number)
    assert handles() == before


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("mooncake", "mooncake.engine", r"pip install 'omnikv\[mooncake\]'.*libibverbs1"),
        ("nixl", "nixl_cu12._api", r"pip install 'omnikv\[nixl\]'"),
    ],
)
def test_without_its_library_a_transport_says_what_to_install(world, monkeypatch, name, module, words):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("omnikv.transports.mooncake_engine._engines", {})
    endpoint = Endpoint(edge=world.edge, side="source", rank=0, peer_ranks=(0,))
    with pytest.raises(TransportUnavailable, match=words):
        open_transport(name, endpoint, {"pool_nbytes": 1 << 20})
