"""Where tcp ends listen and call: ports of any kind, taken ones, formulas, later lives, and waits that grow."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tcp_ends import TcpWorld, free_address

from omnikv.core.topology import KV_RANK_PORT_STRIDE
from omnikv.errors import ConfigError, ConnectError, ProducerFailed, RemoteProtocolError, TransportError
from omnikv.transports.proved_address import source_address
from omnikv.transports.retry import BackOff
from omnikv.transports.stream_frames import FrameCutter, frame

SOON_S = 60.0


@pytest.fixture
def world(stack):
    return TcpWorld(stack)


def put(world, source, name, content=b"content"):
    with source.reserve(world.payload(name), len(content)) as slot:
        slot.buffer[:] = content
        slot.publish()


def get(world, target, name):
    with target.get(world.payload(name), deadline=time.monotonic() + SOON_S) as lease:
        content = bytes(lease.buffer)
        lease.acknowledge()
    return content


def test_any_free_port_is_taken_and_told(world):
    source = world.source()
    host, port = source.address.rsplit(":", 1)
    assert host == "127.0.0.1"
    assert int(port) > 0
    put(world, source, "r1")
    assert get(world, world.target(peers={0: source.address}), "r1") == b"content"


def test_an_address_may_be_told_later_by_a_function(world):
    known = {}
    target = world.target(peers=known.get)
    assert target.get(world.payload("r1"), deadline=time.monotonic() + 0.1) is None
    source = world.source()
    put(world, source, "r1")
    known[0] = source.address
    assert get(world, target, "r1") == b"content"


def test_a_function_that_fails_is_named_to_whoever_asks(world):
    def peers(rank):
        raise KeyError(rank)

    target = world.target(peers=peers)
    with pytest.raises(ConnectError, match="function peers failed for source rank 0"):
        target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)


@pytest.mark.parametrize("address", ["", "5600", "host", "host:", ":5600", "host:70000", "host:x", 5600, None])
def test_what_is_no_address_is_refused(world, address):
    with pytest.raises(ConfigError, match=r"must be an address like|must map source ranks"):
        world.source(listen=address) if address is not None else world.target(peers=7)


def test_a_target_without_its_sources_addresses_is_refused_at_once(world):
    with pytest.raises(ConfigError, match="no address for source rank 1; it knows ranks"):
        world.target(sources=(0, 1), peers={0: "127.0.0.1:5600"})
    with pytest.raises(ConfigError, match="needs the option peers"):
        world.target(peers=None)


def test_d25_a_port_held_by_a_stranger_is_named_with_the_setting(world):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(TransportError) as caught:
            world.source(listen=address)
    for words in (address, "holds port", "option listen", "source rank 0"):
        assert words in str(caught.value)


def test_d11_two_replicas_of_four_ranks_listen_beside_each_other_by_formula(world):
    base = 20000 + os.getpid() % 20000
    addresses = {
        (replica, stage, rank): source_address("127.0.0.1", base, stage, rank=rank, replica=replica)
        for replica in (0, 1)
        for stage in (0, 1)
        for rank in range(4)
    }
    assert len(set(addresses.values())) == len(addresses)
    first, second = (int(addresses[0, 0, rank].rsplit(":", 1)[1]) for rank in (0, 1))
    assert second - first == KV_RANK_PORT_STRIDE


def test_a_name_is_looked_up(world):
    source = world.source(listen="localhost:0")
    put(world, source, "r1")
    assert get(world, world.target(peers={0: source.address}), "r1") == b"content"


def test_ipv6_loopback_serves(world):
    try:
        source = world.source(listen="[::1]:0")
    except TransportError:
        pytest.skip("this system has no IPv6")
    assert source.address.startswith("[::1]:")
    put(world, source, "r1")
    assert get(world, world.target(peers={0: source.address}), "r1") == b"content"


def test_a_rank_at_another_ranks_address_is_named(world):
    other = world.source(rank=1, targets=(0,))
    target = world.target(peers={0: other.address})
    with pytest.raises(ConnectError, match=r"listens source rank 1, not rank 0: correct the option peers"):
        target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)


def test_a_source_that_restarts_is_a_new_life_whose_requests_work(world):
    address = free_address()
    source = world.source(listen=address)
    target = world.target(peers={0: address})
    put(world, source, "old")
    lost = target.get(world.payload("old"), deadline=time.monotonic() + SOON_S)
    source.close()
    again = world.source(listen=address)
    put(world, again, "new", b"new life")
    for _ in range(20):
        try:
            assert get(world, target, "new") == b"new life"
            break
        except ProducerFailed:
            continue
    lost.acknowledge()
    assert again.drain(deadline=time.monotonic() + SOON_S) == 0
    assert target.get(world.payload("old"), deadline=time.monotonic() + 0.05) is None


FORKING = """
import os, sys, time, warnings
from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import TransportError
from omnikv.transports.base import Endpoint
from omnikv.transports.tcp import TcpTransport
warnings.simplefilter("ignore", DeprecationWarning)
edge = Edge(from_stage="prefill", to_stage="decode", namespace=sys.argv[1])
payload = PayloadId(edge=edge, transfer_id="r1", source_rank=0, target_rank=0)
source = TcpTransport(Endpoint(edge=edge, side="source", rank=0, peer_ranks=(0,)))
target = TcpTransport(Endpoint(edge=edge, side="target", rank=0, peer_ranks=(0,)), peers={0: source.address})
def exchange():
    with source.reserve(payload, 7) as slot:
        slot.buffer[:] = b"payload"
        slot.publish()
    with target.get(payload, deadline=time.monotonic() + 60) as lease:
        assert bytes(lease.buffer) == b"payload"
        lease.acknowledge()
exchange()
child = os.fork()
if child == 0:
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sockets += ["socket"] * os.readlink(f"/proc/self/fd/{name}").startswith("socket")
        except FileNotFoundError:
            continue  # The one with which they were listed.
    try:
        target.get(payload, deadline=0.0)
    except TransportError as error:
        os._exit(len(sockets) if "forked child" in str(error) else 99)
    os._exit(98)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
source.drain(deadline=time.monotonic() + 60)
exchange()
target.close()
source.close()
"""


def test_a_forked_child_lets_go_of_every_connection_and_the_parent_goes_on(world):
    subprocess.run([sys.executable, "-c", FORKING, world.edge.namespace], check=True, timeout=SOON_S)


def test_closing_leaves_no_descriptor_and_no_thread(world):
    world.source().close()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        source = world.source()
        target = world.target()
        put(world, source, "r1")
        get(world, target, "r1")
        target.close()
        source.close()
        world.addresses.clear()
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("lanes", [0, 17, True, 1.5])
def test_lanes_are_a_small_number(world, lanes):
    with pytest.raises(ConfigError, match="lanes must be 1 to 16"):
        world.source(lanes=lanes)


@pytest.mark.parametrize("dead_after_s", [0, 0.5, float("inf"), "soon"])
def test_a_peer_is_given_a_finite_time(world, dead_after_s):
    with pytest.raises(ConfigError, match="dead_after_s must be a finite number of seconds"):
        world.source(dead_after_s=dead_after_s)


def test_waits_grow_to_a_bound_and_start_again_after_a_success():
    back_off, waits = BackOff(first_s=0.1, longest_s=1.0, jitter=0.5), []
    for _ in range(6):
        back_off, wait_s = back_off.failed(0.0)
        waits.append(wait_s)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert back_off.failed(0.999)[1] == pytest.approx(0.5, rel=0.01)
    assert back_off.succeeded().failed(0.0)[1] == 0.1
    assert BackOff(failures=10**6).failed(0.0)[1] == BackOff().longest_s


@pytest.mark.parametrize("wrong", [{"first_s": 0}, {"first_s": 2, "longest_s": 1}, {"jitter": 2}])
def test_waits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match="back-off"):
        BackOff(**wrong)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=10), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(packets, data):
    stream, cutter, out = b"".join(map(frame, packets)), FrameCutter(50), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        out += cutter.feed(stream[:size])
        stream = stream[size:]
        assert cutter.held_nbytes < 54
    assert out == packets


@pytest.mark.parametrize("length", [0, 51, 2**32 - 1])
def test_a_frame_that_is_too_long_is_refused_before_any_of_it_is_kept(length):
    cutter = FrameCutter(50)
    with pytest.raises(RemoteProtocolError, match=f"{length} bytes is announced, 1 to 50 are taken"):
        list(cutter.feed(length.to_bytes(4, "big") + bytes(1000)))
    assert cutter.held_nbytes == 0
