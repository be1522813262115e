"""How a channel is formed: configurations that differ, who gets in at the door, and who is told what went wrong."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omnikv.core.messages import (
    CHANNEL_VERSION,
    Ballot,
    ChannelCard,
    ChannelChallenge,
    ChannelGreeting,
    ChannelInvitation,
    ChannelProof,
    RoleBallot,
)
from omnikv.errors import ConfigError, ConnectError
from omnikv.groups import channel_form
from omnikv.groups.base import Group
from omnikv.groups.channel import Channel
from omnikv.groups.channel_door import MAX_STRANGERS, prove
from omnikv.groups.threads import ThreadGroup

HAVE = Ballot(0, True, (RoleBallot("primary", "have", True),))
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def far():
    return time.monotonic() + 30


def soon():
    return time.monotonic() + 0.3


def form_each(groups, options, deadline=far):
    """What forming comes to on each rank: a channel or the error that it raised."""

    def form(group, kwargs):
        try:
            return Channel.form(group, deadline=deadline(), **kwargs)
        except (ConfigError, ConnectError) as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        formed = list(pool.map(form, groups, options))
    for one in formed:
        if isinstance(one, Channel):
            one.close()
    return formed


@pytest.fixture(autouse=True)
def _no_descriptor_is_left():
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == descriptors


class Spy(Group):
    """A group that lets a test see, and change, what its ranks show each other."""

    def __init__(self, group, change=lambda payload: payload):
        self.group, self.change = group, change
        self.invited = threading.Event()
        self.invitation = None

    @property
    def rank(self):
        return self.group.rank

    @property
    def size(self):
        return self.group.size

    def exchange(self, ballot, *, deadline):
        shown = self.group.exchange(self.change(ballot), deadline=deadline)
        if b"invitation" in shown[0][:16]:
            self.invitation = decode(shown[0], type=ChannelInvitation)
            self.invited.set()
        return shown


def test_facts_that_differ_are_named_with_their_ranks_on_every_rank():
    facts = [
        {"receive_timeout_s": "30.0", "x": "1"},
        {"receive_timeout_s": "30.0", "x": "1"},
        {"receive_timeout_s": "10.0"},
    ]
    errors = form_each(ThreadGroup.create(3), [{"facts": one} for one in facts])
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], ConfigError)
    assert "receive_timeout_s: 30.0 on ranks 0 and 1, 10.0 on rank 2" in str(errors[0])
    assert "x: 1 on ranks 0 and 1, not given on rank 2" in str(errors[0])


def test_the_way_to_speak_must_be_the_same_on_all_ranks():
    errors = form_each(ThreadGroup.create(2), [{"over": "tcp"}, {}])
    assert all("channel over: tcp on rank 0, auto on rank 1" in str(error) for error in errors)


def test_ranks_that_speak_another_version_or_form_no_channel_are_told_apart():
    def newer(payload):
        if b"card" not in payload[:16]:
            return payload
        card = decode(payload, type=ChannelCard)
        return encode(msgspec.structs.replace(card, version=card.version + 1))

    first, second = ThreadGroup.create(2)
    errors = form_each([first, Spy(second, newer)], [{}, {}])
    assert all(
        f"channel protocol version: {CHANNEL_VERSION} on rank 0, {CHANNEL_VERSION + 1} on rank 1" in str(error)
        for error in errors
    )
    first, second = ThreadGroup.create(2)
    errors = form_each([first, Spy(second, lambda _: b"a ballot")], [{}, {}])
    assert all("rank 1 shows no card of a channel" in str(error) for error in errors)


def test_ranks_of_several_hosts_need_an_address_that_is_not_a_loopback(monkeypatch):
    own_card = channel_form._own_card

    def elsewhere(facts):
        # Each rank's card is made in a thread of its own.
        return msgspec.structs.replace(own_card(facts), host=threading.current_thread().name)

    monkeypatch.setattr(channel_form, "_own_card", elsewhere)
    errors = form_each(ThreadGroup.create(2), [{}, {}])
    assert all(isinstance(error, ConfigError) and "not 127.0.0.1" in str(error) for error in errors)


def test_ranks_of_several_users_on_one_host_speak_over_tcp(monkeypatch):
    own_card = channel_form._own_card
    monkeypatch.setattr(
        channel_form,
        "_own_card",
        lambda facts: msgspec.structs.replace(own_card(facts), user=threading.current_thread().name),
    )
    groups = [Spy(group) for group in ThreadGroup.create(2)]
    assert all(isinstance(one, Channel) for one in form_each(groups, [{}, {}]))
    assert groups[0].invitation.tcp_port


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])
def test_listening_on_all_interfaces_is_refused(address):
    with pytest.raises(ConfigError, match="not at all of them"):
        Channel.form(ThreadGroup.create(1)[0], deadline=far(), address=(address, 0))


def test_facts_must_be_texts_and_ways_known():
    group = ThreadGroup.create(1)[0]
    with pytest.raises(ConfigError, match=r"'timeout_s' is not: pass str"):
        Channel.form(group, deadline=far(), facts={"timeout_s": 30.0})
    with pytest.raises(ConfigError, match="'auto' or 'tcp', got 'udp'"):
        Channel.form(group, deadline=far(), over="udp")


def test_d11_an_address_in_use_is_named_on_every_rank():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        errors = form_each(ThreadGroup.create(2), [{"over": "tcp", "address": ("127.0.0.1", port)}] * 2)
    assert all(isinstance(error, ConnectError) and f"127.0.0.1:{port}" in str(error) for error in errors)
    assert all("port 0 for any free one" in str(error) for error in errors)


def test_ranks_that_do_not_come_are_named_and_those_that_came_are_told():
    groups = ThreadGroup.create(3)

    def absent():
        for _ in range(2):
            groups[2].exchange(encode(channel_form._own_card({"channel over": "auto"})), deadline=far())

    thread = threading.Thread(target=absent)
    thread.start()
    leader, follower = form_each(groups[:2], [{}, {}], soon)
    thread.join()
    assert isinstance(leader, ConnectError)
    assert "ranks [2] did not join the channel by the deadline" in str(leader)
    assert isinstance(follower, ConnectError)
    assert "rank 1 cannot join its group's channel at rank 0" in str(follower)


def knock(invitation):
    if invitation.unix_name:
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(invitation.unix_name)
    else:
        caller = socket.create_connection((invitation.tcp_host, invitation.tcp_port))
    caller.settimeout(30)
    return caller


def say(caller, message):
    payload = message if isinstance(message, bytes) else encode(message)
    caller.sendall(len(payload).to_bytes(4, "big") + payload)


def hear(caller, kind):
    length = int.from_bytes(caller.recv(4), "big")
    return decode(caller.recv(length), type=kind)


def is_turned_away(caller):
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("over", ["auto", "tcp"])
def test_d29_strangers_at_the_door_are_turned_away_and_hold_up_nobody(over, caplog):
    leader, follower = (Spy(group) for group in ThreadGroup.create(2))
    with ThreadPoolExecutor(2) as pool:
        forming = pool.submit(Channel.form, leader, deadline=far(), over=over)
        # The follower takes part in the exchange, and comes to the door only after the strangers.
        cards = pool.submit(channel_form._own_card, {"channel over": over}).result()
        follower.exchange(encode(cards), deadline=far())
        follower.exchange(b"", deadline=far())
        invitation = follower.invitation
        silent = [knock(invitation) for _ in range(5)]
        rude = []
        for words in (
            b"\x80\x04garbage",
            b"",
            b"x" * 300,
            ChannelGreeting(7, bytes(32)),
            ChannelGreeting(0, bytes(32)),
            ChannelProof(bytes(32)),
        ):
            caller = knock(invitation)
            say(caller, words)
            rude.append(caller)
        huge = knock(invitation)
        huge.sendall(b"\xff\xff\xff\xff")
        # It knows a rank, but guesses the token.
        guess = knock(invitation)
        say(guess, ChannelGreeting(1, bytes(32)))
        challenge = hear(guess, ChannelChallenge)
        assert challenge.proof != prove(b"a guess", "leader", 1, bytes(32), challenge.nonce)
        say(guess, ChannelProof(prove(b"a guess", "caller", 1, bytes(32), challenge.nonce)))
        assert all(is_turned_away(caller) for caller in (*rude, huge, guess))
        honest = knock(invitation)
        say(honest, ChannelGreeting(1, bytes(32)))
        nonce = hear(honest, ChannelChallenge).nonce
        say(honest, ChannelProof(prove(invitation.token, "caller", 1, bytes(32), nonce)))
        channel = forming.result()
        assert all(is_turned_away(caller) for caller in silent)
        channel.close()
    for caller in (*silent, *rude, huge, guess, honest):
        caller.close()
    turned_away = [record for record in caplog.records if "turned away" in record.message]
    assert len(turned_away) == len(rude) + 2
    assert any("does not know the group's token" in record.message for record in turned_away)


def test_more_silent_strangers_than_fit_do_not_keep_a_rank_out():
    leader, follower = (Spy(group) for group in ThreadGroup.create(2))
    callers = []
    with ThreadPoolExecutor(2) as pool:
        forming = pool.submit(Channel.form, leader, deadline=far())

        class Crowded(Spy):
            def exchange(self, ballot, *, deadline):
                shown = super().exchange(ballot, deadline=deadline)
                if self.invitation is not None:
                    callers.extend(knock(self.invitation) for _ in range(MAX_STRANGERS + 20))
                return shown

        joined = pool.submit(Channel.form, Crowded(follower.group), deadline=far())
        with forming.result() as first, joined.result() as second:
            assert (first.rank, second.rank) == (0, 1)
    assert len(callers) == MAX_STRANGERS + 20
    for caller in callers:
        caller.close()


def test_a_listener_that_does_not_know_the_token_is_not_joined():
    leader, follower = ThreadGroup.create(2)
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(2) as pool:
        joining = pool.submit(Channel.form, follower, deadline=far(), over="tcp")
        card = channel_form._own_card({"channel over": "tcp", channel_form._ADDRESS: "127.0.0.1"})
        leader.exchange(encode(card), deadline=far())
        port = impostor.getsockname()[1]
        leader.exchange(
            encode(ChannelInvitation(token=b"the real one", tcp_host="127.0.0.1", tcp_port=port)), deadline=far()
        )
        caller = impostor.accept()[0]
        with caller:
            hear(caller, ChannelGreeting)
            say(caller, ChannelChallenge(bytes(32), bytes(32)))
            with pytest.raises(ConnectError, match="does not know the group's token"):
                joining.result()


def test_a_rank_that_cannot_reach_the_leader_says_where_it_tried():
    leader, follower = ThreadGroup.create(2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Channel.form, follower, deadline=far(), over="tcp")
        card = channel_form._own_card({"channel over": "tcp", channel_form._ADDRESS: "127.0.0.1"})
        leader.exchange(encode(card), deadline=far())
        leader.exchange(encode(ChannelInvitation(token=b"t", tcp_host="127.0.0.1", tcp_port=port)), deadline=far())
        with pytest.raises(ConnectError, match=f"rank 1 cannot join .*127.0.0.1:{port}.*cannot be reached"):
            joining.result()


def test_nothing_listens_once_the_channel_is_formed():
    groups = [Spy(group) for group in ThreadGroup.create(2)]
    with ThreadPoolExecutor(2) as pool:
        channels = [job.result() for job in [pool.submit(Channel.form, group, deadline=far()) for group in groups]]
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(groups[0].invitation.unix_name)
    for channel in channels:
        channel.close()
