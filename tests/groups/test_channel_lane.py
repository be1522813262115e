"""The lane of a channel: a vote on which all agree ends there, and any other goes on as if there were no lane."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omnikv.core.messages import Ballot, Kept, RoleBallot, Votes, spell_facts
from omnikv.core.verdict import rule
from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.channel import Channel

encode = msgspec.msgpack.Encoder().encode


def far():
    return time.monotonic() + 30


def a_ballot(tokens="7"):
    return Ballot(0, True, (RoleBallot("primary", "have", True, "", spell_facts({"tokens": tokens})),))


def frame(payload):
    return len(payload).to_bytes(4, "big") + payload


def a_vote(key, tokens="7", *, due=float("inf")):
    return frame(encode(Votes(due, [(key, a_ballot(tokens))])))


class Watched:
    """A connection that does something of ours around each read that blocks; the channel's other reads pass."""

    def __init__(self, connection, at_read, after_read):
        self.connection, self.at_read, self.after_read = connection, at_read, after_read

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def recv(self, *args):
        is_blocking = len(args) == 1
        if is_blocking:
            self.at_read()
        data = self.connection.recv(*args)
        if is_blocking:
            self.after_read()
        return data


class Leader:
    """Rank 0's channel with followers that are bare sockets."""

    def __init__(self, size=3):
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self.ends = {rank: pair[1] for rank, pair in pairs.items()}
        self.channel = Channel(0, size, {rank: pair[0] for rank, pair in pairs.items()}, shares_clock=True)
        self.lane = self.channel._switchboard._lane
        self.taken_up = []
        take_up = self.channel._switchboard._ledger.take_up
        self.channel._switchboard._ledger.take_up = lambda call: (self.taken_up.append(call), take_up(call))

    def say(self, **votes):
        for rank, said in votes.items():
            self.ends[int(rank[1:])].sendall(said)

    def watch(self, rank, at_read=lambda: None, after_read=lambda: None):
        link = self.channel._switchboard._links[rank]
        link.connection = Watched(link.connection, at_read, after_read)


@pytest.fixture
def leader():
    leader = Leader()
    yield leader
    leader.channel.close()
    for end in leader.ends.values():
        end.close()


def hear(end):
    end.settimeout(30)
    return end.recv(65536)


def test_a_vote_on_which_all_agree_is_kept_without_the_ledger(leader):
    for key in ("r", "s", "r"):
        leader.say(_1=a_vote(key), _2=a_vote(key))
        assert leader.channel.agree(key, a_ballot(), deadline=far()) == rule([a_ballot()] * 3)
        assert [hear(end) for end in leader.ends.values()] == [frame(encode(Kept(key)))] * 2
    assert leader.taken_up == []


def test_x12_what_the_lane_read_before_ballots_differed_counts(leader):
    leader.say(_1=a_vote("r"), _2=a_vote("r", "8"))
    assert leader.channel.agree("r", a_ballot(), deadline=far()) == rule([a_ballot(), a_ballot(), a_ballot("8")])
    assert len(leader.taken_up) == 1


def test_ballots_that_come_in_two_pieces_count_as_one(leader):
    whole = a_vote("r")
    leader.say(_1=whole[:20], _2=whole)
    leader.watch(2, lambda: pytest.fail("the lane read on after something that it did not hope for"))
    with ThreadPoolExecutor(1) as pool:
        ruling = pool.submit(leader.channel.agree, "r", a_ballot(), deadline=far())
        while not leader.taken_up:
            pass
        leader.say(_1=whole[20:])
        assert ruling.result(30).kind == "keep"


def test_the_end_of_a_frame_is_not_taken_for_a_frame(leader):
    whole = a_vote("r")
    # A frame that ends in what is hoped for; the first part of it is read with the vote before.
    odd = frame(b"odd" + whole)
    cut = len(odd) - len(whole)
    leader.say(_1=a_vote("q") + odd[:cut], _2=a_vote("q"))
    assert leader.channel.submit("q", a_ballot(), deadline=far()).result().kind == "keep"
    leader.channel._switchboard._pump.join(30)
    leader.say(_1=whole, _2=whole)
    ruling = leader.channel.agree("r", a_ballot(), deadline=far())
    assert ruling.kind == "drop"
    assert "that are no ballots" in ruling.causes[0][2]


@pytest.mark.parametrize("at", [1, 2])
def test_a_follower_that_goes_while_the_lane_reads_is_named(leader, at):
    leader.say(_1=a_vote("r"))
    leader.watch(at, leader.ends[2].close)
    ruling = leader.channel.agree("r", a_ballot(), deadline=far())
    assert ruling.causes == ((2, "", "gone (it closed its connection)"),)
    # A group that lacks a rank has no lane.
    leader.say(_1=a_vote("s"))
    taken_up = len(leader.taken_up)
    assert leader.channel.agree("s", a_ballot(), deadline=far()).kind == "drop"
    assert len(leader.taken_up) == taken_up


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), TimeoutError(110, "timed out")])
def test_a_connection_that_breaks_under_the_lane_says_how(leader, error):
    def break_off():
        leader.ends[1].close()
        raise error

    leader.watch(1, break_off)
    words = "it closed its connection" if error.errno == 104 else "the connection broke: timed out"
    assert leader.channel.agree("r", a_ballot(), deadline=far()).causes[0] == (1, "", f"gone ({words})")


@pytest.mark.parametrize("at", [1, 2])
def test_an_interruption_in_the_lane_leaves_the_vote_to_the_channels_own_thread(leader, at):
    interrupted = []

    def interrupt():
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    leader.watch(at, interrupt)
    leader.say(_1=a_vote("r"))
    with pytest.raises(KeyboardInterrupt):
        leader.channel.agree("r", a_ballot(), deadline=far())
    leader.say(_2=a_vote("r"))
    assert hear(leader.ends[1]) == frame(encode(Kept("r")))


@pytest.mark.parametrize("way", ["agree", "submit"])
def test_d37_another_thread_that_wants_in_does_not_wait_for_the_vote_in_the_lane(leader, way):
    is_in, may_go_on = threading.Event(), threading.Event()

    def pause():
        is_in.set()
        may_go_on.wait(30)

    leader.watch(1, pause)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(leader.channel.agree, "slow", a_ballot(), deadline=far())
        is_in.wait(30)
        pending = leader.channel.submit("fast", a_ballot(), deadline=far()) if way == "submit" else None
        fast = pool.submit(
            pending.result if pending else lambda: leader.channel.agree("fast", a_ballot(), deadline=far())
        )
        while not leader.taken_up:
            pass
        may_go_on.set()
        leader.say(_1=a_vote("fast"), _2=a_vote("fast"))
        assert fast.result(30).kind == "keep"
        assert not slow.done()
        leader.say(_1=a_vote("slow"), _2=a_vote("slow"))
        assert slow.result(30).kind == "keep"


def test_a_deadline_that_passes_while_the_lane_reads_is_minded_afterwards(leader):
    is_in, may_go_on = threading.Event(), threading.Event()

    def pause():
        is_in.set()
        may_go_on.wait(30)

    whole = a_vote("slow")
    leader.watch(1, after_read=pause)
    leader.say(_1=whole[:20], _2=whole)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(leader.channel.agree, "slow", a_ballot(), deadline=far())
        is_in.wait(30)
        late = pool.submit(leader.channel.agree, "late", a_ballot(), deadline=time.monotonic())
        while not leader.taken_up:
            pass
        # Nobody else may read this before what the lane has read is handed over.
        leader.say(_1=whole[20:])
        assert not late.done()
        may_go_on.set()
        assert late.result(30).kind == "drop"
        assert slow.result(30).kind == "keep"


def test_closing_while_the_lane_reads_puts_its_vote_in_doubt(leader):
    is_in, may_go_on = threading.Event(), threading.Event()

    def pause():
        is_in.set()
        may_go_on.wait(30)

    leader.watch(1, pause)
    leader.say(_1=a_vote("r"), _2=a_vote("r"))
    with ThreadPoolExecutor(2) as pool:
        vote = pool.submit(leader.channel.agree, "r", a_ballot(), deadline=far())
        is_in.wait(30)
        closing = pool.submit(leader.channel.close)
        while not leader.taken_up:
            pass
        assert not closing.done()
        may_go_on.set()
        closing.result(30)
        with pytest.raises(VerdictInDoubt, match="this rank closed its channel"):
            vote.result(30)


def test_ballots_too_long_for_one_message_are_refused_before_they_go_alone(leader):
    long = Ballot(0, True, (RoleBallot("primary", "have", True, "", spell_facts({"tokens": "x" * 4096})),))
    with pytest.raises(ConfigError, match="cast fewer at once"):
        leader.channel.agree_many([(f"r{at}", long) for at in range(4100)], deadline=far())
    leader.say(_1=a_vote("r"), _2=a_vote("r"))
    assert leader.channel.agree("r", a_ballot(), deadline=far()).kind == "keep"
    assert leader.taken_up == []


def test_the_lane_forgets_no_due_of_a_follower(leader):
    due = time.monotonic() + 0.1
    leader.say(_1=a_vote("r", due=due))
    ruling = leader.channel.agree("r", a_ballot(), deadline=far())
    assert ruling.causes == ((2, "", "did not vote by the deadline"),)


def test_a_follower_in_the_lane_takes_other_rulings_and_more_than_one_answer():
    here, there = socket.socketpair()
    with there, Channel(1, 2, {0: here}, shares_clock=True) as follower:
        board = follower._switchboard
        is_in, may_go_on = threading.Event(), threading.Event()

        def pause():
            is_in.set()
            may_go_on.wait(30)

        board._links[0].connection = Watched(here, pause, lambda: None)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(follower.agree, "a", a_ballot(), deadline=far())
            is_in.wait(30)
            second = follower.submit("b", a_ballot(), deadline=far())
            # Both answers come at once, the later vote's first.
            there.sendall(frame(encode(Kept("b"))) + frame(encode(Kept("a"))))
            may_go_on.set()
            assert [first.result(30), second.result()] == [rule([a_ballot()])] * 2
