"""Attack: a length prefix of 4 GiB (D29): nothing is kept for it, before the greeting or after."""

import pytest

from omnikv.bench.measure import MemoryUse

HUGE = (2**32 - 1).to_bytes(4, "big")


def test_d29_a_stranger_that_announces_4_gib_is_refused_after_a_greetings_length(attacked, ended):
    before = MemoryUse.now().resident
    stranger = attacked.connect()
    stranger.sendall(HUGE + bytes(1000))
    assert ended(stranger)
    assert attacked.the_source.counters == {"refused_opening": 1}
    assert MemoryUse.now().resident - before < 16 << 20
    attacked.works()


@pytest.mark.parametrize("announced", [HUGE, (65537).to_bytes(4, "big"), bytes(4)], ids=["4 GiB", "one over", "none"])
def test_a_proved_peer_that_announces_too_much_is_refused_in_words(attacked, ended, announced):
    before = MemoryUse.now().resident
    peer = attacked.caller(attacked.address, rank=1).enter()
    peer.connection.sendall(announced + bytes(1000))
    assert b"is announced" in peer.hear()
    assert ended(peer.connection)
    assert attacked.the_source.counters == {"refused_message": 1}
    assert MemoryUse.now().resident - before < 16 << 20
    attacked.works()


def test_a_lane_that_announces_too_much_is_ended(attacked, ended):
    peer = attacked.caller(attacked.address, rank=1).enter()
    lane = attacked.caller(attacked.address, rank=1, purpose="data", life=peer.claim.life)
    lane.greet()
    lane.connection.sendall(HUGE)
    assert ended(lane.connection)
    attacked.until_counted("refused_lane")
    attacked.works()
