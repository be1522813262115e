"""Attack: a frame, or a greeting, that stops in the middle (D29): whoever sent it waits alone."""

import socket

from omnikv.core.authentication import call
from omnikv.core.messages import Want
from omnikv.transports.proved_link import encode
from omnikv.transports.stream_frames import frame


def test_d29_half_a_message_and_an_end_is_an_end(attacked, ended):
    peer = attacked.caller(attacked.address, rank=1).enter()
    whole = frame(encode(Want(1, "r1", "primary", 0, True)))
    peer.connection.sendall(whole[: len(whole) // 2])
    attacked.works()
    peer.connection.shutdown(socket.SHUT_WR)
    assert ended(peer.connection)
    assert attacked.the_source.counters == {}
    attacked.works()


def test_half_a_greeting_and_an_end_is_an_end(attacked, ended):
    caller = attacked.caller(attacked.address)
    _, opening = call(caller.claim, bytes(32), caller.secret)
    caller.connection.sendall(opening[:40])
    attacked.works()
    caller.connection.shutdown(socket.SHUT_WR)
    assert ended(caller.connection)
    attacked.works()


def test_half_a_proof_and_an_end_is_an_end(attacked, ended):
    caller = attacked.caller(attacked.address)
    _, opening = call(caller.claim, bytes(32), caller.secret)
    caller.connection.sendall(opening + bytes(31))
    caller.connection.shutdown(socket.SHUT_WR)
    assert ended(caller.connection)
    assert attacked.the_source.counters == {}
    attacked.works()
