"""The native API: `KVSender` and `KVReceiver`, one a rank on either end of a route.

sender rank:    layers --route--> one payload a target rank, written straight into the transport's memory
receiver rank:  payloads --lease, check, put together--> ReceivedKV --close--> the senders reuse their memory
group:          every rank's ballot --verdict--> all keep, or all drop and take the same other way
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from omnikv.config import HandoffConfig
from omnikv.core.handshake import ModelFacts
from omnikv.core.keys import PRIMARY_ROLE, PayloadId
from omnikv.core.reshard import Piece, Route
from omnikv.errors import ConfigError
from omnikv.groups.base import Agreement, Group
from omnikv.groups.exchange import ExchangeAgreement
from omnikv.handoff.agree import Outcome, Schedule, receive_and_vote
from omnikv.handoff.cut import Layers, own_layers
from omnikv.handoff.forecast import Forecast
from omnikv.handoff.receive import RoleFetch, discard_payloads, gather
from omnikv.handoff.received import ReceivedKV
from omnikv.handoff.send import SendReport, SentPiece, fail_all, plan_piece, publish_all
from omnikv.tensors.convert import dtype_named
from omnikv.transports.base import Endpoint, Side, Transport
from omnikv.transports.registry import open_transport

__all__ = ["KVReceiver", "KVSender", "Outcome", "ReceivedKV", "SendReport"]

logger = logging.getLogger("omnikv.handoff")

# What an infinite timeout means: longer than any process lives, and short enough for every clock, lock and backend.
FOREVER_S = 1e9


class _RouteEnd:
    """What both ends share: this rank's pieces of the route, and the transport that serves them."""

    def __init__(
        self,
        route: Route,
        side: Side,
        rank: int,
        pieces: tuple[Piece, ...],
        config: HandoffConfig,
        model: ModelFacts | None,
        *,
        reader: int = 0,
        readers: int = 1,
    ) -> None:
        self.route = route
        self.rank = rank
        self.config = config
        self._pieces = pieces
        peers = {piece.target_rank if side == "source" else piece.source_rank for piece in pieces}
        facts = route.facts() | ({} if model is None else model.texts())
        endpoint = Endpoint(
            edge=route.edge,
            side=side,
            rank=rank,
            peer_ranks=tuple(sorted(peers)),
            facts=facts,
            reader=reader,
            num_readers=readers,
            payload_ttl_s=config.payload_ttl_s,
        )
        self._transport: Transport = open_transport(config.transport, endpoint, config.options)

    def _identities(self, request_id: str, role: str, attempt: int) -> list[tuple[PayloadId, Piece]]:
        return [
            (
                PayloadId(
                    edge=self.route.edge,
                    transfer_id=request_id,
                    role=role,
                    attempt=attempt,
                    source_rank=piece.source_rank,
                    target_rank=piece.target_rank,
                ),
                piece,
            )
            for piece in self._pieces
        ]

    def _payloads(self, request_id: str, role: str, attempt: int) -> list[PayloadId]:
        return [identity for identity, _ in self._identities(request_id, role, attempt)]

    def close(self) -> None:
        """Stop, and free what this end holds; idempotent."""
        self._transport.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class KVSender(_RouteEnd):
    """One rank's sending end. Thread-safe; close it when the receivers are done (`drain` waits for them)."""

    def __init__(
        self,
        route: Route,
        rank: int,
        *,
        transport: str | None = None,
        options: Mapping[str, Any] | None = None,
        checksum: bool | None = None,
        dtype: torch.dtype | None = None,
        model: ModelFacts | None = None,
        readers: int = 1,
        payload_ttl_s: float | None = None,
        config: HandoffConfig | None = None,
    ) -> None:
        """`rank` is this process's rank in the sending stage; keywords override `config`.

        Each target rank is served by `readers` processes, which all get every payload; its memory is reused when the
        last of them has used it. What no receiver is interested in for `payload_ttl_s` expires: interested is one that
        waits, holds a payload, or has announced that it will come.

        Floats are sent in `dtype` (narrower ones are fewer bytes), which `model` states where it is given; None sends
        them as they are. What both sides state of their models is compared when two ranks meet (`core.handshake`); both
        sides state one, or neither does.

        Raises:
            ConfigError: unknown transport or options, or `model` states another dtype than `dtype`; TopologyError:
                `rank` is not in the route.
            TransportUnavailable: the transport cannot start here.
        """
        resolved = (config or HandoffConfig()).with_overrides(
            transport=transport, options=options, checksum=checksum, payload_ttl_s=payload_ttl_s
        )
        self._dtype = _sent_dtype(dtype, model)
        super().__init__(route, "source", rank, route.pieces_from(rank), resolved, model, readers=readers)
        carried, transport_here = resolved.checksum, self._transport
        is_default = not transport_here.capabilities.shared_memory and not transport_here.lends
        self._checksum = is_default if carried is None else carried

    def send(
        self,
        request_id: str,
        layers: Layers,
        *,
        metadata: Mapping[str, Any] | None = None,
        role: str = PRIMARY_ROLE,
        attempt: int = 0,
        num_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> SendReport:
        """What was published, once every target rank's payload is readable; `layers` may be reused at once.

        Not so where the transport was opened with the option `lend`: there the blocks of a `PagedKV` are read where
        they lie, and must stay as they are until `wait_until_free` says that nobody reads them.

        `layers` holds one (key, value) pair a layer, each `[tokens, kv_heads, head_dim]` with this rank's heads in the
        route's order, or is a `PagedKV`. On a route with boxes, those are this rank's layers, ascending, and the
        tokens of its share; `num_tokens` is then the whole request's. A latent or a state is a pair
        with None for its value. `metadata` is JSON and must be the same on every sender rank. While the transport is
        full, this waits for `timeout_s` (None: the configured time, usually 0), first come first served.

        Raises:
            ConfigError: the request id, the layers, the metadata or `timeout_s` do not fit; nothing was sent.
            PutRejected: no room in the transport by then (`retryable`), never enough (the receivers were told), or this
                request, role and attempt is already live.
            HandoffError: the tensors could not be copied; the receivers were told.
            LocalProtocolError: `fail` or `abort` was called for the request meanwhile; the receivers were told.
            TransportError: the transport failed.
        """
        started = time.monotonic()
        wait_s = self.config.admission_timeout_s if timeout_s is None else seconds(timeout_s)
        identities = self._identities(request_id, role, attempt)
        own = own_layers(layers, self.route.source_boxes[self.rank], num_tokens)
        if self._dtype is not None:
            own = replace(own, dtype=self._dtype)
        plain = self.route.is_plain
        plans = [
            (identity, plan_piece(identity, piece, own, plain=plain, metadata=metadata, checksum=self._checksum))
            for identity, piece in identities
        ]
        publish_all(self._transport, plans, deadline=started + wait_s, pack_threads=self.config.pack_threads)
        report = SendReport(
            request_id=request_id,
            pieces=tuple(
                SentPiece(target_rank=piece.target_rank, heads=piece.heads, nbytes=plan.nbytes)
                for piece, (_, plan) in zip(self._pieces, plans, strict=True)
            ),
            send_s=time.monotonic() - started,
        )
        logger.debug("sent %r: %d bytes to %d ranks", request_id, report.nbytes, len(report.pieces))
        return report

    def fail(self, request_id: str, cause: str, *, role: str = PRIMARY_ROLE, attempt: int = 0) -> None:
        """Tell every receiver of this rank that the request will not come, and why, so that none waits for it."""
        fail_all(self._transport, self._payloads(request_id, role, attempt), cause)

    def abort(
        self, request_id: str, cause: str = "its sender aborted it", *, role: str = PRIMARY_ROLE, attempt: int = 0
    ) -> None:
        """Free what this rank holds of the request, at once or when its reader is done: nobody needs it any more.

        Receivers that wait, or ask later, are told. Idempotent, in any order with sending and acknowledging.
        """
        for payload in self._payloads(request_id, role, attempt):
            self._transport.abort(payload, cause)

    def census(self) -> dict[str, int]:
        """How many payloads stand where at this rank, and how many lives have ended in which way since it opened."""
        return self._transport.census()

    def drain(self, *, timeout_s: float) -> int:
        """How many payloads that were sent have not ended or are still read, once none is, or `timeout_s` has passed.

        Raises:
            ConfigError: `timeout_s` is no number of seconds.
        """
        return self._transport.drain(deadline=time.monotonic() + seconds(timeout_s))

    def wait_until_free(self, request_id: str, *, role: str = PRIMARY_ROLE, attempt: int = 0, timeout_s: float) -> bool:
        """Whether nothing reads the request's memory any more, once that is so or `timeout_s` has passed; 0 only asks.

        Its payloads have ended (closed by every reader, expired, failed or aborted), and no read of them is under way:
        where the transport lends, the blocks may be written again. True for a request that was never sent.

        Raises:
            ConfigError: the request id, role, attempt or `timeout_s` is none.
        """
        payloads = self._payloads(request_id, role, attempt)
        return self._transport.wait_until_free(payloads, deadline=time.monotonic() + seconds(timeout_s))

    def __enter__(self) -> KVSender:
        return self


class KVReceiver(_RouteEnd):
    """One rank's receiving end. Receives of different requests may run in several threads."""

    def __init__(
        self,
        route: Route,
        rank: int,
        *,
        transport: str | None = None,
        options: Mapping[str, Any] | None = None,
        group: Group | Agreement | None = None,
        model: ModelFacts | None = None,
        reader: int = 0,
        config: HandoffConfig | None = None,
    ) -> None:
        """`rank` is this process's rank in the receiving stage; `group` the ranks it acts in lockstep with.

        `reader` tells the processes apart that serve one rank, where the senders state several `readers`.

        The ranks of a group must be configured alike; a difference is reported by the first vote. `model` is what this
        side states of its model and caches, as at `KVSender`; what differs and converts, such as the block size or the
        dtype, is converted by whoever writes the layers (`scatter_into_blocks`, `ReceivedKV.detach`).

        Raises:
            ConfigError: unknown transport or options; TopologyError: `rank` is not in the route.
            TransportUnavailable: the transport cannot start here.
        """
        resolved = (config or HandoffConfig()).with_overrides(transport=transport, options=options)
        self._forecast = Forecast()
        # Before the transport opens, so that a group that is none leaves nothing behind.
        self._agreement = None if group is None else _as_agreement(group, resolved)
        super().__init__(route, "target", rank, route.pieces_to(rank), resolved, model, reader=reader)

    def join(self, group: Group | Agreement) -> None:
        """Nothing; from now on this receiver votes in `group`, for stages whose groups form after their transports.

        Raises:
            ConfigError: `group` is no group.
        """
        self._agreement = _as_agreement(group, self.config)

    def receive(
        self, request_id: str, *, timeout_s: float | None = None, role: str = PRIMARY_ROLE, attempt: int = 0
    ) -> ReceivedKV:
        """This rank's KV of the request. Close what comes back: that is what lets the senders reuse their memory.

        For a rank that acts alone. Ranks in lockstep call `receive_together`, or one may keep what another lacks.

        Raises:
            ConfigError: the request id, role, attempt or timeout is none.
            ReceiveTimeout: a part is still absent after `timeout_s`; nothing was consumed, a retry finds the others.
                It names what lies ready for this rank under other ids.
            Aborted: the sender aborted the request, or `cancel` was called here.
            Expired: it was not asked for within its time to live.
            AlreadyConsumed: this rank, or this reader of it, has used it.
            ProducerFailed: a sender failed, or died; known at once.
            WireError, RemoteProtocolError: what came is damaged or does not belong together.
            ConnectError: a sender states another route.
            TransportError: the transport failed.
        """
        wait_s = self.config.receive_timeout_s if timeout_s is None else seconds(timeout_s)
        with self._role_fetch(request_id, role, attempt) as fetch:
            gather(self._transport, {fetch: True}, deadline=time.monotonic() + wait_s)
            fetch.look_for_others(self._transport)
            return fetch.require()

    def receive_together(
        self,
        request_id: str,
        *,
        timeout_s: float | None = None,
        required: Sequence[str] = (PRIMARY_ROLE,),
        optional: Sequence[str] = (),
        attempt: int = 0,
    ) -> Outcome:
        """The group's outcome: every rank has the same roles of the request ("keep"), or none uses any ("drop").

        Every rank of the group must call this for the same request, with the same roles; errors of the receive become
        this rank's vote. A required role that some rank cannot get drops the request; an optional one is then left out
        on every rank, as is one that no rank has. Close the outcome, or each of its roles, when the KV was used.

        Raises:
            ConfigError: this receiver was made without a group, or a role is named twice or not at all.
            VerdictInDoubt: this rank voted and could not learn the ruling in time; tear the group down.
            RemoteProtocolError: the ranks of the group do not vote on the same request.
        """
        if self._agreement is None:
            raise ConfigError("receive_together needs the ranks to agree with: pass group= to KVReceiver, or join one")
        names = [*required, *optional]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"name each role once and at least one, got required {required} and optional {optional}")
        wait_s = self.config.receive_timeout_s if timeout_s is None else seconds(timeout_s)
        schedule = Schedule.starting(
            time.monotonic(), wait_s, vote_timeout_s=self.config.vote_timeout_s, slice_s=self.config.slice_s
        )
        fetches = {self._role_fetch(request_id, name, attempt): name in required for name in names}
        return receive_and_vote(f"{request_id}/{attempt}", self._transport, fetches, self._agreement, schedule)

    def announce(self, request_id: str, *, role: str = PRIMARY_ROLE, attempt: int = 0) -> None:
        """Tell the senders that this rank will come for the request, so that it does not expire in a queue; idempotent.

        Holds until it was received and closed, `cancel`, or the end of the connection.

        Raises:
            ConfigError: the request id, role or attempt is none, or too many are announced.
            TransportError: the transport failed.
        """
        self._transport.announce(self._payloads(request_id, role, attempt))

    def cancel(self, request_id: str, *, role: str = PRIMARY_ROLE, attempt: int = 0) -> None:
        """Take an announcement back; a receive of it that waits in another thread raises `Aborted`. Leaves nothing.

        The senders keep what they have for a later receive until it expires; `discard` frees it now.
        """
        self._transport.withdraw(self._payloads(request_id, role, attempt))

    def discard(self, request_id: str, *, role: str = PRIMARY_ROLE, attempt: int = 0) -> int:
        """How many parts of the request were here and are now consumed unread: for after a drop, without a retry.

        Parts of dead or failed senders are skipped.
        """
        return discard_payloads(self._transport, self._payloads(request_id, role, attempt))

    def _role_fetch(self, request_id: str, role: str, attempt: int) -> RoleFetch:
        wanted = self._identities(request_id, role, attempt)
        boxes, plain = self.route.target_boxes[self.rank], self.route.is_plain
        return RoleFetch(role, wanted, boxes, plain=plain, forecast=self._forecast)

    def __enter__(self) -> KVReceiver:
        return self


def _sent_dtype(dtype: torch.dtype | None, model: ModelFacts | None) -> torch.dtype | None:
    if model is None:
        return dtype
    stated = dtype_named(model.layout.dtype)
    if dtype not in (None, stated):
        raise ConfigError(f"dtype is {dtype}, but model states {stated}; state what is sent, or leave dtype out")
    return stated


def _as_agreement(group: Group | Agreement, config: HandoffConfig) -> Agreement:
    if isinstance(group, Group):
        return ExchangeAgreement(group, facts=config.fingerprint())
    if isinstance(group, Agreement):
        return group
    raise ConfigError(f"group must be a Group or an Agreement of omnikv.groups, got a {type(group).__name__}")


def seconds(timeout_s: object) -> float:
    """A timeout as seconds that every clock, lock and backend can take.

    Raises:
        ConfigError: it is no number of seconds.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or math.isnan(timeout_s):
        raise ConfigError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
    return min(timeout_s, FOREVER_S)
