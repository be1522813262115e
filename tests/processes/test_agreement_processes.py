"""Real ranks over gloo that agree over their channel while one of them is killed, stopped, or fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omnikv.groups.channel import RULING_GRACE_S

# The mechanism's own bound is the deadline and the grace; what comes on top is a busy machine's.
MAX_LATE_S = 0.5
BUSY_S = 3.0
SOON_S = 1.0
FAR_S = 30.0


class Rank:
    """A rank's process, told what to do over its control socket."""

    def __init__(self, connection):
        connection.settimeout(60)
        self.connection = connection
        self.lines = connection.makefile("rw")
        hello = self.hear()
        self.rank, self.pid = hello["rank"], hello["pid"]

    def hear(self):
        line = self.lines.readline()
        assert line, "the rank ended: its stacks are on its error output"
        return json.loads(line)

    def hear_ruling(self):
        said = self.hear()
        return self.hear() if said["state"] == "voted" else said

    def start_vote(self, key, *, standing="have", number=0, timeout_s=FAR_S, way="submit", signalled=None):
        """With `signalled`, (count, number), it gets that signal when so many reads and writes have passed."""
        order = {"key": key, "standing": standing, "round": number, "timeout_s": timeout_s}
        order |= {"way": way, "signal": signalled}
        self.lines.write(json.dumps(order) + "\n")
        self.lines.flush()

    def cast(self, key, **vote):
        """The ballot is out when this returns."""
        self.start_vote(key, **vote)
        assert self.hear()["state"] == "voted"

    def signal(self, number):
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            self.await_state("T")

    def await_state(self, *states):
        stat = Path(f"/proc/{self.pid}/stat")
        try:
            while stat.read_text().rsplit(")", 1)[1].split()[0] not in states:
                pass
        except (FileNotFoundError, ProcessLookupError):
            # The nursery let it go already.
            return


@pytest.fixture(scope="module")
def nursery():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(Path(__file__).with_name("agreement_nursery.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True) as process:
        yield process
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def form(nursery, tmp_path):
    """Forms a group of ranks whose channel is ready; kills what is left of it afterwards."""
    ranks = []

    def form_group(size):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "control"))
            listener.listen(size)
            listener.settimeout(60)
            for rank in range(size):
                task = {"rank": rank, "size": size, "store": str(tmp_path / "store"), "control": listener.getsockname()}
                nursery.stdin.write(json.dumps(task) + "\n")
            nursery.stdin.flush()
            ranks.extend(Rank(listener.accept()[0]) for _ in range(size))
        ranks.sort(key=lambda rank: rank.rank)
        assert {rank.hear()["state"] for rank in ranks} == {"formed"}
        return ranks

    yield form_group
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
        rank.lines.close()
        rank.connection.close()


def vote_all(ranks, key, **vote):
    for rank in ranks:
        rank.start_vote(key, **vote)
    return [rank.hear_ruling() for rank in ranks]


def assert_same_ruling(said, kind):
    """All of them learnt one ruling, and in time."""
    assert [one["kind"] for one in said] == [kind] * len(said), said
    assert all(one["late_s"] <= MAX_LATE_S + BUSY_S for one in said), said
    assert len({json.dumps(one.get("causes")) for one in said}) == 1, said


def assert_in_doubt(said):
    assert [one["kind"] for one in said] == ["in doubt"] * len(said), said
    assert all(one["late_s"] <= MAX_LATE_S + BUSY_S for one in said), said
    assert all("tear this group down" in one["words"] for one in said), said


def split(ranks, victim):
    dead = ranks[victim]
    return dead, [rank for rank in ranks if rank is not dead]


VICTIMS = [
    pytest.param(2, 0, id="the leader of two"),
    pytest.param(2, 1, id="the follower of two"),
    pytest.param(4, 0, id="the leader of four"),
    pytest.param(4, 2, id="a follower of four"),
]


def test_the_wait_beyond_a_deadline_leaves_room_within_half_a_second():
    assert RULING_GRACE_S <= MAX_LATE_S / 2


@pytest.mark.parametrize(("size", "victim"), VICTIMS)
def test_killed_before_its_vote(form, size, victim):
    dead, left = split(form(size), victim)
    dead.signal(signal.SIGKILL)
    said = vote_all(left, "r")
    assert all(one["late_s"] < -FAR_S / 2 for one in said), "a closed connection is seen at once, not by the deadline"
    if victim == 0:
        assert_in_doubt(said)
    else:
        assert_same_ruling(said, "drop")
        assert "gone (it closed its connection)" in said[0]["causes"][0][2]


@pytest.mark.parametrize(("size", "victim"), VICTIMS)
def test_killed_after_its_vote(form, size, victim):
    dead, left = split(form(size), victim)
    dead.cast("r")
    dead.signal(signal.SIGKILL)
    said = vote_all(left, "r")
    if victim == 0:
        assert_in_doubt(said)
    else:
        assert_same_ruling(said, "keep")


@pytest.mark.parametrize(("size", "victim"), VICTIMS)
def test_killed_between_two_rounds(form, size, victim):
    ranks = form(size)
    dead, left = split(ranks, victim)
    dead.start_vote("r", standing="missing")
    assert_same_ruling([*vote_all(left, "r"), dead.hear_ruling()], "refetch")
    dead.signal(signal.SIGKILL)
    said = vote_all(left, "r", number=1)
    if victim == 0:
        assert_in_doubt(said)
    else:
        assert_same_ruling(said, "drop")


@pytest.mark.parametrize(("size", "victim"), VICTIMS)
def test_stopped_before_its_vote(form, size, victim):
    dead, left = split(form(size), victim)
    dead.signal(signal.SIGSTOP)
    said = vote_all(left, "r", timeout_s=SOON_S)
    if victim == 0:
        assert_in_doubt(said)
        return
    assert_same_ruling(said, "drop")
    assert said[0]["causes"] == [[victim, "", "did not vote by the deadline"]]
    # It wakes up: its late ballot is answered with that ruling, and the next request has all of them again.
    dead.signal(signal.SIGCONT)
    dead.start_vote("r")
    assert dead.hear_ruling()["kind"] == "drop"
    assert_same_ruling(vote_all([dead, *left], "r"), "keep")


@pytest.mark.parametrize(("size", "victim"), VICTIMS)
def test_stopped_after_its_vote(form, size, victim):
    dead, left = split(form(size), victim)
    dead.cast("r")
    dead.signal(signal.SIGSTOP)
    said = vote_all(left, "r", timeout_s=SOON_S)
    if victim == 0:
        assert_in_doubt(said)
        return
    assert_same_ruling(said, "keep")
    dead.signal(signal.SIGCONT)
    assert dead.hear_ruling()["kind"] == "keep"
    assert_same_ruling(vote_all([dead, *left], "next"), "keep")


@pytest.mark.parametrize(("size", "victim"), VICTIMS)
def test_stopped_between_two_rounds(form, size, victim):
    ranks = form(size)
    dead, left = split(ranks, victim)
    dead.start_vote("r", standing="missing")
    assert_same_ruling([*vote_all(left, "r"), dead.hear_ruling()], "refetch")
    dead.signal(signal.SIGSTOP)
    said = vote_all(left, "r", number=1, timeout_s=SOON_S)
    if victim == 0:
        assert_in_doubt(said)
    else:
        assert_same_ruling(said, "drop")


@pytest.mark.parametrize("size", [2, 4])
def test_d01_a_rank_whose_receive_raises_votes_failed_and_the_next_request_works(form, size):
    ranks = form(size)
    ranks[-1].start_vote("r", standing="failed")
    said = [*vote_all(ranks[:-1], "r"), ranks[-1].hear_ruling()]
    assert_same_ruling(said, "drop")
    assert said[0]["causes"] == [[size - 1, "primary", "receiving raised RuntimeError('torn page')"]]
    assert_same_ruling(vote_all(ranks, "next"), "keep")


def test_a_group_in_doubt_says_so_at_once_when_it_is_used_again(form):
    dead, (left,) = split(form(2), 0)
    dead.signal(signal.SIGKILL)
    assert_in_doubt(vote_all([left], "r"))
    (said,) = vote_all([left], "next")
    assert said["kind"] == "in doubt"
    assert "failed before" in said["words"]
    assert said["late_s"] < -FAR_S / 2


# What the survivors, in their order, come to when a rank of three stops for good after so many reads and writes of a
# vote that goes alone: a follower sends and reads, the leader reads two ballots and sends two answers.
FOLLOWER_POINTS = [(0, "drop", "drop"), (1, "keep", "keep"), (2, "keep", "keep")]
DOUBT = "in doubt"
LEADER_POINTS = [(0, DOUBT, DOUBT), (1, DOUBT, DOUBT), (2, DOUBT, DOUBT), (3, "keep", DOUBT), (4, "keep", "keep")]
POINTS = [
    pytest.param(victim, *point, id=f"{who} after {point[0]}")
    for victim, who, points in ((2, "a follower", FOLLOWER_POINTS), (0, "the leader", LEADER_POINTS))
    for point in points
]


@pytest.mark.parametrize(("victim", "point", "first", "second"), POINTS)
def test_killed_at_every_point_of_a_vote_that_goes_alone(form, victim, point, first, second):
    dead, left = split(form(3), victim)
    for rank in left:
        rank.start_vote("r", way="agree")
    dead.start_vote("r", way="agree", signalled=(point, signal.SIGKILL))
    assert_survivors([rank.hear_ruling() for rank in left], first, second)


@pytest.mark.parametrize(("victim", "point", "first", "second"), POINTS)
def test_stopped_at_every_point_of_a_vote_that_goes_alone(form, victim, point, first, second):
    ranks = form(3)
    dead, left = split(ranks, victim)
    dead.start_vote("r", way="agree", signalled=(point, signal.SIGSTOP))
    if point == 0:
        dead.await_state("T")
    for rank in left:
        rank.start_vote("r", way="agree", timeout_s=SOON_S)
    assert_survivors([rank.hear_ruling() for rank in left], first, second)
    dead.await_state("T")
    dead.signal(signal.SIGCONT)
    # A leader that wakes up rules on what it heard before its own deadline; nobody comes to another ruling than that.
    assert dead.hear_ruling()["kind"] == ("keep" if victim == 0 else first)
    if DOUBT not in (first, second):
        assert_same_ruling(vote_all(ranks, "next", way="agree"), "keep")


def assert_survivors(said, *kinds):
    assert [one["kind"] for one in said] == list(kinds), said
    assert all(one["late_s"] <= MAX_LATE_S + BUSY_S for one in said), said
