"""Attack: a peer that knows the secret and says it is another rank than it proved to be, or takes another's payload."""

import time

from omnikv.core.authentication import NO_LIFE, Proved
from omnikv.core.messages import Want
from omnikv.transports.tcp_messages import PIECE, Pull


def test_a_hello_of_another_rank_than_was_proved_is_refused(attacked):
    peer = attacked.caller(attacked.address, rank=1)
    assert isinstance(peer.greet(), Proved)
    peer.say(peer.hello(rank=0))
    assert b"hello" in peer.hear()
    assert b"proved to be target rank 1" in peer.hear()
    assert attacked.the_source.counters == {"refused_message": 1}
    attacked.works()


def test_a_hello_of_another_edge_than_was_proved_is_refused(attacked):
    peer = attacked.caller(attacked.address, rank=1)
    assert isinstance(peer.greet(), Proved)
    peer.say(peer.hello(namespace="somebody-elses"))
    assert b"hello" in peer.hear()
    assert b"another edge" in peer.hear()
    attacked.works()


def test_a_rank_that_the_source_does_not_deal_with_is_told_so(attacked):
    peer = attacked.caller(attacked.address, rank=9)
    assert isinstance(peer.greet(), Proved)
    peer.say(peer.hello())
    assert b"hello" in peer.hear()
    assert b"deals with [0, 1], not with rank 9" in peer.hear()
    attacked.works()


def test_a_lane_of_no_life_that_is_connected_is_refused(attacked, ended):
    lane = attacked.caller(attacked.address, rank=1, purpose="data")
    lane.greet()
    assert ended(lane.connection)
    attacked.until_counted("refused_lanes")
    attacked.works()


def test_a_lane_of_another_rank_than_its_life_is_refused(attacked, ended):
    peer = attacked.caller(attacked.address, rank=1).enter()
    lane = attacked.caller(attacked.address, rank=0, purpose="data", life=peer.claim.life, peer_life=NO_LIFE)
    lane.greet()
    assert ended(lane.connection)
    attacked.until_counted("refused_lanes")
    attacked.works()


def test_a_made_up_token_gives_no_bytes_of_anybody(attacked):
    payload = attacked.payload("r1")
    with attacked.the_source.reserve(payload, 6) as slot:
        slot.buffer[:] = b"secret"
        slot.publish()
    peer = attacked.caller(attacked.address, rank=1).enter()
    lane = attacked.caller(attacked.address, rank=1, purpose="data", life=peer.claim.life)
    lane.greet()
    for token in range(64):
        lane.say(Pull(token, token, 0))
    answers = [PIECE.unpack(lane.receive(PIECE.size)) for _ in range(64)]
    assert answers == [(token, 0, 0) for token in range(64)]
    peer.say(Want(1, "unknown", "primary", 0, False))
    assert b"absent" in peer.hear()
    with attacked.the_target.get(payload, deadline=time.monotonic() + 30) as lease:
        assert bytes(lease.buffer) == b"secret"
