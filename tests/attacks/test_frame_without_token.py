"""Attack: valid messages of somebody who does not know the secret (D29): not one of them is looked at."""

import pytest

from omnikv.core.authentication import OPENING_NBYTES, Rejected, call
from omnikv.core.messages import Want
from omnikv.transports.proved_link import encode
from omnikv.transports.stream_frames import frame

WANT = frame(encode(Want(1, "r1", "primary", 0, False)))


def test_d29_a_hello_and_a_want_without_a_greeting_are_refused(attacked, ended):
    caller = attacked.caller(attacked.address)
    caller.connection.sendall((frame(encode(caller.hello())) + WANT).ljust(OPENING_NBYTES, b"\0"))
    assert ended(caller.connection)
    assert attacked.the_source.counters == {"refused_opening": 1}
    attacked.works()


def test_whoever_guesses_a_secret_gets_no_answer_to_what_it_asks(attacked):
    payload = attacked.payload("secret-request")
    with attacked.the_source.reserve(payload, 6) as slot:
        slot.buffer[:] = b"secret"
        slot.publish()
    caller = attacked.caller(attacked.address, secret=b"this is not the secret of the pair")
    _, opening = call(caller.claim, bytes(32), caller.secret)
    caller.connection.sendall(opening + bytes(32) + frame(encode(caller.hello())) + WANT)
    caller.receive(OPENING_NBYTES + 32)
    assert b"does not know the secret" in caller.hear()
    assert caller.hear() == b""
    assert attacked.the_source.counters == {"refused_proof": 1}
    attacked.works()


def test_a_caller_notices_an_impostor_and_keeps_its_proof(attacked):
    caller = attacked.caller(attacked.address, secret=b"a secret that the source has not got")
    state = caller.greet()
    assert isinstance(state, Rejected)
    assert state.kind == "refused_proof"


@pytest.mark.parametrize("claims_none", [True, False])
def test_nobody_gets_in_by_claiming_that_there_is_no_secret(attacked, claims_none):
    caller = attacked.caller(attacked.address, secret=b"" if claims_none else b"some other secret, long enough")
    state = caller.greet()
    assert isinstance(state, Rejected)
    attacked.works()
