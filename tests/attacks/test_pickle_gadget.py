"""Attack: a pickle that runs a command when it is loaded (D29). Nobody loads it, before or after the greeting."""

import os
import pickle

from omnikv.transports.stream_frames import frame


class Gadget:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_d29_a_pickle_is_refused_and_nothing_runs(attacked, ended, tmp_path, warnings_of):
    gadget = pickle.dumps(Gadget(tmp_path / "ran"))
    for _ in range(3):
        stranger = attacked.connect()
        stranger.sendall(gadget.ljust(500, b"."))
        assert ended(stranger)
    assert attacked.the_source.counters == {"refused_opening": 3}
    assert len(warnings_of("no greeting of this transport")) == 1
    assert not (tmp_path / "ran").exists()
    attacked.works()


def test_d29_a_proved_peer_that_sends_a_pickle_is_refused_too(attacked, ended, tmp_path):
    peer = attacked.caller(attacked.address, rank=1).enter()
    peer.connection.sendall(frame(pickle.dumps(Gadget(tmp_path / "ran"))))
    assert b"refused" in peer.hear()
    assert ended(peer.connection)
    assert attacked.the_source.counters == {"refused_message": 1}
    assert not (tmp_path / "ran").exists()
    attacked.works()


def test_d29_a_lane_that_sends_a_pickle_is_ended(attacked, ended, tmp_path):
    peer = attacked.caller(attacked.address, rank=1).enter()
    lane = attacked.caller(attacked.address, rank=1, purpose="data", life=peer.claim.life)
    lane.greet()
    lane.connection.sendall(frame(pickle.dumps(Gadget(tmp_path / "ran"))))
    assert ended(lane.connection)
    attacked.until_counted("refused_lane")
    assert not (tmp_path / "ran").exists()
    attacked.works()
