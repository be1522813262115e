"""Messages between peers, as msgspec structs: what goes over a control channel and nothing else.

Every struct is frozen and refuses unknown fields of the wrong type when decoded; none can carry code. The messages of
a pair of transports are tagged arrays on the wire, one a packet: the first element names the message, fields follow in
their order, and a later version may only append fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from omnikv.errors import RemoteProtocolError

# Said in every Hello; peers of different versions refuse each other.
PROTOCOL_VERSION = 3
# The longest packet of the control channel; longer ones are refused unread.
MAX_MESSAGE_NBYTES = 65536
# The longest head of a payload that is told ahead of it.
MAX_FORMING_HEAD_NBYTES = 49152
# The longest cause or reason that is sent; longer ones are cut.
MAX_REASON_CHARS = 4096


def spell_reason(why: object) -> str:
    """`why` as a cause or reason that can be sent: not longer than allowed, and with a UTF-8 form.

    The text of an error may have none: a file name that is not UTF-8 reaches Python as lone surrogates.
    """
    return str(why).encode("utf-8", "backslashreplace").decode("utf-8")[:MAX_REASON_CHARS]


Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


class QueryRequest(msgspec.Struct, frozen=True):
    """Asks a sender what it holds under a published key; a map on the wire, as released engines send it."""

    request_id: str


class QueryResponse(msgspec.Struct, frozen=True):
    """What a sender holds under a key: its size in bytes, and whether it is a raw payload (`is_fast_path`)."""

    request_id: str
    data_size: int
    is_fast_path: bool


# Said instead of a QueryResponse when the sender holds nothing under the key.
INFO_NOT_FOUND = b"info_not_found"
# Opens a QueryRequest, so that a listener can tell it from a pull request (vllm-omni's mooncake connector).
QUERY_INFO = b"query_info"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Opens a connection, from both sides: who speaks, and what it holds for true of the pair.

    `incarnation` differs for each life of a rank, so that a restarted peer is told from its earlier self. A target says
    which of its rank's readers it is.
    """

    version: Count
    namespace: Name
    from_stage: Name
    to_stage: Name
    replica: Count
    side: Annotated[str, msgspec.Meta(max_length=16)]
    rank: Count
    pid: Count
    incarnation: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    facts: dict[str, str]
    reader: Count = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The speaker will not deal with this peer, in plain words."""

    reason: Reason


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """A target asks for a payload; edge and ranks follow from the connection.

    A `patient` ask is remembered until it is answered or taken back, any other is answered at once; one that is
    `curious` would also hear what is there instead.
    """

    ask: Count
    transfer_id: Name
    role: Name
    attempt: Count
    patient: bool
    curious: bool = False


class Unwant(msgspec.Struct, frozen=True, array_like=True, tag="unwant"):
    """A target takes an ask back; an answer that crosses this is given back by its receiver."""

    ask: Count


class Interest(msgspec.Struct, frozen=True, array_like=True, tag="interest"):
    """A target says that it will come for a payload, or takes that back; edge and ranks follow from the connection.

    The payload does not expire meanwhile. Interest also ends when the target acknowledges the payload, with the
    payload's end, and with the connection.
    """

    transfer_id: Name
    role: Name
    attempt: Count
    is_given: bool


class Segment(msgspec.Struct, frozen=True, array_like=True, tag="segment"):
    """A source shares a stretch of memory of `nbytes`; its descriptor travels with this message."""

    segment: Count
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class Retired(msgspec.Struct, frozen=True, array_like=True, tag="retired"):
    """A source will not use a segment again; its number is never given to another."""

    segment: Count


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Answers an ask where memory is shared: the payload lies there, leased to the asker as `lease`."""

    ask: Count
    lease: Count
    segment: Count
    offset: Count
    nbytes: Count


class Soon(msgspec.Struct, frozen=True, array_like=True, tag="soon"):
    """Where memory is shared: what an ask waits for is being written where the latest payload lay. No answer.

    A hint to be awake when it comes.
    """

    ask: Count


class Forming(msgspec.Struct, frozen=True, array_like=True, tag="forming"):
    """Where memory is shared: what an ask waits for is being written there, and will begin with `head`.

    No answer, and no promise that there will be a good one: it tells what to prepare for, should Ready come.
    """

    ask: Count
    segment: Count
    offset: Count
    nbytes: Count
    head: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_FORMING_HEAD_NBYTES)]


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """Answers an ask: there is nothing for the asker, since that generation of the payload ended like this."""

    ask: Count
    how: Literal["released", "expired", "failed", "aborted"]
    generation: Count
    cause: Reason


class Absent(msgspec.Struct, frozen=True, array_like=True, tag="absent"):
    """Answers an ask that is not patient: the payload is not there yet.

    `others` are transfer ids that lie ready for the asker, most alike first: two sides may call one request two names.
    """

    ask: Count
    others: tuple[Name, ...] = ()


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """A target used what it leased; the source may reuse the room."""

    lease: Count


class Return(msgspec.Struct, frozen=True, array_like=True, tag="return"):
    """A target gives a lease back unread; the payload is as ready as before."""

    lease: Count


# What a target may say over any transport, what a source may say, and what a source may say where memory is shared.
ToSource = Hello | Refused | Want | Unwant | Interest | Ack | Return
ToTarget = Hello | Refused | Over | Absent
ToTargetShared = ToTarget | Segment | Retired | Soon | Forming | Ready


# The vote of a group: what goes over its exchange or its channel. `omnikv.core.verdict` gives it meaning.

Standing = Literal["have", "missing", "failed"]


class RoleBallot(msgspec.Struct, frozen=True, array_like=True):
    """A rank's word on one role of a request: it has it, it is still missing, or it failed and why.

    `facts` must be equal on every rank for the role to be used together; `spell_facts` makes them.
    """

    role: Name
    standing: Standing
    required: bool
    cause: Reason = ""
    facts: str = ""


def spell_facts(facts: Mapping[str, str]) -> str:
    """Texts by name as a ballot's facts: one text, equal to another if and only if all names and texts are.

    They are known when a receive ends and compared when the group votes, so they are spelled once and travel as they
    are: nested pairs would have to be walked through by each vote. All of it is ASCII, so any text can be sent.
    """
    return json.dumps(facts, sort_keys=True, separators=(",", ":")) if facts else ""


_facts_decoder = msgspec.json.Decoder(dict[str, str])


def read_facts(facts: str) -> dict[str, str]:
    """The texts by name that were spelled as `facts`; what cannot be read is one text, named "facts"."""
    try:
        return _facts_decoder.decode(facts) if facts else {}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {"facts": facts}


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """A rank's vote on one request in one round: its roles, sorted by name, and whether it has time for one more."""

    round: Count
    can_refetch: bool
    roles: tuple[RoleBallot, ...]


class Ruling(msgspec.Struct, frozen=True, array_like=True):
    """What every rank does with a request: keep the `usable` roles, fetch what is `missing` again, or drop it all.

    `missing` are (rank, role) pairs, `causes` are (rank, role, words), both sorted; a cause that is about a rank as a
    whole has an empty role. With "keep", causes say why a role that is not usable was left out.
    """

    kind: Literal["keep", "refetch", "drop"]
    round: Count
    usable: tuple[str, ...] = ()
    missing: tuple[tuple[int, str], ...] = ()
    causes: tuple[tuple[int, str, str], ...] = ()


class Vote(msgspec.Struct, frozen=True, array_like=True, tag="vote"):
    """A ballot on the request `key`, as it travels through a group's exchange. `facts` must be equal on every rank."""

    key: str
    facts: str
    ballot: Ballot


_vote_encoder = msgspec.msgpack.Encoder()
_vote_decoder = msgspec.msgpack.Decoder(Vote)


def encode_vote(key: str, facts: str, ballot: Ballot) -> bytes:
    """The vote as bytes."""
    return _vote_encoder.encode(Vote(key, facts, ballot))


def decode_vote(data: bytes) -> Vote:
    """The vote that `encode_vote` gave as `data`.

    Raises:
        RemoteProtocolError: it is none.
    """
    try:
        return _vote_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a peer's vote cannot be read: {error}") from error


# The channel of a group: the vote over connections of its own. `omnikv.groups.channel` is its theory of operation.

CHANNEL_VERSION = 2
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class ChannelCard(msgspec.Struct, frozen=True, array_like=True, tag="card"):
    """What a rank shows its group before a channel is formed: where it runs and what must be equal everywhere.

    Ranks of equal `host` share a clock and a loopback; those of equal `user` too may speak over a Unix socket.
    """

    version: Count
    host: str
    user: str
    facts: dict[str, str]


class ChannelInvitation(msgspec.Struct, frozen=True, array_like=True, tag="invitation"):
    """Where rank 0 listens and the secret that proves membership; or why it cannot (`refused`)."""

    token: bytes = b""
    unix_name: bytes = b""
    tcp_host: str = ""
    tcp_port: Count = 0
    refused: str = ""


class ChannelGreeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """Opens a connection to rank 0: who calls, and what rank 0 must prove itself on."""

    rank: Count
    nonce: Nonce


class ChannelChallenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """Rank 0's proof that it knows the token, and what the caller must prove itself on."""

    nonce: Nonce
    proof: Nonce


class ChannelProof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """The caller's proof that it knows the token."""

    proof: Nonce


class ChannelWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Every rank has proved itself: the channel is formed."""


class Votes(msgspec.Struct, frozen=True, array_like=True, tag="votes"):
    """A follower's ballots on one or many requests, as (key, Ballot) pairs.

    `due_s` is when this rank stops waiting, on the clock that it shares with rank 0; infinite if they share none. It
    always takes nine bytes, so all before the ballots has one length, and equal bytes after it are equal ballots.
    """

    due_s: float
    votes: Sequence[tuple[Name, Ballot]]


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """Every rank cast exactly the ballots that this follower cast together, on `key` first; all are kept as voted."""

    key: Name


class Rulings(msgspec.Struct, frozen=True, array_like=True, tag="rulings"):
    """What rank 0 ruled on these requests: (key, Ruling) pairs, in the order in which they were made."""

    rulings: tuple[tuple[Name, Ruling], ...]
