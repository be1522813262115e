"""Receiving a request's KV through an engine's connector: every shard under its key, then one payload for this rank.

`omnikv.core.fetch` decides what is asked for and when to stop; this shell asks, waits and puts the shards together.
What a connector handed out cannot always be given back. So a payload that arrived is kept while others are late, and
where the connector takes payloads back, an incomplete set returns to it whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omnikv.core.fetch import Arrived, Complete, Fetch, GiveUp, Pause, RoundEnded, Shard, begin, step
from omnikv.core.keys import RecvKeyHook, build_rank_aware_recv_keys
from omnikv.core.senders import SenderAddress
from omnikv.core.topology import KVTPTopology
from omnikv.errors import HandoffError, OmniKVError, PayloadLost, ReceiveTimeout, WireError, WireReason
from omnikv.handoff.engine_connector import Delivery, Stages, addresses_ranks, ask, blocks_until_deadline
from omnikv.tensors.place import borrows_from, map_tensors, move_tensors
from omnikv.tensors.shards import Merger, Slicer, merge_received_rank_shards, slice_received_rank_shard

logger = logging.getLogger("omnikv.receive")

# How long a wait on a connector that wakes us lasts before the other shards are looked at, and a closing is seen.
_BLOCKING_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveRoute:
    """Where a receiver rank's payloads come from, and an engine's own key builder, merger and slicer if it has them.

    `address` is where rank 0 of the sender listens. It is named to the connector for shards of a certain rank, and for
    all shards when it belongs to this one receive (`address_every_shard`).
    """

    stages: Stages
    topo: KVTPTopology
    address: SenderAddress | None = None
    address_every_shard: bool = False
    key_hook: RecvKeyHook | None = None
    merger: Merger | None = None
    slicer: Slicer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPayload:
    """One rank's KV as the published dict, in memory of its own or on the device asked for, and its size on the way.

    `held` are the deliveries that the connector would still take back; the KV is ours whatever becomes of them.
    """

    data: dict[str, Any]
    nbytes: int
    held: tuple[Delivery, ...] = ()

    def settle(self) -> None:
        """Nothing; the sender may forget what was held: it was used. Call this or `put_back`, once."""
        for delivery in self.held:
            delivery.settle()

    def put_back(self) -> None:
        """Nothing; what was held goes back unconsumed, and the same keys find it again."""
        for delivery in self.held:
            delivery.put_back()


def receive_kv(
    connector: Any,
    request_id: str,
    route: ReceiveRoute,
    *,
    deadline: float,
    device: torch.device | None = None,
    closing: threading.Event,
    hold: bool = False,
) -> ReceivedPayload:
    """The request's KV for this rank, merged from its shards, on `device` if one is named.

    `deadline` is on the monotonic clock, in seconds. `closing` ends the wait early. With `hold`, payloads that the
    connector takes back are not acknowledged yet: the caller ends the result by `settle` or `put_back`.

    Raises:
        ReceiveTimeout: a shard is still missing; those that came were given back where the connector takes them back,
            and `consumed` says whether any could not be.
        TopologyError: the parallel sizes do not divide, this rank is outside its stage, or a key builder's plain keys
            do not match the source ranks.
        WireError: a payload is damaged, belongs to another request or rank, or shards do not fit together.
        TransportError: the connector failed.
        ProducerFailed: the sender said that it failed.
        PayloadLost: everything came, and could not be brought to where it is needed.
        LocalProtocolError: a key builder named one key twice.
        HandoffError: an engine's key builder, merger or slicer failed.
    """
    started = time.monotonic()
    keys = _by_hook(
        "key builder",
        request_id,
        lambda: build_rank_aware_recv_keys(request_id, *route.stages, route.topo, hook=route.key_hook),
    )
    shards = tuple(Shard(key, rank) for key, rank in keys)
    deliveries: dict[str, Delivery] = {}
    consumed = False
    held: tuple[Delivery, ...] = ()
    try:
        _fetch(connector, request_id, route, shards, deliveries, deadline=deadline, closing=closing)
        consumed = True
        data = _assemble(request_id, route, shards, deliveries)
        data = _place(request_id, data, deliveries, device)
        held = tuple(delivery for delivery in deliveries.values() if hold and delivery.returnable)
    except OmniKVError as error:
        # A broken payload would be just as broken the next time; its room is better freed.
        consumed = consumed or isinstance(error, WireError)
        error.consumed = consumed or not all(delivery.returnable for delivery in deliveries.values())
        raise
    finally:
        for delivery in deliveries.values():
            if not any(delivery is kept for kept in held):
                (delivery.settle if consumed else delivery.put_back)()
    nbytes = sum(delivery.nbytes for delivery in deliveries.values())
    logger.info(
        "received KV of request %s from %s: %d bytes under %d key(s) in %.1f ms",
        request_id, route.stages.from_stage, nbytes, len(shards), 1e3 * (time.monotonic() - started),
    )  # fmt: skip
    return ReceivedPayload(data=data, nbytes=nbytes, held=held)


def _fetch(
    connector: Any,
    request_id: str,
    route: ReceiveRoute,
    shards: tuple[Shard, ...],
    deliveries: dict[str, Delivery],
    *,
    deadline: float,
    closing: threading.Event,
) -> None:
    """Nothing; fills `deliveries` until every shard is in it."""
    waits_itself = blocks_until_deadline(connector)

    def look(shard: Shard, until: float | None) -> bool:
        metadata = _metadata(connector, route, shard)
        delivery = ask(connector, route.stages, shard.key, metadata, deadline=until)
        if delivery is not None:
            deliveries[shard.key] = delivery
            _require_request(delivery.data, request_id, shard)
        return delivery is not None

    pauses = {"first_pause_s": _BLOCKING_PAUSE_S, "longest_pause_s": _BLOCKING_PAUSE_S} if waits_itself else {}
    state: Fetch = begin(shards, deadline_s=deadline, **pauses)
    while True:
        for shard in state.missing:
            if look(shard, time.monotonic() if waits_itself else None):
                state, _ = step(state, Arrived(shard.key))
        state, (effect,) = step(state, RoundEnded(time.monotonic()))
        if isinstance(effect, Complete):
            return
        if isinstance(effect, GiveUp) or closing.is_set():
            raise _timeout(request_id, route, state, closing)
        assert isinstance(effect, Pause)
        if not waits_itself:
            closing.wait(effect.seconds)
        elif look(state.missing[0], time.monotonic() + effect.seconds):
            state, _ = step(state, Arrived(state.missing[0].key))


def _metadata(connector: Any, route: ReceiveRoute, shard: Shard) -> dict[str, Any] | None:
    if addresses_ranks(connector):
        return {"source_rank": shard.source_rank or 0}
    if route.address is None or (shard.source_rank is None and not route.address_every_shard):
        return None
    return route.address.for_rank(shard.source_rank)


def _require_request(data: Mapping[str, Any], request_id: str, shard: Shard) -> None:
    # Published keys of different requests can be equal (X06), so the payload's own word counts.
    found = data.get("request_id")
    if isinstance(found, str) and found and found != request_id:
        raise WireError(
            f"the payload under {shard.key!r} belongs to request {found!r}, not to {request_id!r}",
            reason=WireReason.WRONG_REQUEST,
            request_id=request_id,
            key=shard.key,
            rank=shard.source_rank,
        )


def _timeout(request_id: str, route: ReceiveRoute, state: Fetch, closing: threading.Event) -> ReceiveTimeout:
    missing = ", ".join(
        repr(shard.key) if shard.source_rank is None else f"{shard.key!r} of source rank {shard.source_rank}"
        for shard in state.missing
    )
    why = "this rank is closing" if closing.is_set() else "the deadline passed"
    return ReceiveTimeout(
        f"KV of request {request_id!r} did not come from stage {route.stages.from_stage!r}: {why}, and "
        f"{len(state.missing)} of {len(state.wanted)} shards are missing: {missing}",
        request_id=request_id,
    )


def _assemble(
    request_id: str, route: ReceiveRoute, shards: tuple[Shard, ...], deliveries: Mapping[str, Delivery]
) -> dict[str, Any]:
    payloads = [deliveries[shard.key].data for shard in shards]
    sources = [shard.source_rank for shard in shards]
    merged: Any = payloads[0]
    if len(payloads) > 1:
        merged = _by_hook(
            "payload merger",
            request_id,
            lambda: merge_received_rank_shards(payloads, route.merger, source_ranks=sources),
        )
    data = _by_hook(
        "payload slicer", request_id, lambda: slice_received_rank_shard(merged, route.topo, slicer=route.slicer)
    )
    if not isinstance(data, dict):
        raise HandoffError(
            f"the payload merger or slicer made {type(data).__name__} of request {request_id!r}, not a payload",
            request_id=request_id,
        )
    return data


def _by_hook(what: str, request_id: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except OmniKVError:
        raise
    # edge: key builders, mergers and slicers may be an engine's own, and it may raise anything.
    except Exception as error:
        raise HandoffError(f"the {what} failed for request {request_id!r}: {error}", request_id=request_id) from error


def _place(
    request_id: str, data: dict[str, Any], deliveries: Mapping[str, Delivery], device: torch.device | None
) -> dict[str, Any]:
    buffers = [buffer for delivery in deliveries.values() for buffer in delivery.borrowed]
    try:
        if "layer_blocks" in data:
            data = data | {"layer_blocks": move_tensors(data["layer_blocks"], device)}
        if not buffers:
            return data
        owned: dict[str, Any] = map_tensors(data, lambda part: part.clone() if borrows_from(part, buffers) else part)
    # What torch raises when memory or a device gives out.
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise PayloadLost(
            f"KV of request {request_id!r} came and could not be brought to {device or 'memory of its own'}: {error}",
            request_id=request_id,
        ) from error
    return owned
