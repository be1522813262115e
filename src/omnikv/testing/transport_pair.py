"""What a transport check works on: a way to open the ends of one edge, and the small moves that all checks share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from omnikv.core.keys import PRIMARY_ROLE, Edge, PayloadId
from omnikv.errors import OmniKVError
from omnikv.transports.base import DEFAULT_PAYLOAD_TTL_S, Endpoint, Lease, Transport
from omnikv.transports.registry import open_transport


class TransportPair(Protocol):
    """Opens the ends of one edge that nobody else uses. A check closes what it opened."""

    @property
    def edge(self) -> Edge:
        """The edge of every end opened here."""

    @property
    def pool_nbytes(self) -> int:
        """How many payload bytes a source opened here can hold at once, at least 1 MiB; its real bound, not less."""

    @property
    def patience_s(self) -> float:
        """How long a check waits for what must come before it calls it missing, in seconds."""

    def open_source(
        self,
        rank: int,
        targets: tuple[int, ...],
        facts: Mapping[str, str],
        *,
        num_readers: int = 1,
        payload_ttl_s: float = DEFAULT_PAYLOAD_TTL_S,
    ) -> Transport:
        """The sending end of `rank`, which deals with target ranks `targets`, of `num_readers` processes each."""

    def open_target(
        self, rank: int, sources: tuple[int, ...], facts: Mapping[str, str], *, reader: int = 0
    ) -> Transport:
        """The receiving end of one reader of `rank`, which deals with source ranks `sources`."""


def _fresh_edge() -> Edge:
    return Edge(from_stage="prefill", to_stage="decode", namespace=f"conformance-{secrets.token_hex(8)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPair:
    """A `TransportPair` of a registered transport, which must take the option `pool_nbytes`; on an edge of its own."""

    transport: str
    options: Mapping[str, Any] = field(default_factory=dict)
    pool_nbytes: int = 4 << 20
    patience_s: float = 30.0
    edge: Edge = field(default_factory=_fresh_edge)

    def open_source(
        self,
        rank: int,
        targets: tuple[int, ...],
        facts: Mapping[str, str],
        *,
        num_readers: int = 1,
        payload_ttl_s: float = DEFAULT_PAYLOAD_TTL_S,
    ) -> Transport:
        """The sending end of `rank`, with a pool of `pool_nbytes`."""
        endpoint = Endpoint(
            edge=self.edge,
            side="source",
            rank=rank,
            peer_ranks=targets,
            facts=facts,
            num_readers=num_readers,
            payload_ttl_s=payload_ttl_s,
        )
        wanted = {"pool_nbytes": self.pool_nbytes, **self.options, **self.source_options(rank)}
        return open_transport(self.transport, endpoint, wanted)

    def open_target(
        self, rank: int, sources: tuple[int, ...], facts: Mapping[str, str], *, reader: int = 0
    ) -> Transport:
        """The receiving end of one reader of `rank`."""
        endpoint = Endpoint(edge=self.edge, side="target", rank=rank, peer_ranks=sources, facts=facts, reader=reader)
        return open_transport(self.transport, endpoint, {**self.options, **self.target_options(sources)})

    def source_options(self, rank: int) -> Mapping[str, Any]:
        """Options of one source alone, for transports whose ends cannot compute where the others are."""
        return {}

    def target_options(self, sources: tuple[int, ...]) -> Mapping[str, Any]:
        """Options of a target that deals with these sources alone."""
        return {}


def implements(transport: Transport, call: str) -> bool:
    """Whether the transport does more than the default for a call that it may leave out."""
    return getattr(type(transport), call) is not getattr(Transport, call)


def require(condition: bool, sentence: str) -> None:
    """Nothing, when `condition` holds; a plain `assert` would vanish under `python -O`.

    Raises:
        AssertionError: it does not; the text is `sentence`.
    """
    if not condition:
        raise AssertionError(sentence)


def raised_by(kind: type[OmniKVError], call: Callable[[], object], what: str) -> OmniKVError:
    """The error of `kind` that `call` raises.

    Raises:
        AssertionError: it raises another error or none.
    """
    try:
        result = call()
    except kind as error:
        return error
    except OmniKVError as error:
        raise AssertionError(f"{what} must raise {kind.__name__}, it raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what} must raise {kind.__name__}, it returned {result!r}")


def payload_of(
    pair: TransportPair, transfer_id: str, *, source: int = 0, target: int = 0, role: str = PRIMARY_ROLE
) -> PayloadId:
    """An identity on the pair's edge."""
    return PayloadId(edge=pair.edge, transfer_id=transfer_id, source_rank=source, target_rank=target, role=role)


def pattern(payload: PayloadId, nbytes: int) -> bytes:
    """Bytes that no other identity has: its text over and over."""
    text = payload.encode().encode() + b"|"
    return (text * (nbytes // len(text) + 1))[:nbytes]


def put(source: Transport, payload: PayloadId, data: bytes) -> None:
    """Nothing; reserves, writes and publishes."""
    with source.reserve(payload, len(data)) as slot:
        require(len(slot.buffer) == len(data), f"a slot of {len(data)} bytes must have exactly that many")
        slot.buffer[:] = data
        slot.publish()


def lease(pair: TransportPair, target: Transport, payload: PayloadId) -> Lease:
    """A lease on a payload that is or will be there.

    Raises:
        AssertionError: it did not come within the pair's patience.
    """
    found = target.get(payload, deadline=time.monotonic() + pair.patience_s)
    if found is None:
        raise AssertionError(f"{payload.encode()} was published, but get did not find it in {pair.patience_s} s")
    return found


def take(pair: TransportPair, target: Transport, payload: PayloadId) -> bytes:
    """A payload's bytes, copied out and acknowledged."""
    with lease(pair, target, payload) as found:
        data = bytes(found.buffer)
        found.acknowledge()
    return data


def drained(pair: TransportPair, source: Transport) -> int:
    """How many payloads the source still holds once it had time to hear of every acknowledgement."""
    return source.drain(deadline=time.monotonic() + pair.patience_s)
