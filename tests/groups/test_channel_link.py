"""One connection: frames come out as they went in, however the bytes are cut, and nothing ever blocks."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.groups.channel_link import Link


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def receive_all(link):
    frames = []
    while link.receive(lambda _, frame: frames.append(frame)):
        pass
    return frames


@given(payloads=st.lists(st.binary(max_size=300), max_size=5), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_out_however_they_are_cut(payloads, cuts):
    here, there = socket.socketpair()
    with here, there:
        link = Link(here)
        stream = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
        received, at, number = [], 0, 0
        while at < len(stream):
            size = cuts[number % len(cuts)]
            there.sendall(stream[at : at + size])
            received += receive_all(link)
            at, number = at + size, number + 1
        assert received == payloads


def test_what_the_socket_does_not_take_goes_out_later_in_order(pair):
    writer, reader = Link(pair[0]), Link(pair[1])
    payloads = [bytes([at]) * 300_000 for at in range(5)]
    for payload in payloads:
        writer.send(payload)
    assert writer.queue
    received = []
    while len(received) < len(payloads):
        received += receive_all(reader)
        writer.flush()
    assert received == payloads
    assert not writer.queue


def test_a_queue_over_its_bound_gives_the_peer_up(pair):
    link = Link(pair[0], max_queued_nbytes=500_000)
    for _ in range(5):
        link.send(bytes(300_000))
    assert not link.queue
    assert receive_all(link) == []
    assert "it reads too slowly" in link.ended


def test_a_queue_that_stands_still_too_long_gives_the_peer_up(pair):
    link = Link(pair[0], deaf_after_s=-1.0)
    for _ in range(3):
        link.send(bytes(300_000))
    assert receive_all(link) == []
    assert "it has read nothing" in link.ended


def test_a_frame_over_the_limit_is_refused_before_its_bytes_come(pair):
    link = Link(pair[0], max_frame_nbytes=100)
    pair[1].sendall((3).to_bytes(4, "big") + b"abc" + (101).to_bytes(4, "big"))
    assert receive_all(link) == [b"abc"]
    assert link.ended == "it announced a frame of 101 bytes, at most 100 are taken"


def test_last_words_are_read_before_the_end_is_known(pair):
    link = Link(pair[0])
    # The peer closes with something of ours unread, which resets the connection.
    link.send(b"unread")
    pair[1].sendall((4).to_bytes(4, "big") + b"last")
    pair[1].close()
    link.send(b"nobody reads this")
    assert receive_all(link) == [b"last"]
    assert link.ended is not None


def test_an_end_is_said_once_and_closing_is_idempotent(pair):
    link = Link(pair[0])
    pair[1].close()
    assert receive_all(link) == []
    assert link.ended == "it closed its connection"
    link.fail("later")
    link.close()
    link.close()
    link.send(b"swallowed")
