"""NIXL's own notifications tell a source that a read went well, and nothing that others send is taken for one."""

import time

import pytest
from tcp_ends import TcpPair

from omnikv.core.keys import PayloadId
from omnikv.transports.base import PutRequest
from omnikv.transports.nixl_engine import NixlEngine

PATIENCE_S = 30.0


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pytest.importorskip("nixl_cu12._api")
    pair = TcpPair(transport="nixl")
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        yield source, target


def payload_of(source, name):
    return PayloadId(edge=source._endpoint.edge, transfer_id=name, source_rank=0, target_rank=0)


def hand_over(source, target, name, nbytes):
    wanted = PutRequest(payload_of(source, name), nbytes)
    # The room of the one before may still be on its way back.
    (reserved,) = source.reserve_all([wanted], deadline=time.monotonic() + PATIENCE_S)
    with reserved as slot:
        slot.buffer[:] = bytes([nbytes % 251]) * nbytes
        slot.publish()
    with target.get(payload_of(source, name), deadline=time.monotonic() + PATIENCE_S) as lease:
        assert bytes(lease.buffer) == bytes([nbytes % 251]) * nbytes
        lease.acknowledge()


def test_every_read_that_goes_well_is_notified_and_no_word_of_the_link_is_needed(ends):
    source, target = ends
    said, handle = [], source._shelf.handle
    source._shelf.handle = lambda link, message: (said.append(message), handle(link, message))
    for number, nbytes in enumerate([1, 4096, 1 << 20, 3 << 20]):
        hand_over(source, target, f"r{number}", nbytes)
    assert source.drain(deadline=time.monotonic() + PATIENCE_S) == 0
    assert said == []
    assert source.counters == {}


def test_a_notification_of_an_agent_that_was_told_nothing_is_counted_and_ends_nothing(ends):
    source, target = ends
    stranger = NixlEngine()
    name = stranger.learn(source.engine.hail())
    for notice in (b"x" * 16, b"any", bytes(1000)):
        stranger._agent.send_notif(name, notice)
    give_up = time.monotonic() + PATIENCE_S
    number = 0
    while source.counters.get("foreign_notices", 0) < 3:
        # They are looked at while something is read, and not before.
        hand_over(source, target, f"r{number}", 4096)
        stranger.serve()
        number += 1
        assert time.monotonic() < give_up
    stranger.close()
