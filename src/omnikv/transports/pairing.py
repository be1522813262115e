"""What two peers must agree on before a payload moves between them, checked alike by every transport."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from omnikv.core.keys import PayloadId
from omnikv.core.messages import Hello
from omnikv.errors import ConfigError
from omnikv.transports.base import Endpoint, Side


def fact_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One sentence for each fact that the two sides state differently, in the order of their names."""
    return [
        f"{name}: here {here.get(name, 'not stated')}, there {there.get(name, 'not stated')}"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def hello_mismatch(own: Hello, peer: Hello, peer_ranks: Collection[int]) -> str | None:
    """Why the two may not deal with each other, each difference in words, or None when they may."""
    fields = ("version", "namespace", "from_stage", "to_stage", "replica", "num_readers")
    here = {field.replace("_", " "): str(getattr(own, field)) for field in fields}
    there = {field.replace("_", " "): str(getattr(peer, field)) for field in fields}
    differences = fact_differences(here, there)
    wanted = "target" if own.side == "source" else "source"
    if peer.side != wanted:
        differences.append(f"side: here {own.side} waits for a {wanted}, there {peer.side}")
    elif peer.rank not in peer_ranks:
        known = sorted(peer_ranks)
        differences.append(f"peer ranks: {own.side} rank {own.rank} deals with {known}, not with rank {peer.rank}")
    elif peer.reader >= (own.num_readers if own.side == "source" else 1):
        differences.append(f"readers: {peer.side} rank {peer.rank} has no reader {peer.reader}")
    differences += fact_differences(own.facts, peer.facts)
    return "; ".join(differences) or None


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
        verb = "reserve and fail" if side == "source" else "get"
        raise ConfigError(f"{transport}: only a {side} may {verb}, this is {describe(endpoint)}")
    if payload.edge != endpoint.edge or own != endpoint.rank:
        raise ConfigError(f"{transport}: payload {payload.encode()} is not one of {describe(endpoint)}")
    if peer not in endpoint.peer_ranks:
        raise ConfigError(
            f"{transport}: payload {payload.encode()} names peer rank {peer}, but {describe(endpoint)} deals with "
            f"{list(endpoint.peer_ranks)}; check the route"
        )
