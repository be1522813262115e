"""What two peers must agree on before a payload moves between them, checked alike by every transport."""

from __future__ import annotations

from collections.abc import Mapping

from omnikv.core.handshake import is_of_model, model_differences
from omnikv.core.keys import PayloadId
from omnikv.core.messages import Hello
from omnikv.errors import Aborted, ConfigError, ConnectError, ProducerFailed
from omnikv.transports.base import Endpoint, PutRequest, Seat, Side

# How long after its death a source may take to come back before nobody waits for it any more.
RETURN_S = 0.5


def fact_differences(side: str, here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One sentence for each fact that keeps the two apart; `side` is ours.

    What they state of their models may differ where KV is converted (`core.handshake`); all else must be equal.
    """
    unequal = [
        f"{name}: here {here.get(name, 'not stated')}, there {there.get(name, 'not stated')}"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name) and not is_of_model(name)
    ]
    return unequal + model_differences(side, here, there)


def hello_mismatch(endpoint: Endpoint, own: Hello, peer: Hello) -> str | None:
    """Why the two may not deal with each other, each difference in words, or None when they may."""
    fields = ("version", "namespace", "from_stage", "to_stage", "replica")
    here = {field.replace("_", " "): str(getattr(own, field)) for field in fields}
    there = {field.replace("_", " "): str(getattr(peer, field)) for field in fields}
    differences = fact_differences(own.side, here, there)
    wanted = "target" if own.side == "source" else "source"
    if peer.side != wanted:
        differences.append(f"side: here {own.side} waits for a {wanted}, there {peer.side}")
    elif not endpoint.deals_with(Seat(peer.rank, peer.reader)):
        differences.append(stranger_at(endpoint, Seat(peer.rank, peer.reader)))
    differences += fact_differences(own.side, own.facts, peer.facts)
    return "; ".join(differences) or None


def stranger_at(endpoint: Endpoint, seat: Seat) -> str:
    """The sentence that refuses a peer at a seat that `endpoint` does not deal with."""
    return f"peer ranks: {endpoint.side} rank {endpoint.rank} deals with {list(endpoint.peer_ranks)}, not with {seat}"


def describe(endpoint: Endpoint) -> str:
    """The endpoint in words, for messages: its side, rank and edge."""
    return f"{endpoint.side} {endpoint.seat} of edge {endpoint.edge.encode()}"


def require_size(transport: str, name: str, nbytes: object, *, at_least: int) -> None:
    """Nothing, when the option `name` is a whole number of bytes, `at_least` so many.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < at_least:
        raise ConfigError(f"{transport}: {name} must be a whole number of bytes, at least {at_least}, got {nbytes!r}")


def require_put(transport: str, endpoint: Endpoint, wanted: PutRequest) -> None:
    """Nothing, when `endpoint` may put what is wanted.

    Raises:
        ConfigError: the payload is not this source's, its size is none, or its target rank has not so many readers.
    """
    require_payload(transport, endpoint, wanted.payload, "source")
    require_size(transport, "a payload's size", wanted.nbytes, at_least=0)
    readers, most = wanted.num_readers, endpoint.num_readers
    if readers is not None and not (isinstance(readers, int) and 1 <= readers <= most):
        raise ConfigError(f"{transport}: num_readers must be 1 to {most} at {describe(endpoint)}, got {readers!r}")


def require_payload(transport: str, endpoint: Endpoint, payload: PayloadId, side: Side) -> None:
    """Nothing, when `endpoint` is the `side` end of `payload`.

    Raises:
        ConfigError: it is the other side, or the payload belongs to another edge or rank, or to a peer that this
            endpoint does not deal with.
    """
    own, peer = payload.source_rank, payload.target_rank
    if side == "target":
        own, peer = peer, own
    if endpoint.side != side:
        verb = "reserve, fail and abort" if side == "source" else "get and announce"
        raise ConfigError(f"{transport}: only a {side} may {verb}, this is {describe(endpoint)}")
    if payload.edge != endpoint.edge or own != endpoint.rank:
        raise ConfigError(f"{transport}: payload {payload.encode()} is not one of {describe(endpoint)}")
    if peer not in endpoint.peer_ranks:
        raise ConfigError(
            f"{transport}: payload {payload.encode()} names peer rank {peer}, but {describe(endpoint)} deals with "
            f"{list(endpoint.peer_ranks)}; check the route"
        )


def lost_source(transport: str, source: str, payload: PayloadId) -> ProducerFailed:
    """The error for one who waits for `payload` when its source is lost, which `source` names in words."""
    return _will_not_come(f"{transport}: {source} closed its connection before {payload.encode()} came", payload)


def dead_source(transport: str, source: str, payload: PayloadId, *, since_s: float) -> ProducerFailed:
    """The error for one who asks for `payload` so long after its source was lost."""
    return _will_not_come(
        f"{transport}: {source} closed its connection {since_s:.1f} s ago and has not come back, so {payload.encode()} "
        "will not come",
        payload,
    )


def _will_not_come(words: str, payload: PayloadId) -> ProducerFailed:
    return ProducerFailed(words, request_id=payload.transfer_id, key=payload.encode(), rank=payload.source_rank)


def misfit(transport: str, pair: str, difference: str, payload: PayloadId) -> ConnectError:
    """The error for one who asks for `payload` of a source that does not fit; `pair` names both ends."""
    return ConnectError(
        f"{transport}: {pair} do not fit: {difference}",
        transport=transport,
        request_id=payload.transfer_id,
        key=payload.encode(),
        rank=payload.source_rank,
    )


def withdrawn(transport: str, payload: PayloadId) -> Aborted:
    """The error for one who waits for `payload` when this receiver itself does not want it any more."""
    return Aborted(
        f"{transport}: {payload.encode()} was withdrawn by this receiver while it waited",
        request_id=payload.transfer_id,
        key=payload.encode(),
        rank=payload.target_rank,
    )
