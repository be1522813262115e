"""Attack: a source's own proof is sent back to it, on the same connection or on another: it proves the source only."""

from omnikv.core.authentication import ANSWER_NBYTES, OPENING_NBYTES, call


def test_a_proof_sent_back_on_its_own_connection_proves_nothing(attacked):
    thief = attacked.caller(attacked.address)
    _, opening = call(thief.claim, bytes(32), b"the thief does not know the secret")
    # It claims to know a secret, and lets the source prove itself first.
    thief.connection.sendall(opening)
    answer = thief.receive(ANSWER_NBYTES)
    thief.connection.sendall(answer[OPENING_NBYTES:])
    assert b"does not know the secret" in thief.hear()
    assert attacked.the_source.counters == {"refused_proof": 1}
    attacked.works()


def test_a_proof_got_on_one_connection_does_not_open_another(attacked):
    first, second = attacked.caller(attacked.address), attacked.caller(attacked.address)
    _, opening = call(first.claim, bytes(32), b"the thief does not know the secret")
    first.connection.sendall(opening)
    second.connection.sendall(opening)
    answer = first.receive(ANSWER_NBYTES)
    second.receive(ANSWER_NBYTES)
    second.connection.sendall(answer[OPENING_NBYTES:])
    assert b"does not know the secret" in second.hear()
    attacked.works()


def test_an_opening_sent_back_is_not_a_greeting(attacked, ended):
    """A source that is shown its own words sees a source, and sources call nobody."""
    first, second = attacked.caller(attacked.address), attacked.caller(attacked.address)
    _, opening = call(first.claim, bytes(32), b"the thief does not know the secret")
    first.connection.sendall(opening)
    answer = first.receive(ANSWER_NBYTES)
    second.connection.sendall(answer[:OPENING_NBYTES])
    second.receive(ANSWER_NBYTES)
    second.connection.sendall(answer[OPENING_NBYTES:])
    assert ended(second.connection)
    attacked.works()
