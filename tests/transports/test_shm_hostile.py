"""What a shm transport does with peers that speak nonsense, too much, or for somebody else: nobody else notices."""

import fcntl
import os
import secrets
import socket
import subprocess
import sys
import time

import pytest

from omnikv.core.messages import PROTOCOL_VERSION, Absent, Forming, Ready, Return, Segment, Soon, Want
from omnikv.errors import ConnectError, ProducerFailed, TransportError
from omnikv.transports.base import PutRequest
from omnikv.transports.link_loop import MAX_UNREADY_LINKS
from omnikv.transports.shm_address import Peer, is_same_user
from omnikv.transports.shm_link import MAX_QUEUED_MESSAGES, encode

SOON_S = 60.0


def assert_it_works(world, source, target):
    payload = world.payload(secrets.token_hex(4))
    with source.reserve(payload, 7) as slot:
        slot.buffer[:] = b"payload"
        slot.publish()
    with target.get(payload, deadline=time.monotonic() + SOON_S) as lease:
        assert bytes(lease.buffer) == b"payload"
        lease.acknowledge()


GARBAGE = {
    "no msgpack": b"\xc1\xff\x00",
    "a map": b"\x81\xa1a\x01",
    "an unknown message": b"\x91\xa5steal",
    "a pickle": b"cos\nsystem\n(S'true'\ntR.",
    "a message too long": b"\x00" * 70_000,
    "a message before Hello": encode(Want(1, "r1", "primary", 0, True)),
}


@pytest.mark.parametrize("packet", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_stranger_that_talks_nonsense_is_refused_and_counted(world, the_rest_of, caplog, side, packet):
    source, target = world.open("source"), world.open("target")
    end = source if side == "source" else target
    stranger, second = world.knock(side), world.knock(side)
    stranger.send(packet)
    second.send(packet)
    for connection in (stranger, second):
        (last_word,) = the_rest_of(connection)
        assert b"refused" in last_word
    assert end.counters == {"refused_message": 2}
    assert [record.levelname for record in caplog.records if "is refused" in record.message] == ["WARNING"]
    assert_it_works(world, source, target)


def test_a_peer_of_another_version_is_told_both_versions(world):
    source, target = world.open("source"), world.open("target")
    stranger = world.knock("source")
    stranger.send(world.hello("target", version=99))
    assert f"version: here {PROTOCOL_VERSION}, there 99".encode() in stranger.recv(1 << 17)
    assert source.counters == {"refused_peers": 1}
    assert_it_works(world, source, target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"namespace": "other"}, "namespace: here test-"),
        ({"from_stage": "encode"}, "from stage: here prefill, there encode"),
        ({"to_stage": "encode"}, "to stage: here decode, there encode"),
        ({"replica": 1}, "replica: here 0, there 1"),
        ({"side": "source"}, "side: here source waits for a target, there source"),
        ({"rank": 9}, "source rank 0 deals with [0], not with rank 9"),
        ({"facts": {"heads": "7"}}, "heads: here not stated, there 7"),
    ],
)
def test_a_peer_of_another_identity_is_told_what_differs(world, changes, words):
    source, target = world.open("source"), world.open("target")
    stranger = world.knock("source")
    stranger.send(world.hello("target", **changes))
    assert words in stranger.recv(1 << 17).decode(errors="replace")
    stranger.send(encode(Want(1, "r1", "primary", 0, False)))  # Said although it was refused: not answered.
    assert_it_works(world, source, target)
    stranger.setblocking(False)
    with pytest.raises(BlockingIOError):
        stranger.recv(1)


def test_a_second_hello_is_refused(world, the_rest_of):
    source = world.open("source")
    stranger = world.knock("source")
    stranger.send(world.hello("target"))
    stranger.send(world.hello("target"))
    assert b"unexpected Hello" in the_rest_of(stranger)[-1]
    assert source.counters == {"refused_message": 1}


def test_descriptors_that_nobody_asked_for_are_closed(world, the_rest_of):
    source, target = world.open("source", peers=(0, 1)), world.open("target")
    assert_it_works(world, source, target)
    before = len(os.listdir("/proc/self/fd"))
    stranger = world.knock("source")
    stranger.send(world.hello("target", rank=1))
    with open("/dev/null") as null:
        socket.send_fds(stranger, [encode(Want(1, "r1", "primary", 0, False))], [null.fileno()] * 3)
    assert b"descriptors" in the_rest_of(stranger)[-1]
    assert len(os.listdir("/proc/self/fd")) == before + 1  # The stranger's own socket, which this test holds.


def test_a_flood_of_silent_connections_is_bounded(world):
    source, target = world.open("source"), world.open("target")
    assert_it_works(world, source, target)
    before = len(os.listdir("/proc/self/fd"))
    silent = [world.knock("source") for _ in range(3 * MAX_UNREADY_LINKS)]
    assert len(os.listdir("/proc/self/fd")) - before - len(silent) <= MAX_UNREADY_LINKS + 2
    assert source.counters["evicted"] >= MAX_UNREADY_LINKS
    assert_it_works(world, source, target)
    target.close()
    assert_it_works(world, source, world.open("target"))


def send_without_end(connection, packet):
    for _ in range(100 * MAX_QUEUED_MESSAGES):
        connection.send(packet)


def test_a_peer_that_never_reads_is_cut_off(world):
    source, target = world.open("source", peers=(0, 1)), world.open("target")
    deaf = world.knock("source")
    deaf.send(world.hello("target", rank=1))
    want = encode(Want(1, "r1", "primary", 0, False))
    with pytest.raises(ConnectionError):
        send_without_end(deaf, want)
    assert_it_works(world, source, target)
    assert source.counters == {"stuck_peers": 1}


def start_posing(world):
    """A target, and the bare connection that it takes for its source."""
    listener = world.pose("source")
    target = world.open("target")
    connection, _ = listener.accept()
    world._stack.enter_context(connection)
    assert b"hello" in connection.recv(1 << 17)
    connection.send(world.hello("source"))
    return target, connection


@pytest.mark.parametrize("place", [Ready(1, 1, 0, 0, 4096), Forming(1, 0, 0, 4096, b"head")], ids=["ready", "forming"])
def test_d16_a_payload_outside_of_the_shared_memory_is_an_error_and_not_a_fault(world, in_thread, place):
    target, source = start_posing(world)
    waiting = in_thread(lambda: target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S))
    assert b"want" in source.recv(1 << 17)
    source.send(encode(place))
    with pytest.raises(ConnectError, match="outside of shared memory"):
        waiting.result()
    assert target.counters == {"refused_message": 1}


@pytest.mark.parametrize("kind", ["a pipe", "unsealed", "too small"])
def test_d16_memory_that_could_vanish_is_refused_at_once_and_no_slow_producer(world, in_thread, kind):
    target, source = start_posing(world)
    waiting = in_thread(lambda: target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S))
    assert b"want" in source.recv(1 << 17)
    if kind == "a pipe":
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096 if kind == "too small" else 8192)
    socket.send_fds(source, [encode(Segment(0, 8192))], [fd])
    os.close(fd)
    with pytest.raises(ConnectError, match="no sealed memory of 8192 bytes"):
        waiting.result()


def test_a_ready_that_crosses_the_end_of_its_ask_is_given_back(world):
    target, source = start_posing(world)
    assert target.get(world.payload("r1"), deadline=time.monotonic() + 0.01) is None
    assert b"want" in source.recv(1 << 17)
    assert b"unwant" in source.recv(1 << 17)
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(source, [encode(Segment(0, 4096))], [fd])
    os.close(fd)
    source.send(encode(Ready(1, 5, 0, 0, 4096)))
    assert source.recv(1 << 17) == encode(Return(5))


def test_a_source_that_tells_ahead_without_end_does_not_keep_anybody_waiting_past_the_deadline(world, in_thread):
    target, source = start_posing(world)
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(source, [encode(Segment(0, 4096))], [fd])
    os.close(fd)
    forming = encode(Forming(1, 0, 0, 4096, b"head"))
    deadline = time.monotonic() + 1.0
    seen = []

    def preview(payload, view, head):
        assert time.monotonic() < deadline + SOON_S
        seen.append(head)
        source.send(forming)

    waiting = in_thread(lambda: list(target.get_as_ready([world.payload("r1")], deadline=deadline, preview=preview)))
    assert b"want" in source.recv(1 << 17)
    source.send(forming)
    assert waiting.result() == []
    assert seen


def test_a_target_that_reads_nothing_is_not_cut_off_for_what_it_is_told_ahead(world):
    source = world.open("source")
    asleep = world.knock("source")
    asleep.send(world.hello("target"))
    asleep.send(encode(Want(1, "r1", "primary", 0, True)))
    while not source._offers._waiting:
        time.sleep(0.001)
    payload = world.payload("r1")
    for _ in range(MAX_QUEUED_MESSAGES):
        [slot] = source.reserve_all([PutRequest(payload, 4096, head=bytes(4096))], deadline=0.0)
        slot.drop()
    assert source.counters == {}
    with source.reserve(payload, 7) as slot:
        slot.buffer[:] = b"payload"
        slot.publish()
    last = b""
    while not last.startswith(b"\x96\xa5ready"):
        last = asleep.recv(1 << 17)


@pytest.mark.parametrize("word", [Absent(77), Soon(77)], ids=["absent", "soon"])
def test_words_to_no_ask_are_ignored(world, word):
    target, source = start_posing(world)
    source.send(encode(word))
    assert target.get(world.payload("r1"), deadline=time.monotonic() + 0.05) is None
    assert target.counters == {}


def test_a_source_that_ends_the_connection_while_asked_has_failed(world, in_thread):
    target, source = start_posing(world)
    waiting = in_thread(lambda: target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S))
    assert b"want" in source.recv(1 << 17)
    source.close()
    with pytest.raises(ProducerFailed, match=f"pid {os.getpid()}"):
        waiting.result()


def test_a_full_backlog_is_knocked_on_again(world):
    listener = world.pose("target", backlog=0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.connect(listener.getsockname())
        source = world.open("source")
        listener.accept()[0].close()
    connection, _ = listener.accept()
    with connection:
        assert b"hello" in connection.recv(1 << 17)
    assert source.counters == {}


def test_only_the_own_user_may_speak():
    assert is_same_user(Peer(pid=1, uid=os.geteuid(), gid=0))
    assert not is_same_user(Peer(pid=1, uid=os.geteuid() + 1, gid=os.getegid()))


def test_the_last_word_of_a_closed_end_names_it(world):
    source = world.open("source", rank=2)
    source.close()
    with pytest.raises(TransportError, match=r"shm: source rank 2 of edge .* is closed"):
        source.reserve(world.payload("r1", source=2), 1)


STARVED = """
import os, resource, sys, time
from omnikv.core.keys import Edge, PayloadId
from omnikv.transports.base import Endpoint
from omnikv.transports.shm import ShmTransport
edge = Edge(from_stage="prefill", to_stage="decode", namespace=sys.argv[1])
with ShmTransport(Endpoint(edge=edge, side="source", rank=0, peer_ranks=(0,))) as source:
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    fillers = []
    while True:
        try:
            fillers.append(os.dup(0))
        except OSError:
            break
    print("starved", flush=True)
    while not source.counters.get("accept_failed"):
        os.sched_yield()
    for filler in fillers:
        os.close(filler)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    payload = PayloadId(edge=edge, transfer_id="r1", source_rank=0, target_rank=0)
    with source.reserve(payload, 7) as slot:
        slot.buffer[:] = b"payload"
        slot.publish()
    source.drain(deadline=time.monotonic() + 60)
    print(source.counters["accept_failed"], flush=True)
"""


def test_a_sender_without_descriptors_lets_peers_in_once_it_has_some(world):
    program = [sys.executable, "-c", STARVED, world.edge.namespace]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"starved\n"
        target = world.open("target")
        with target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S) as lease:
            assert bytes(lease.buffer) == b"payload"
            lease.acknowledge()
        assert int(process.stdout.readline()) >= 1


def test_an_end_whose_thread_died_says_of_what(world, monkeypatch):
    def stumble(link, message, fds):
        raise ZeroDivisionError("a mistake of ours")

    source, target = world.open("source"), world.open("target")
    monkeypatch.setattr(source._source, "handle", stumble)
    with pytest.raises(ProducerFailed, match="closed its connection"):
        target.get(world.payload("r1"), deadline=time.monotonic() + SOON_S)
    source._loop._thread.join(SOON_S)
    with pytest.raises(
        TransportError, match=r"ended by an error .* ZeroDivisionError\('a mistake of ours'\)"
    ) as caught:
        source.reserve(world.payload("r1"), 10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
