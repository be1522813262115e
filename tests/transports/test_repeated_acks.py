"""An acknowledgement that is lost with its connection has its effect once, when the same two processes meet again."""

import contextlib
import time

import pytest
from one_sided_ends import CopyingWorld
from tcp_ends import TcpWorld
from tcp_proxy import Proxy

from omnikv.core.keys import PayloadId
from omnikv.core.messages import Ack, Want
from omnikv.errors import AlreadyConsumed
from omnikv.testing.conformance import NamedPair
from omnikv.transports.repeated_acks import MAX_REPEATED

SOON_S = 60.0


class ShmWorld:
    """The ends of one edge over shared memory."""

    def __init__(self, stack):
        self.pair = NamedPair(transport="shm")
        self.stack = stack

    def payload(self, name):
        return PayloadId(edge=self.pair.edge, transfer_id=name, source_rank=0, target_rank=0)

    def source(self):
        return self.stack.enter_context(self.pair.open_source(0, (0,), {}))

    def target(self):
        return self.stack.enter_context(self.pair.open_target(0, (0,), {}))


WORLDS = {"shm": ShmWorld, "tcp": TcpWorld, "one-sided": CopyingWorld}


@pytest.fixture(params=WORLDS)
def ends(request):
    """A world, and a source and a target in it that have met."""
    with contextlib.ExitStack() as stack:
        world = WORLDS[request.param](stack)
        source = world.source()
        yield world, source, world.target()


@pytest.fixture
def tcp():
    with contextlib.ExitStack() as stack:
        yield TcpWorld(stack)


def put(world, source, name):
    with source.reserve(world.payload(name), 1000) as slot:
        slot.buffer[:] = name.encode().ljust(1000)
        slot.publish()


def get(world, target, name):
    lease = target.get(world.payload(name), deadline=time.monotonic() + SOON_S)
    assert bytes(lease.buffer) == name.encode().ljust(1000)
    return lease


def drained(source):
    return source.drain(deadline=time.monotonic() + SOON_S)


def break_unread(source, *, then=lambda: None):
    """The source's connection ends; nothing that comes in `then` is read by then."""
    with source._lock:
        then()
        (link,) = source._loop._ready
        source._loop.forget(link)


def test_an_acknowledgement_that_was_not_read_counts_when_the_two_are_back(ends):
    world, source, target = ends
    put(world, source, "r1")
    break_unread(source, then=get(world, target, "r1").acknowledge)
    assert drained(source) == 0
    assert source.census()["released"] == 1
    with pytest.raises(AlreadyConsumed):
        target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)


def test_what_is_acknowledged_after_its_connection_broke_counts_too(ends):
    world, source, target = ends
    for name in ("r1", "r2"):
        put(world, source, name)
    lease = get(world, target, "r1")
    break_unread(source)
    assert source.drain(deadline=0.0) == 2
    get(world, target, "r2").acknowledge()
    lease.acknowledge()
    assert drained(source) == 0


def test_what_is_acknowledged_after_its_connection_broke_counts_though_nothing_else_is_asked_for(ends):
    world, source, target = ends
    put(world, source, "r1")
    lease = get(world, target, "r1")
    (link,) = target._loop._ready
    break_unread(source)
    while link in target._loop._ready:
        time.sleep(0.001)
    lease.acknowledge()
    assert drained(source) == 0
    assert source.census()["released"] == 1


def test_what_was_leased_anew_is_not_ended_by_the_acknowledgement_of_its_earlier_lease(ends):
    world, source, target = ends
    put(world, source, "r1")
    earlier = get(world, target, "r1")
    break_unread(source)
    later = get(world, target, "r1")
    earlier.acknowledge()
    later.release()
    get(world, target, "r1").acknowledge()
    assert drained(source) == 0


def test_only_so_many_are_said_again(ends):
    world, source, target = ends
    put(world, source, "r1")
    lease = get(world, target, "r1")
    (link,) = target._loop._ready
    with target._lock:
        for number in range(2 * MAX_REPEATED):
            target._target._acks.say(link, Ack(10**6 + number))
    break_unread(source)
    lease.acknowledge()
    assert drained(source) == 0
    assert len(target._target._acks._said[link.seat].leases) == MAX_REPEATED


def test_an_acknowledgement_that_a_network_swallowed_counts_when_it_is_mended(tcp):
    source = tcp.source()
    proxy = Proxy(source.address)
    tcp.stack.callback(proxy.close)
    target = tcp.target(peers={0: proxy.address})
    put(tcp, source, "r1")
    lease = get(tcp, target, "r1")
    proxy.is_holding = True
    lease.acknowledge()
    assert source.drain(deadline=time.monotonic() + 0.1) == 1
    proxy.cut_all()
    proxy.is_holding = False
    assert drained(source) == 0
    assert source.census()["released"] == 1


def take_lease(caller, name):
    """Nothing; a bare target has the payload leased to it."""
    caller.say(Want(0, name, "primary", 0, True))
    while b"leased" not in (said := caller.hear()):
        assert said


@pytest.fixture
def leased(tcp):
    """A source whose payload a bare target has leased, and that target."""
    source = tcp.source(targets=(0, 1))
    put(tcp, source, "r1")
    holder = tcp.caller(source.address).enter()
    take_lease(holder, "r1")
    # Entered by whoever holds the lock, who has told the target by then.
    with source._lock:
        return source, holder, next(iter(source._source._ledger._leases))


def test_a_connection_that_only_its_target_knows_to_be_dead_does_not_hold_a_lease(tcp, leased):
    source, holder, lease = leased
    again = tcp.caller(source.address, life=holder.claim.life).enter()
    again.say(Ack(lease))
    assert drained(source) == 0
    assert holder.is_ended()


@pytest.mark.parametrize("rank", [0, 1], ids=["its next life", "another rank"])
def test_nobody_else_acknowledges_what_a_target_held(tcp, leased, rank):
    source, holder, lease = leased
    holder.close()
    other = tcp.caller(source.address, rank=rank).enter()
    for number in range(lease + 5):
        other.say(Ack(number))
    other.say(Want(0, "r9", "primary", 0, False))
    while b"absent" not in other.hear():
        pass
    assert source.drain(deadline=0.0) == 1


def test_a_target_acknowledges_nothing_that_it_never_held(tcp):
    source = tcp.source()
    put(tcp, source, "r1")
    other = tcp.caller(source.address).enter()
    for number in range(20):
        other.say(Ack(number))
    other.say(Want(0, "r9", "primary", 0, False))
    while b"absent" not in other.hear():
        pass
    assert source.drain(deadline=0.0) == 1
    assert source.counters == {}
