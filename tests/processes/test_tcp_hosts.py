"""Two hosts, as network namespaces with a cable between them: what the ranks see when the cable or a host fails.

After each fault twenty requests are made: the first may fail and say so, the later ones succeed, and no byte is wrong.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from answering_process import AnsweringProcess

PROGRAM = Path(__file__).with_name("tcp_rank_program.py")
MIB = 1 << 20
LARGE = 24 * MIB
SMALL = 64 << 10
DEAD_AFTER_S = 4.0
SOON_S = 60.0


class Host:
    """A network namespace, held by a process that does nothing else."""

    def __init__(self, command, stack, enter):
        self.holder = subprocess.Popen(
            [*enter, *command, "sh", "-c", "echo up; exec sleep 3600"], stdout=subprocess.PIPE
        )
        stack.callback(self._end)
        assert self.holder.stdout.readline() == b"up\n"
        self.enter = ("nsenter", "-t", str(self.holder.pid), "-U", "-n", "--preserve-credentials")

    def run(self, command):
        subprocess.run([*self.enter, *command.split()], check=True, capture_output=True)

    def _end(self):
        self.holder.kill()
        self.holder.stdout.close()
        self.holder.wait()


class Rank(AnsweringProcess):
    """A rank's process on one of the hosts."""

    def __init__(self, host, namespace, side, **options):
        arguments = [namespace, side, {"dead_after_s": DEAD_AFTER_S, **options}]
        super().__init__(PROGRAM, arguments, before=host.enter, more={"OMNIKV_SECRET": "the secret of the two hosts"})

    def kill(self):
        # What was started is the command that enters the host; the rank itself is to die.
        os.kill(self.pid, signal.SIGKILL)
        self.end()


class Lab:
    """Two hosts, 10.77.0.1 and 10.77.0.2, and the ranks that run there."""

    def __init__(self, stack):
        self.stack = stack
        self.namespace = f"hosts-{secrets.token_hex(6)}"
        self.near = Host(["unshare", "-rn", "--kill-child"], stack, ())
        self.far = Host(["unshare", "-n", "--kill-child"], stack, self.near.enter)
        self.near.run("ip link set lo up")
        self.near.run(f"ip link add cable0 type veth peer name cable1 netns {self.far.holder.pid}")
        self.near.run("ip addr add 10.77.0.1/24 dev cable0")
        self.far.run("ip addr add 10.77.0.2/24 dev cable1")
        self.far.run("ip link set lo up")
        self.far.run("ip link set cable1 up")
        self.plug_in()

    def pull_out(self):
        self.near.run("ip link set cable0 down")

    def plug_in(self):
        self.near.run("ip link set cable0 up")

    def start_source(self):
        self.source = Rank(self.near, self.namespace, "source", listen="10.77.0.1:5600")
        self.stack.callback(self.source.end)
        return self.source

    def start_target(self):
        self.target = Rank(self.far, self.namespace, "target", peers={0: "10.77.0.1:5600"})
        self.stack.callback(self.target.end)
        return self.target

    def start(self):
        return self.start_source(), self.start_target()

    def get_in_mid_payload(self, name):
        """A large payload is being received, slowly, and some of it is here."""
        self.source.call("put", "first", SMALL)
        assert self.target.call("get", "first", SMALL, SOON_S)[0] == "right"
        self.source.call("put", name, LARGE)
        self.target.call("read_slowly", 0.02)
        self.target.begin("get", name, LARGE, SOON_S)
        # 24 MiB in pieces of 256 KiB, each after 20 ms: about 2 s.
        time.sleep(0.5)

    def twenty_requests(self):
        """How many of twenty requests failed, all of them before the first that succeeded; the rest were right."""
        failures = 0
        for number in range(20):
            name = f"after-{secrets.token_hex(4)}-{number}"
            self.source.call("put", name, SMALL)
            outcome, seconds = self.target.call("get", name, SMALL, 2 * DEAD_AFTER_S)
            assert seconds < 2 * DEAD_AFTER_S + 5
            if outcome != "right":
                assert failures == number, f"request {number} failed ({outcome}) after earlier ones had succeeded"
                failures += 1
        assert failures < 15
        return failures


def can_make_hosts():
    if any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip")):
        return False
    probe = ["unshare", "-rn", "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="this system allows no network namespaces with veth")


@pytest.fixture
def lab():
    with contextlib.ExitStack() as stack:
        yield Lab(stack)


def test_payloads_cross_hosts(lab):
    source, target = lab.start()
    source.call("put", "large", LARGE)
    assert target.call("get", "large", LARGE, SOON_S)[0] == "right"
    assert lab.twenty_requests() == 0
    assert source.call("drain", SOON_S) == 0


def test_a_short_partition_in_mid_payload_is_waited_out(lab):
    lab.start()
    lab.get_in_mid_payload("large")
    lab.pull_out()
    time.sleep(DEAD_AFTER_S / 8)
    lab.plug_in()
    assert lab.target.finish()[0] == "right"
    assert lab.twenty_requests() == 0


def test_a_long_partition_in_mid_payload_is_told_and_over_when_the_cable_is_back(lab):
    lab.start()
    lab.get_in_mid_payload("large")
    lab.pull_out()
    outcome, seconds = lab.target.finish()
    assert outcome == "ProducerFailed"
    assert seconds < 5 * DEAD_AFTER_S
    lab.plug_in()
    lab.target.call("read_slowly", 0.0)
    lab.twenty_requests()
    # What was lost on the way is still at its source, and nobody else has had it.
    assert lab.target.call("get", "large", LARGE, SOON_S)[0] == "right"


def test_a_source_that_is_killed_in_mid_payload_is_told_at_once_and_its_next_life_serves(lab):
    source, target = lab.start()
    lab.get_in_mid_payload("large")
    source.kill()
    outcome, seconds = target.finish()
    assert outcome == "ProducerFailed"
    assert seconds < SOON_S / 2
    target.call("read_slowly", 0.0)
    lab.start_source()
    assert lab.twenty_requests() <= 1
    assert target.call("get", "large", LARGE, 0.2)[0] == "absent"


def test_a_target_that_is_killed_in_mid_payload_leaves_it_to_its_next_life(lab):
    source, target = lab.start()
    lab.get_in_mid_payload("large")
    target.kill()
    lab.start_target()
    assert lab.target.call("get", "large", LARGE, SOON_S)[0] == "right"
    assert lab.twenty_requests() == 0
    assert source.call("drain", SOON_S) == 0


def test_both_ends_restarted_find_each_other_at_the_same_addresses(lab):
    source, target = lab.start()
    lab.source.call("put", "old", SMALL)
    source.kill()
    target.kill()
    lab.start_target()
    lab.start_source()
    assert lab.twenty_requests() == 0
    assert lab.target.call("get", "old", SMALL, 0.2)[0] == "absent"


def test_a_cable_that_loses_what_is_on_it_now_and_then_delays_and_changes_nothing(lab):
    source, target = lab.start()
    for number in range(8):
        source.call("put", f"r{number}", LARGE // 3)
        target.begin("get", f"r{number}", LARGE // 3, SOON_S)
        for _ in range(2):
            lab.pull_out()
            lab.plug_in()
        assert target.finish()[0] == "right"
    assert lab.twenty_requests() == 0
