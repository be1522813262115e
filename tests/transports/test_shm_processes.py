"""The shm transport between real processes, which are killed without warning."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnikv.errors import AlreadyConsumed, ProducerFailed, TransportError
from omnikv.transports.base import MAX_ASKS
from omnikv.transports.shm_address import rank_address

SOON_S = 60.0


def lease_from(target, payload):
    lease = target.get(payload, deadline=time.monotonic() + SOON_S)
    assert lease is not None
    return lease


def test_a_payload_crosses_from_process_to_process(world):
    source, target = world.spawn("source"), world.spawn("target")
    source.call("put", "a/b ü", "payload")
    assert target.call("lease", "a/b ü") == "payload"
    target.call("acknowledge", "a/b ü")
    assert source.call("drain") == 0


def test_a_receiver_that_waits_before_any_sender_exists_is_woken_by_it(world):
    target = world.spawn("target")
    target.begin("lease", "r1")
    world.spawn("source").call("put", "r1", "payload")
    assert target.finish() == "payload"


def test_a_receiver_finishes_reading_after_its_sender_is_killed(world):
    source, target = world.spawn("source"), world.open("target")
    source.call("put", "r1", "0123456789", 100_000)
    lease = lease_from(target, world.payload("r1"))
    view = lease.buffer
    source.kill()
    assert bytes(view) == b"0123456789" * 100_000
    lease.acknowledge()
    assert bytes(view[-10:]) == b"0123456789"


def test_a_waiting_receiver_hears_of_its_sender_being_killed(world):
    source, target = world.spawn("source"), world.open("target")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(target.get, world.payload("never"), deadline=time.monotonic() + SOON_S)
        source.call("until_waited_for", "never")
        source.kill()
        with pytest.raises(ProducerFailed, match=rf"source rank 0 \(pid {source.pid}\) closed its connection"):
            waiting.result()


def test_only_those_who_wait_for_the_killed_sender_are_woken(world):
    doomed, other = world.spawn("source", rank=0), world.spawn("source", rank=1)
    target = world.open("target", peers=(0, 1))
    with ThreadPoolExecutor(2) as pool:
        deadline = time.monotonic() + SOON_S
        lost = pool.submit(target.get, world.payload("r", source=0), deadline=deadline)
        kept = pool.submit(target.get, world.payload("r", source=1), deadline=deadline)
        doomed.call("until_waited_for", "r")
        other.call("until_waited_for", "r")
        doomed.kill()
        with pytest.raises(ProducerFailed):
            lost.result()
        assert not kept.done()
        other.call("put", "r", "payload")
        assert bytes(kept.result().buffer) == b"payload"


def test_a_killed_sender_can_be_restarted_at_once(world):
    target = world.open("target")
    for life in range(3):
        source = world.spawn("source")
        source.call("put", "r1", f"life {life}")
        with lease_from(target, world.payload("r1")) as lease:
            assert bytes(lease.buffer) == f"life {life}".encode()
            lease.acknowledge()
        source.kill()


def test_a_killed_receivers_lease_goes_to_its_successor(world):
    source, target = world.open("source"), world.spawn("target")
    with source.reserve(world.payload("r1"), 7) as slot:
        slot.buffer[:] = b"payload"
        slot.publish()
    assert target.call("lease", "r1") == "payload"
    target.kill()
    successor = world.spawn("target")
    assert successor.call("lease", "r1") == "payload"
    successor.call("acknowledge", "r1")
    assert source.drain(deadline=time.monotonic() + SOON_S) == 0


def test_a_stopped_receiver_holds_up_nobody_else(world):
    source = world.open("source", peers=(0, 1))
    stopped, other = world.spawn("target", rank=0), world.spawn("target", rank=1)
    stopped.begin("lease", "r1")
    while world.payload("r1") not in source._source._waiting:
        os.sched_yield()
    os.kill(stopped.pid, signal.SIGSTOP)
    for target in (0, 1):
        with source.reserve(world.payload("r1", target=target), 1) as slot:
            slot.buffer[:] = b"x"
            slot.publish()
    assert other.call("lease", "r1") == "x"
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.finish() == "x"


def test_a_sender_that_is_stopped_for_a_while_loses_nobody_who_has_much_to_say(world):
    sender, receiver = world.spawn("source"), world.open("target")
    sender.call("put", "r1", "payload")
    lease = receiver.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)
    os.kill(sender.pid, signal.SIGSTOP)
    try:
        payloads = [world.payload(f"queued-{number}") for number in range(MAX_ASKS)]
        for _ in range(2):
            receiver.announce(payloads)
            receiver.withdraw(payloads)
    finally:
        os.kill(sender.pid, signal.SIGCONT)
    assert bytes(lease.buffer) == b"payload"
    lease.acknowledge()
    assert sender.call("drain") == 0
    assert receiver.counters == {}
    with pytest.raises(AlreadyConsumed):
        receiver.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)


def test_a_killed_process_leaves_no_address_and_no_file_behind(world):
    source = world.spawn("source")
    source.call("put", "r1", "x")
    address = rank_address(world.edge, "source", 0)[1:].decode()
    assert address in Path("/proc/net/unix").read_text()
    source.kill()
    assert address not in Path("/proc/net/unix").read_text()
    assert not [name for name in os.listdir("/dev/shm") if "omnikv" in name]


def test_a_rank_that_another_process_serves_is_named_with_its_process(world):
    source = world.spawn("source", rank=3)
    with pytest.raises(TransportError, match=r"source rank 3 .*prefill/decode.*replica") as caught:
        world.open("source", rank=3)
    assert f"process {source.pid} serves this rank already" in str(caught.value)


FORKING = """
import os, sys
from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import TransportError
from omnikv.transports.base import Endpoint
from omnikv.transports.shm import ShmTransport
edge = Edge(from_stage="prefill", to_stage="decode", namespace=sys.argv[1])
with ShmTransport(Endpoint(edge=edge, side="source", rank=0, peer_ranks=(0,))) as source:
    child = os.fork()
    if child == 0:
        try:
            source.reserve(PayloadId(edge=edge, transfer_id="r1", source_rank=0, target_rank=0), 1)
        except TransportError as error:
            print(error, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_forked_child_is_told_to_open_its_own(world):
    program = [sys.executable, "-W", "ignore", "-c", FORKING, world.edge.namespace]
    told = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert "does not work in its forked child" in told


def test_a_forked_child_does_not_hide_its_parents_death(world):
    source, target = world.spawn("source"), world.open("target")
    child = source.call("fork_a_child_that_stays")
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(target.get, world.payload("never"), deadline=time.monotonic() + SOON_S)
            source.call("until_waited_for", "never")
            source.kill()
            with pytest.raises(ProducerFailed):
                waiting.result()
        world.spawn("source").call("put", "r1", "payload")
        assert bytes(lease_from(target, world.payload("r1")).buffer) == b"payload"
    finally:
        os.kill(child, signal.SIGKILL)


def test_d34_addresses_do_not_depend_on_the_process(world):
    program = (
        "import sys; from omnikv.core.keys import Edge; from omnikv.transports.shm_address import rank_address;"
        "edge = Edge(from_stage='prefill', to_stage='decode', namespace=sys.argv[1]);"
        "print(rank_address(edge, 'source', 1).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, world.edge.namespace],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }
    assert printed == {rank_address(world.edge, "source", 1).hex()}


OTHER_USER = """
import os, socket, sys
sys.path[:0] = []
address = bytes.fromhex(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
    if sys.argv[2] == "knock":
        peer.connect(address)
        try:
            heard = peer.recv(1 << 17)
        except ConnectionResetError:
            heard = b""
        print(len(heard))
    else:
        peer.bind(address); peer.listen()
        print("ready", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_turned_away_without_a_word(world):
    source, target = world.open("source"), world.open("target")
    address = rank_address(world.edge, "source", 0).hex()
    program = [sys.executable, "-c", OTHER_USER, address, "knock"]
    heard = subprocess.run(program, check=True, capture_output=True, text=True, cwd="/").stdout
    assert heard.strip() == "0"
    assert source.counters["refused_foreign_user"] == 1
    with source.reserve(world.payload("r1"), 1) as slot:
        slot.publish()
    lease_from(target, world.payload("r1")).acknowledge()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_at_a_peers_address_is_named(world):
    address = rank_address(world.edge, "source", 0).hex()
    program = [sys.executable, "-c", OTHER_USER, address, "listen"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as squatter:
        assert squatter.stdout.readline() == b"ready\n"
        target = world.open("target")
        with pytest.raises(TransportError, match=rf"process {squatter.pid} of another user \(uid 65534\)"):
            target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)
        squatter.stdin.close()
