"""How two ends prove themselves: who is believed, and what no stranger can do with what it heard."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.authentication import (
    ANSWER_NBYTES,
    LIFE_NBYTES,
    NONCE_NBYTES,
    OPENING_NBYTES,
    PROOF_NBYTES,
    Claim,
    Listening,
    Proved,
    Rejected,
    awaited_nbytes,
    call,
    digest_edge,
    step,
)

SECRET = b"a secret of thirty-two characters"
TARGET = Claim(purpose="control", side="target", rank=3, reader=1, edge=digest_edge("e"), life=b"t" * LIFE_NBYTES)
SOURCE = Claim(purpose="control", side="source", rank=0, reader=0, edge=digest_edge("e"), life=b"s" * LIFE_NBYTES)
NONCES = (b"c" * NONCE_NBYTES, b"a" * NONCE_NBYTES)


def talk(caller=TARGET, acceptor=SOURCE, caller_secret=SECRET, acceptor_secret=SECRET, nonces=NONCES):
    """The last states of both, and what each of them said, in order."""
    calling, opening = call(caller, nonces[0], caller_secret)
    listening, answer = step(Listening(acceptor, nonces[1], acceptor_secret), opening)
    if len(answer) != ANSWER_NBYTES:
        return calling, listening, (opening, answer, b"")
    calling, proof = step(calling, answer)
    if awaited_nbytes(listening) == len(proof):
        listening, _ = step(listening, proof)
    return calling, listening, (opening, answer, proof)


def test_ends_with_one_secret_know_each_other():
    caller, acceptor, said = talk()
    assert caller == Proved(SOURCE)
    assert acceptor == Proved(TARGET)
    assert [len(part) for part in said] == [OPENING_NBYTES, ANSWER_NBYTES, PROOF_NBYTES]


def test_the_acceptor_repeats_what_the_connection_is_for_and_proves_it():
    caller, acceptor, _ = talk(dataclasses.replace(TARGET, purpose="data"))
    assert caller == Proved(dataclasses.replace(SOURCE, purpose="data"))
    assert acceptor.peer.purpose == "data"


def test_without_a_secret_the_claims_are_exchanged_all_the_same():
    caller, acceptor, _ = talk(caller_secret=b"", acceptor_secret=b"")
    assert (caller, acceptor) == (Proved(SOURCE), Proved(TARGET))


def test_unlike_secrets_are_noticed_by_the_caller_who_gives_no_proof():
    caller, _, said = talk(acceptor_secret=b"another secret of some length")
    assert caller.kind == "refused_proof"
    assert said[2] == b""


@pytest.mark.parametrize("secrets", [(SECRET, b""), (b"", SECRET)])
def test_nobody_talks_an_end_out_of_its_secret(secrets):
    caller, acceptor, said = talk(caller_secret=secrets[0], acceptor_secret=secrets[1])
    assert caller.kind == acceptor.kind == "refused_opening"
    assert "secret" in caller.reason
    assert said[1][OPENING_NBYTES:] == bytes(PROOF_NBYTES)


def test_a_connection_meant_for_an_earlier_life_is_refused():
    lost = dataclasses.replace(TARGET, peer_life=b"x" * LIFE_NBYTES)
    caller, acceptor, _ = talk(lost)
    assert "restarted" in caller.reason
    assert "earlier life" in acceptor.reason
    caller, acceptor, _ = talk(dataclasses.replace(TARGET, peer_life=SOURCE.life))
    assert (type(caller), type(acceptor)) == (Proved, Proved)


def test_what_is_no_opening_is_not_answered():
    state, answer = step(Listening(SOURCE, NONCES[1], SECRET), b"GET / HTTP/1.1".ljust(OPENING_NBYTES))
    assert state.kind == "refused_opening"
    assert answer == b""


def test_a_proof_heard_once_is_of_no_use_under_another_nonce():
    _, _, (opening, _, proof) = talk()
    listening, _ = step(Listening(SOURCE, b"n" * NONCE_NBYTES, SECRET), opening)
    state, _ = step(listening, proof)
    assert state.kind == "refused_proof"


def test_the_acceptors_own_proof_sent_back_to_it_proves_nothing():
    opening = call(TARGET, NONCES[0], SECRET)[1]
    listening, answer = step(Listening(SOURCE, NONCES[1], SECRET), opening)
    state, _ = step(listening, answer[OPENING_NBYTES:])
    assert state.kind == "refused_proof"


def test_a_proof_made_for_one_rank_does_not_fit_another():
    _, opening = call(TARGET, NONCES[0], SECRET)
    _, forged = call(dataclasses.replace(TARGET, rank=4), NONCES[0], SECRET)
    calling, _ = call(TARGET, NONCES[0], SECRET)
    listening, answer = step(Listening(SOURCE, NONCES[1], SECRET), forged)
    _, honest_answer = step(Listening(SOURCE, NONCES[1], SECRET), opening)
    _, proof = step(calling, honest_answer)
    state, _ = step(listening, proof)
    assert len(answer) == ANSWER_NBYTES
    assert state.kind == "refused_proof"


@given(st.integers(0, OPENING_NBYTES + ANSWER_NBYTES + PROOF_NBYTES - 1), st.integers(0, 7))
def test_no_bit_of_the_conversation_can_be_changed_unnoticed(place, bit):
    """Whoever sits between two honest ends and flips one bit leaves at least one of them unconvinced."""
    flips = iter(range(1 << 30))

    def passed_on(data):
        changed = bytearray(data)
        for index in range(len(changed)):
            if next(flips) == place:
                changed[index] ^= 1 << bit
        return bytes(changed)

    calling, opening = call(TARGET, NONCES[0], SECRET)
    listening, answer = step(Listening(SOURCE, NONCES[1], SECRET), passed_on(opening))
    if len(answer) == ANSWER_NBYTES:
        calling, proof = step(calling, passed_on(answer))
        if proof and awaited_nbytes(listening):
            listening, _ = step(listening, passed_on(proof))
    assert not (isinstance(calling, Proved) and isinstance(listening, Proved))


def test_an_end_stays_an_end():
    proved = Proved(TARGET)
    assert step(proved, b"") == (proved, b"")
    assert awaited_nbytes(proved) == awaited_nbytes(Rejected("refused_proof", "no")) == 0


def test_no_state_shows_the_secret_or_the_proof_that_it_waits_for():
    calling, opening = call(TARGET, NONCES[0], SECRET)
    listening = Listening(SOURCE, NONCES[1], SECRET)
    challenging, _ = step(listening, opening)
    for state in (calling, listening, challenging):
        assert repr(SECRET) not in repr(state)
    assert repr(challenging.proof) not in repr(challenging)
