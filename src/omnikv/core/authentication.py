"""How the two ends of a connection prove themselves to each other, before a word of anything else is taken.

Theory of operation. One side calls, the other accepts. Both hold the same secret, which never travels:

    caller                                                   acceptor
    opening: what I claim, my nonce        -->
                                           <--               opening: what I claim, my nonce; my proof
    my proof                               -->

A proof is HMAC-SHA256, under the secret, of the speaker's part ("caller" or "acceptor") and of both openings whole. It
therefore holds for these two nonces, these two identities and this direction only: replayed, sent back, or used for
another rank, it fits nothing. The acceptor proves itself first, so a caller gives nothing away to an impostor.

Every part has one fixed size, so a stranger can make nobody remember more than that, and nothing of what it sends is
decoded before it is proved. Ends that know each other by other means (certificates) may run the same steps without a
secret; each opening states which it is, and the two must agree, so nobody can talk an end out of its secret.

The steps are pure: nonces come in, bytes go out, `step` says what the next bytes from the peer make of a state.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Purpose = Literal["control", "data"]
Part = Literal["caller", "acceptor"]

NONCE_NBYTES = 32
LIFE_NBYTES = 16
EDGE_NBYTES = 16
PROOF_NBYTES = 32
# Shorter ones could be guessed by whoever has heard one proof.
MIN_SECRET_NBYTES = 16
MAX_RANK = 2**32 - 1

_MAGIC = b"OKV1"
_PURPOSES: tuple[Purpose, ...] = ("control", "data")
_SIDES = ("source", "target")
# Magic, with a secret or without, purpose, side, rank, reader, edge, own life, the peer's life, nonce.
_OPENING = struct.Struct(f">4s???II{EDGE_NBYTES}s{LIFE_NBYTES}s{LIFE_NBYTES}s{NONCE_NBYTES}s")
OPENING_NBYTES = _OPENING.size
ANSWER_NBYTES = OPENING_NBYTES + PROOF_NBYTES
NO_LIFE = bytes(LIFE_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who an end says it is, and what the connection is for.

    `life` differs for each life of a process; `peer_life` is the one that the speaker means to reach, `NO_LIFE` where
    any will do. `edge` is a digest of the edge (`digest_edge`).
    """

    purpose: Purpose
    side: str
    rank: int
    reader: int
    edge: bytes
    life: bytes
    peer_life: bytes = NO_LIFE


@dataclass(frozen=True, slots=True)
class Calling:
    """The caller has sent its opening and waits for the acceptor's, with its proof."""

    opening: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Listening:
    """The acceptor waits for a caller's opening; `claim` and `nonce` are what it will answer with."""

    claim: Claim
    nonce: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Challenging:
    """The acceptor has answered and waits for this proof."""

    peer: Claim
    proof: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Proved:
    """The peer is who it claims to be."""

    peer: Claim


@dataclass(frozen=True, slots=True)
class Rejected:
    """The peer is not believed: a kind to count by, and the reason in words."""

    kind: Literal["refused_opening", "refused_proof"]
    reason: str


State: TypeAlias = Calling | Listening | Challenging | Proved | Rejected


def digest_edge(edge: str) -> bytes:
    """The edge's text as a claim carries it."""
    return hashlib.blake2b(edge.encode(), digest_size=EDGE_NBYTES).digest()


def call(claim: Claim, nonce: bytes, secret: bytes) -> tuple[State, bytes]:
    """A caller's first state, and what it sends. An empty `secret` means that none is asked for."""
    opening = _encode(claim, nonce, secret)
    return Calling(opening, secret), opening


def awaited_nbytes(state: State) -> int:
    """How many bytes of the peer `step` takes next; 0 at an end."""
    if isinstance(state, Calling):
        return ANSWER_NBYTES
    if isinstance(state, Listening):
        return OPENING_NBYTES
    return PROOF_NBYTES if isinstance(state, Challenging) else 0


def step(state: State, received: bytes) -> tuple[State, bytes]:
    """The next state, and what to send now, after exactly `awaited_nbytes(state)` bytes came from the peer."""
    if isinstance(state, Listening):
        return _answer(state, received)
    if isinstance(state, Calling):
        return _check_answer(state, received)
    if isinstance(state, Challenging):
        return (Proved(state.peer) if hmac.compare_digest(state.proof, received) else _WRONG_PROOF), b""
    return state, b""


def _answer(state: Listening, opening: bytes) -> tuple[State, bytes]:
    peer = _decode(opening)
    if peer is None:
        return Rejected("refused_opening", _NO_OPENING), b""
    # What the connection is for is the caller's choice, and both prove it.
    claim = replace(state.claim, purpose=peer.purpose)
    answer = _encode(claim, state.nonce, state.secret)
    problem = _problem_with(opening, peer, claim, state.secret)
    if problem is not None:
        # Answered all the same, so that the caller too can see and say what does not fit.
        return Rejected("refused_opening", problem), answer + bytes(PROOF_NBYTES)
    expected = _prove(state.secret, "caller", opening, answer)
    return Challenging(peer, expected), answer + _prove(state.secret, "acceptor", opening, answer)


def _check_answer(state: Calling, received: bytes) -> tuple[State, bytes]:
    answer, proof = received[:OPENING_NBYTES], received[OPENING_NBYTES:]
    peer, own = _decode(answer), _decode(state.opening)
    if peer is None or own is None:
        return Rejected("refused_opening", _NO_OPENING), b""
    problem = _problem_with(answer, peer, own, state.secret)
    if problem is not None:
        return Rejected("refused_opening", problem), b""
    if not hmac.compare_digest(proof, _prove(state.secret, "acceptor", state.opening, answer)):
        return _WRONG_PROOF, b""
    return Proved(peer), _prove(state.secret, "caller", state.opening, answer)


_NO_OPENING = "what it said is no greeting of this transport (of this version)"
_WRONG_PROOF = Rejected("refused_proof", "it does not know the secret: both ends must be given the same one")


def _problem_with(opening: bytes, peer: Claim, own: Claim, secret: bytes) -> str | None:
    """Why the peer's opening is not taken, in words, or None."""
    if _is_secret(opening) != bool(secret):
        here, there = ("a secret", "none") if secret else ("no secret", "one")
        return f"this end is set up with {here}, the other with {there}: give both the same secret, or neither"
    if peer.purpose != own.purpose:
        return f"it answers for a {peer.purpose} connection, this one is for {own.purpose}"
    if peer.peer_life not in (NO_LIFE, own.life):
        return "it means an earlier life of this end, which was restarted"
    if own.peer_life not in (NO_LIFE, peer.life):
        return "peer restarted: the process that was meant is gone, and another serves its address"
    return None


def _prove(secret: bytes, part: Part, caller_opening: bytes, acceptor_opening: bytes) -> bytes:
    return hmac.digest(secret, b"/".join((_MAGIC, part.encode(), caller_opening + acceptor_opening)), hashlib.sha256)


def _encode(claim: Claim, nonce: bytes, secret: bytes) -> bytes:
    return _OPENING.pack(
        _MAGIC,
        bool(secret),
        claim.purpose == "data",
        claim.side == "target",
        claim.rank,
        claim.reader,
        claim.edge,
        claim.life,
        claim.peer_life,
        nonce,
    )


def _is_secret(opening: bytes) -> bool:
    return bool(_OPENING.unpack(opening)[1])


def _decode(opening: bytes) -> Claim | None:
    magic, _, is_data, is_target, rank, reader, edge, life, peer_life, _ = _OPENING.unpack(opening)
    if magic != _MAGIC:
        return None
    return Claim(
        purpose=_PURPOSES[is_data],
        side=_SIDES[is_target],
        rank=rank,
        reader=reader,
        edge=edge,
        life=life,
        peer_life=peer_life,
    )
