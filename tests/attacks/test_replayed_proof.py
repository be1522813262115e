"""Attack: a greeting that was heard on the network is sent again, word for word: the nonce is another one by now."""

from omnikv.core.authentication import ANSWER_NBYTES, Proved, awaited_nbytes, call, step


def test_a_recorded_greeting_opens_nothing(attacked):
    honest = attacked.caller(attacked.address, rank=1)
    state, opening = call(honest.claim, bytes(32), honest.secret)
    honest.connection.sendall(opening)
    state, proof = step(state, honest.receive(awaited_nbytes(state)))
    assert isinstance(state, Proved)
    honest.connection.sendall(proof)
    honest.say(honest.hello())
    assert b"hello" in honest.hear()
    replayed = attacked.caller(attacked.address, rank=1)
    replayed.connection.sendall(opening)
    replayed.receive(ANSWER_NBYTES)
    replayed.connection.sendall(proof)
    assert b"does not know the secret" in replayed.hear()
    assert replayed.hear() == b""
    assert attacked.the_source.counters == {"refused_proof": 1}
    attacked.works()
