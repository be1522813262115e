"""A channel brings all ranks to one ruling on each request, whatever else is going on, and says in doubt otherwise."""

from __future__ import annotations

import math
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omnikv.core.messages import Ballot, Kept, RoleBallot, Votes, spell_facts
from omnikv.core.verdict import rule
from omnikv.errors import ConfigError, LocalProtocolError, VerdictInDoubt
from omnikv.groups.channel import Channel
from omnikv.groups.threads import ThreadGroup


def far():
    return time.monotonic() + 30


def soon():
    return time.monotonic() + 0.2


def a_ballot(standing="have", *, number=0, tokens="7", cause="is not there yet", can_refetch=True):
    facts = spell_facts({"tokens": tokens}) if standing == "have" else ""
    role = RoleBallot("primary", standing, True, "" if standing == "have" else cause, facts)
    return Ballot(number, can_refetch, (role,))


def at_once(*jobs):
    """What the jobs return, each run in a thread of its own at the same time."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(job) for job in jobs]]


def form_all(size, **options):
    return at_once(
        *[lambda group=group: Channel.form(group, deadline=far(), **options) for group in ThreadGroup.create(size)]
    )


@pytest.fixture(params=["auto", "tcp"])
def over(request):
    return request.param


@pytest.fixture(params=["lane", "no lane"])
def form(request):
    """Forms the channels of a group, with votes that may go alone and without; afterwards nothing of them is left."""
    descriptors = len(os.listdir("/proc/self/fd"))
    formed = []

    def form_group(size, **options):
        channels = form_all(size, **options)
        if request.param == "no lane":
            for channel in channels:
                channel._switchboard._has_all = False
        formed.extend(channels)
        return channels

    yield form_group
    for channel in formed:
        channel.close()
        channel.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("omnikv-channel")] == []


def agree_everywhere(channels, key, ballots, deadline=far):
    return at_once(
        *[
            lambda channel=channel, ballot=ballot: channel.agree(key, ballot, deadline=deadline())
            for channel, ballot in zip(channels, ballots, strict=True)
        ]
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "standings",
    [("have", "have"), ("have", "missing"), ("missing", "missing"), ("have", "failed"), ("failed", "failed")],
)
def test_the_ruling_is_the_rule_on_everybodys_ballots(form, over, size, standings):
    ballots = [a_ballot(standings[rank == size - 1]) for rank in range(size)]
    rulings = agree_everywhere(form(size, over=over), "r", ballots)
    assert rulings == [rule(ballots)] * size


def test_x12_contents_that_differ_are_dropped_everywhere(form):
    rulings = agree_everywhere(form(2), "r", [a_ballot(tokens="3"), a_ballot(tokens="99")])
    assert [ruling.kind for ruling in rulings] == ["drop", "drop"]
    assert "tokens 99 here, 3 on rank 0" in rulings[0].causes[0][2]


def test_a_missing_part_is_voted_on_again_in_the_next_round(form):
    channels = form(3)
    first = agree_everywhere(channels, "r", [a_ballot(), a_ballot("missing"), a_ballot()])
    assert {(ruling.kind, ruling.missing) for ruling in first} == {("refetch", ((1, "primary"),))}
    second = agree_everywhere(channels, "r", [a_ballot(number=1)] * 3)
    assert {ruling.kind for ruling in second} == {"keep"}
    assert {ruling.kind for ruling in agree_everywhere(channels, "r", [a_ballot()] * 3)} == {"keep"}


def test_a_batch_gives_each_request_its_own_ruling_in_order(form, over):
    channels = form(3, over=over)
    votes = [
        [(f"r{at}", a_ballot("missing", can_refetch=False) if at == 3 and rank == 2 else a_ballot()) for at in range(6)]
        for rank in range(3)
    ]
    answers = at_once(
        *[
            lambda channel=channel, mine=mine: channel.agree_many(mine, deadline=far())
            for channel, mine in zip(channels, votes, strict=True)
        ]
    )
    assert answers[0] == answers[1] == answers[2]
    assert [ruling.kind for ruling in answers[0]] == ["keep", "keep", "keep", "drop", "keep", "keep"]
    assert channels[0].agree_many([], deadline=far()) == []


def test_a_batch_meets_the_same_requests_cast_one_by_one_and_in_another_order(form):
    leader, follower = form(2)
    keys = [f"r{at}" for at in range(8)]
    together, single = at_once(
        lambda: leader.agree_many([(key, a_ballot()) for key in keys], deadline=far()),
        lambda: [
            pending.result().kind
            for pending in [follower.submit(key, a_ballot(), deadline=far()) for key in reversed(keys)]
        ],
    )
    assert [ruling.kind for ruling in together] == single == ["keep"] * 8


def test_many_threads_vote_on_many_keys_in_any_order(form):
    channels = form(3)

    def take_part(channel):
        keys = [f"r{at}" for at in range(60)]
        random.Random(channel.rank).shuffle(keys)
        # As many threads as keys: in other orders, fewer could each wait for a key that no thread has come to.
        with ThreadPoolExecutor(60) as pool:
            return dict(
                zip(
                    keys,
                    pool.map(lambda key: channel.agree(key, a_ballot(tokens=key), deadline=far()), keys),
                    strict=True,
                )
            )

    answers = at_once(*[lambda channel=channel: take_part(channel) for channel in channels])
    assert answers[0] == answers[1] == answers[2]
    assert {ruling.kind for ruling in answers[0].values()} == {"keep"}


def test_d37_a_slow_rank_delays_only_its_own_request(form):
    leader, follower = form(2)
    slow = [channel.submit("slow", a_ballot(), deadline=far()) for channel in (leader,)]
    others = [
        [channel.submit(f"r{at}", a_ballot(), deadline=far()) for at in range(20)] for channel in (leader, follower)
    ]
    assert {pending.result().kind for pendings in others for pending in pendings} == {"keep"}
    assert not slow[0].done()
    assert follower.agree("slow", a_ballot(), deadline=far()).kind == slow[0].result().kind == "keep"


def test_a_submitted_vote_is_settled_although_nobody_waits_for_it(form):
    leader, follower = form(2)
    pending = leader.submit("r", a_ballot(), deadline=far())
    assert follower.agree("r", a_ballot(), deadline=far()).kind == "keep"
    pump = leader._switchboard._pump
    pump.join(30)
    assert pending.done()
    assert pending.result().kind == "keep"
    assert not pump.is_alive()


def test_waiting_for_a_submitted_vote_from_several_threads_gives_all_of_them_the_ruling(form):
    leader, follower = form(2)
    pending = leader.submit("r", a_ballot(), deadline=far())
    *rulings, last = at_once(*[pending.result] * 4, lambda: follower.agree("r", a_ballot(), deadline=far()))
    assert rulings == [last] * 4


def test_a_rank_that_does_not_vote_is_named_and_its_late_ballot_gets_the_same_ruling(form):
    first, second, late = form(3)
    rulings = agree_everywhere([first, second], "r", [a_ballot()] * 2, soon)
    assert [ruling.kind for ruling in rulings] == ["drop", "drop"]
    assert rulings[0].causes == rulings[1].causes == ((2, "", "did not vote by the deadline"),)
    assert late.agree("r", a_ballot(), deadline=far()) == rulings[0]


def test_a_late_ballot_counts_for_nothing_when_its_key_is_used_again(form):
    first, late = form(2)
    assert first.agree("r", a_ballot(), deadline=soon()).kind == "drop"
    again = first.submit("r", a_ballot(tokens="8"), deadline=far())
    assert late.agree("r", a_ballot(tokens="7"), deadline=far()).kind == "drop"
    assert not again.done()
    assert late.agree("r", a_ballot(tokens="8"), deadline=far()).kind == again.result().kind == "keep"


def test_two_dropped_requests_of_one_key_are_answered_one_after_the_other(form):
    first, late = form(2)
    for _ in range(2):
        assert first.agree("r", a_ballot(), deadline=soon()).kind == "drop"
    assert [late.agree("r", a_ballot(), deadline=far()).kind for _ in range(2)] == ["drop", "drop"]
    assert {ruling.kind for ruling in agree_everywhere([first, late], "r", [a_ballot()] * 2)} == {"keep"}


def test_the_leader_stops_waiting_when_the_first_of_its_followers_does(form):
    leader, early, _absent = form(3)
    rulings = at_once(
        lambda: leader.agree("r", a_ballot(), deadline=far()), lambda: early.agree("r", a_ballot(), deadline=soon())
    )
    assert [ruling.kind for ruling in rulings] == ["drop", "drop"]


def test_the_leader_minds_the_earliest_deadline_of_a_vote_that_nobody_waits_for(form):
    leader, early, _absent = form(3)
    pending = leader.submit("r", a_ballot(), deadline=far())
    assert early.agree("r", a_ballot(), deadline=soon()).kind == pending.result().kind == "drop"


def test_ballots_that_are_all_here_count_even_when_the_deadline_has_passed(form):
    leader, follower = form(2)
    pending = follower.submit("r", a_ballot(), deadline=far())
    assert leader.agree("r", a_ballot(), deadline=soon() - 10).kind == pending.result().kind == "keep"


def test_a_follower_without_a_ruling_is_in_doubt_and_its_channel_takes_no_further_vote(form):
    _leader, follower = form(2)
    with pytest.raises(VerdictInDoubt, match=r"rank 1 voted on 'r' .* no ruling came by the deadline; tear this group"):
        follower.agree("r", a_ballot(), deadline=soon())
    with pytest.raises(VerdictInDoubt, match="takes no vote on 'next': its channel failed before"):
        follower.agree("next", a_ballot(), deadline=far())
    with pytest.raises(VerdictInDoubt, match="failed before"):
        follower.submit("next", a_ballot(), deadline=far())


def test_a_ruling_that_comes_after_the_doubt_is_no_fault_of_the_leader(form):
    leader, follower = form(2)
    with pytest.raises(VerdictInDoubt):
        follower.agree("r", a_ballot(), deadline=soon())
    assert leader.agree("r", a_ballot(), deadline=far()).kind == "keep"
    with pytest.raises(VerdictInDoubt, match="no ruling came by the deadline"):
        follower.agree("next", a_ballot(), deadline=far())


def test_a_lost_leader_puts_every_open_vote_in_doubt_at_once(form):
    leader, follower = form(2)
    pending = [follower.submit(key, a_ballot(), deadline=far()) for key in ("a", "b")]
    leader.close()
    for one in pending:
        with pytest.raises(VerdictInDoubt, match=r"the leader is gone \(it closed its connection\)"):
            one.result()


def test_a_lost_follower_drops_what_lacks_its_ballot_and_what_comes_after(form):
    leader, follower, lost = form(3)
    lost.submit("has its ballot", a_ballot(), deadline=far())
    pending = leader.submit("lacks it", a_ballot(), deadline=far())
    lost.close()
    assert pending.result().causes[-1][:2] == (2, "")
    assert "gone (it closed its connection)" in pending.result().causes[-1][2]
    assert follower.agree("lacks it", a_ballot(), deadline=far()).kind == "drop"
    for key, kind in (("has its ballot", "keep"), ("next", "drop")):
        assert {ruling.kind for ruling in agree_everywhere([leader, follower], key, [a_ballot()] * 2)} == {kind}


def test_closing_during_a_wait_ends_it_in_doubt(form):
    for size, rank in ((2, 0), (2, 1)):
        channel = form(size)[rank]
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(channel.agree, key, a_ballot(), deadline=far()) for key in ("a", "b")]
            while len(channel._switchboard._ledger.open_calls()) < 2:
                pass
            channel.close()
            for one in waiting:
                with pytest.raises(VerdictInDoubt, match="this rank closed its channel"):
                    one.result()
        with pytest.raises(LocalProtocolError, match="closed"):
            channel.agree("c", a_ballot(), deadline=far())


def test_misuse_is_refused_before_anything_is_cast(form):
    leader, follower = form(2)
    open_vote = leader.submit("open", a_ballot(), deadline=far())
    with pytest.raises(LocalProtocolError, match="still open"):
        leader.agree("open", a_ballot(), deadline=far())
    with pytest.raises(LocalProtocolError, match="round 0 cannot take"):
        leader.agree_many([("fine", a_ballot()), ("r", a_ballot(number=3))], deadline=far())
    with pytest.raises(LocalProtocolError, match="round 0 cannot take"):
        follower.agree("r", a_ballot(number=3), deadline=far())
    for keys in ([""], ["x" * 1025], [7], ["a", "a"], ["\udc80"]):
        with pytest.raises(ConfigError):
            leader.agree_many([(key, a_ballot()) for key in keys], deadline=far())
    follower_vote = follower.submit("open", a_ballot(), deadline=far())
    assert open_vote.result().kind == follower_vote.result().kind == "keep"
    assert {ruling.kind for ruling in agree_everywhere([leader, follower], "fine", [a_ballot()] * 2)} == {"keep"}


def test_ballots_of_megabytes_pass(form, over):
    channels = form(2, over=over)
    ballot = a_ballot("failed", cause="x" * 4096)
    votes = [(f"r{at}", ballot) for at in range(400)]
    answers = at_once(*[lambda channel=channel: channel.agree_many(votes, deadline=far()) for channel in channels])
    assert answers[0] == answers[1]
    assert {ruling.kind for ruling in answers[0]} == {"drop"}


@pytest.fixture
def stranger():
    """A leader's channel whose only follower is a bare socket, which may say what it likes."""
    here, there = socket.socketpair()
    with Channel(0, 2, {1: here}, shares_clock=True, deaf_after_s=0.0) as channel, there:
        yield channel, there


def frame(payload):
    return len(payload).to_bytes(4, "big") + payload


def a_vote(key, *, number=0):
    """What a follower sends that votes on no role of `key`."""
    return frame(msgspec.msgpack.encode(Votes(math.inf, [(key, Ballot(number, True, ()))])))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (frame(b"\x80\x04garbage"), "that are no ballots"),
        (b"\xff\xff\xff\xff", "it announced a frame of 4294967295 bytes"),
        (frame(b""), "that are no ballots"),
        (frame(msgspec.msgpack.encode(("votes", math.inf, b"abc"))), "that are no ballots"),
        # The very ballots of the vote that is on, behind something else than a head.
        (frame(bytes(16) + msgspec.msgpack.encode([("r", a_ballot())])), "that are no ballots"),
        # Two votes on a key that nobody else has voted on, and a vote in a round that is not on.
        (a_vote("s") * 2, "again before the ruling"),
        (a_vote("r", number=5), "broke the order of the vote"),
    ],
)
def test_d29_a_peer_that_breaks_the_protocol_is_lost_with_the_reason(stranger, said, words):
    channel, there = stranger
    there.sendall(said)
    ruling = channel.agree("r", a_ballot(), deadline=far())
    assert ruling.kind == "drop"
    assert words in ruling.causes[0][2]


def test_a_leader_that_breaks_the_protocol_leaves_its_follower_in_doubt_with_the_reason():
    here, there = socket.socketpair()
    with Channel(1, 2, {0: here}, shares_clock=True) as channel, there:
        # It keeps what was never voted on.
        there.sendall(frame(msgspec.msgpack.encode(Kept("another"))))
        with pytest.raises(VerdictInDoubt, match="it keeps what was cast with 'another', and no vote on that can be"):
            channel.agree("r", a_ballot(), deadline=far())


def test_a_peer_that_reads_nothing_is_given_up_and_blocks_nobody(stranger):
    channel, there = stranger
    long = a_ballot("failed", cause="x" * 4096)
    for number in range(2000):
        # The follower votes the same and then never reads its rulings.
        key = f"r{number}"
        try:
            there.sendall(a_vote(key))
        except BrokenPipeError:
            break
        ruling = channel.agree(key, long, deadline=far())
        if "read nothing" in str(ruling.causes):
            break
    ruling = channel.agree("last", long, deadline=far())
    assert "read nothing" in ruling.causes[-1][2]


def test_an_interrupted_wait_leaves_its_request_to_the_channels_own_thread(form, monkeypatch):
    leader, follower = form(2)
    board = leader._switchboard
    turn = board._turn
    interrupted = threading.Event()

    def interrupt(until, wait_s):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        turn(until, wait_s)

    monkeypatch.setattr(board, "_turn", interrupt)
    with pytest.raises(KeyboardInterrupt):
        leader.agree("r", a_ballot(), deadline=far())
    assert follower.agree("r", a_ballot(), deadline=far()).kind == "keep"
