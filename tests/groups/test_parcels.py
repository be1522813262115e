"""Parcels between real processes over gloo: every kind of them, in any group, and by a deadline."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

from omnikv.errors import ConnectError, RemoteProtocolError
from omnikv.groups.parcels import Parcel, ParcelKind, ParcelPost

HERE = "tests.groups.test_parcels"


def parcel_of(number, nbytes=1000):
    return Parcel(ParcelKind.BUNDLE, torch.full((nbytes,), number, dtype=torch.uint8))


def spelt(parcel):
    return [parcel.kind.name, parcel.nbytes, parcel.data[:3].tolist()]


def soon(within_s=20.0):
    return time.monotonic() + within_s


def send_each_its_own(rank):
    post = ParcelPost(dist.group.WORLD)
    if rank:
        return [spelt(post.receive(0, deadline=soon())) for _ in range(2)]
    for other in (1, 2):
        post.send(parcel_of(other), other, deadline=soon())
    for other in (2, 1):
        post.send(Parcel.words(ParcelKind.NOTHING, ""), other, deadline=soon())
    return []


def test_every_follower_gets_its_own_parcel(gangs, tmp_path):
    assert gangs.run(f"{HERE}:send_each_its_own", 3, tmp_path)[1:] == [
        [["BUNDLE", 1000, [1, 1, 1]], ["NOTHING", 0, []]],
        [["BUNDLE", 1000, [2, 2, 2]], ["NOTHING", 0, []]],
    ]


def share_in_a_subgroup(rank):
    group = dist.new_group([1, 3], backend="gloo")
    if rank not in (1, 3):
        return "outside"
    post = ParcelPost(group)
    if rank == 1:
        post.broadcast(parcel_of(7), deadline=soon())
        post.send(Parcel.words(ParcelKind.DOUBT, "why"), 1, deadline=soon())
        return "gave"
    return [spelt(post.broadcast(None, deadline=soon())), post.receive(0, deadline=soon()).text]


def test_d39_a_fan_out_in_a_subgroup_counts_ranks_within_it(gangs, tmp_path):
    assert gangs.run(f"{HERE}:share_in_a_subgroup", 4, tmp_path) == [
        "outside",
        "gave",
        "outside",
        [["BUNDLE", 1000, [7, 7, 7]], "why"],
    ]


def wait_in_vain(rank, channel):
    post = ParcelPost(dist.group.WORLD)
    started = time.monotonic()
    if rank == 0:
        channel.next_message()
    try:
        post.receive(0, deadline=soon(0.3))
    except ConnectError as error:
        return [str(error), time.monotonic() - started]


def test_a_parcel_that_never_comes_is_waited_for_until_the_deadline(gangs, tmp_path):
    with gangs.started(f"{HERE}:wait_in_vain", 2, tmp_path) as gang:
        ((words, waited_s),) = gang.results([1])
    assert "could not be handed on with rank 0" in words
    assert waited_s >= 0.3


def wait_for_the_dead(rank, channel):
    post = ParcelPost(dist.group.WORLD)
    dist.barrier()
    channel.tell("met")
    if rank == 0:
        channel.next_message()
    said = []
    for call in (partial(post.receive, 0), partial(post.send, parcel_of(1), 0)):
        with pytest.raises(ConnectError) as caught:
            call(deadline=soon(60.0))
        said.append(str(caught.value))
    return said


def test_a_dead_peer_is_noticed_long_before_the_deadline(gangs, tmp_path):
    with gangs.started(f"{HERE}:wait_for_the_dead", 2, tmp_path, within_s=40.0) as gang:
        gang.wait_for("met")
        gang.ranks[0].kill()
        ((first, second),) = gang.results([1])
    assert first.startswith("KV could not be handed on with rank 0: ")
    assert "\n" not in first
    assert second == f"KV cannot be handed on after a call that failed: {first}"


def serve_the_living(rank, channel):
    post = ParcelPost(dist.group.WORLD)
    dist.barrier()
    channel.tell("met")
    if rank:
        return spelt(post.receive(0, deadline=soon(60.0)))
    channel.next_message()
    with suppress(ConnectError):
        for _ in range(100):
            post.send(parcel_of(1), 1, deadline=soon())
    post.send(parcel_of(2), 2, deadline=soon())
    return post.broken.startswith("KV could not be handed on with rank 1: ")


def test_a_dead_peer_keeps_nothing_from_the_others(gangs, tmp_path):
    with gangs.started(f"{HERE}:serve_the_living", 3, tmp_path, within_s=40.0) as gang:
        gang.wait_for("met")
        gang.ranks[1].kill()
        gang.ranks[0].order("go on")
        assert gang.results([0, 2]) == [True, ["BUNDLE", 1000, [2, 2, 2]]]


def announce_nonsense(rank):
    if rank == 0:
        for nonsense in ([9, 4], [1, -1]):
            dist.send(torch.tensor(nonsense), 1)
        return []
    post, said = ParcelPost(dist.group.WORLD), []
    for _ in range(2):
        with pytest.raises(RemoteProtocolError) as caught:
            post.receive(0, deadline=soon())
        said.append(str(caught.value))
    return said


def test_an_announcement_that_is_none_is_refused(gangs, tmp_path):
    assert gangs.run(f"{HERE}:announce_nonsense", 2, tmp_path)[1] == [
        "a peer announced kind 9 of 4 bytes, which is no parcel",
        "a peer announced kind 1 of -1 bytes, which is no parcel",
    ]
