"""Receiving a request's KV through an engine's connector: every shard under its key, then one payload for this rank.

A fetch outlives the wait for it. What came stays with it while the rest is waited for, over as many rounds as ranks in
lockstep vote, and while companions of the request are fetched beside it, so that waits overlap and nothing is asked for
twice. Nothing is acknowledged before its owner says so: what a drop leaves goes back to a connector that takes it back,
and is kept for a retry where a get has consumed it for good.

`omnikv.core.fetch` decides what is asked for and when a wait ends; this shell asks, waits and puts the shards together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnikv.core.fetch import Arrived, Fetch, Pause, RoundEnded, Shard, begin, resume, step
from omnikv.core.keys import build_rank_aware_recv_keys
from omnikv.errors import OmniKVError, ReceiveTimeout, WireError
from omnikv.handoff.engine_connector import Delivery, abandon, addresses_ranks, ask, blocks_until_deadline
from omnikv.handoff.keyed_assemble import ReceiveRoute, assemble_shards, by_hook, place_payload, require_request

logger = logging.getLogger("omnikv.receive")

# How long a wait on a connector that wakes us lasts before the other shards are looked at, and a closing is seen.
_BLOCKING_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPayload:
    """One rank's KV as the published dict, in memory of its own or on the device asked for, and its size on the way."""

    data: dict[str, Any]
    nbytes: int


class KeyedFetch:
    """One request's KV on its way to this rank: the shards that came, and in the end the payload or what went wrong.

    Its owner ends it: by `acknowledge` when the payload was used, by `give_back` otherwise.
    """

    def __init__(
        self,
        connector: Any,
        request_id: str,
        route: ReceiveRoute,
        *,
        device: torch.device | None = None,
        closing: threading.Event,
    ) -> None:
        """`closing` ends every wait early. What is wrong with the keys becomes the fetch's `failure`."""
        self.request_id = request_id
        self.route = route
        self.payload: ReceivedPayload | None = None
        # Kept rather than raised, so that it is the same whoever asks, and how often.
        self.failure: OmniKVError | None = None
        self._connector = connector
        self._device = device
        self._closing = closing
        self._started = time.monotonic()
        self._deliveries: dict[str, Delivery] = {}
        self._state: Fetch | None = None
        waits_itself = blocks_until_deadline(connector)
        pauses = {"first_pause_s": _BLOCKING_PAUSE_S, "longest_pause_s": _BLOCKING_PAUSE_S} if waits_itself else {}
        try:
            keys = by_hook(
                "key builder",
                request_id,
                lambda: build_rank_aware_recv_keys(request_id, *route.stages, route.topo, hook=route.key_hook),
            )
            self._state = begin(tuple(Shard(key, rank) for key, rank in keys), deadline_s=self._started, **pauses)
        except OmniKVError as error:
            error.consumed = False
            self.failure = error

    @property
    def missing(self) -> tuple[Shard, ...]:
        """The shards that may still come; none once the payload is here or something failed."""
        return () if self._state is None or self.is_over else self._state.missing

    @property
    def is_over(self) -> bool:
        """Whether no wait can add anything."""
        return self.payload is not None or self.failure is not None

    @property
    def is_consumed(self) -> bool:
        """Whether something was taken from the connector that it does not take back."""
        if self.payload is not None:
            return not self._deliveries
        if self.failure is not None and self.failure.consumed:
            return True
        return not self._is_returnable

    @property
    def is_lost(self) -> bool:
        """Whether the payload was consumed and cannot be had any more: a retry cannot help."""
        return self.failure is not None and self.failure.consumed and not self._deliveries

    @property
    def is_closing(self) -> bool:
        """Whether this rank ends, so that no wait lasts."""
        return self._closing.is_set()

    def require(self) -> ReceivedPayload:
        """The payload.

        Raises:
            ReceiveTimeout: a shard is still missing; `consumed` says whether any that came cannot be given back.
            TopologyError: the parallel sizes do not divide, this rank is outside its stage, or a key builder's plain
                keys do not match the source ranks.
            WireError: a payload is damaged, belongs to another request or rank, or shards do not fit together.
            TransportError: the connector failed.
            ProducerFailed: the sender said that it failed.
            PayloadLost: everything came, and could not be brought to where it is needed.
            LocalProtocolError: a key builder named no key, or one twice.
            HandoffError: an engine's key builder, merger or slicer failed.
        """
        if self.failure is not None:
            raise self.failure
        if self.payload is None:
            raise self._timeout()
        return self.payload

    def begin_wait(self, until: float) -> None:
        """Nothing; the rounds that follow end at `until` (monotonic seconds)."""
        if self._state is not None:
            self._state = resume(self._state, deadline_s=until)

    def look(self, deadline: float) -> None:
        """Nothing; takes what is here of the missing shards, without waiting for any.

        Bringing over what is here ends by `deadline` (monotonic seconds), if the connector can see to that.
        """
        if self._state is not None and not self._state.missing and not self.is_over:
            # Everything came, and putting it together was interrupted.
            self._complete()
        for shard in self.missing:
            if not self.is_over:
                self._ask(shard, time.monotonic() if blocks_until_deadline(self._connector) else deadline)

    def end_round(self) -> float | None:
        """How long to wait before the missing shards are looked for again, in seconds; None when the wait is over."""
        if self._state is None or self.is_over or self.is_closing:
            return None
        self._state, (effect,) = step(self._state, RoundEnded(time.monotonic()))
        return effect.seconds if isinstance(effect, Pause) else None

    def wait(self, pause_s: float) -> None:
        """Nothing; returns after `pause_s`, or as soon as a shard came where the connector wakes us."""
        if blocks_until_deadline(self._connector):
            self._ask(self.missing[0], time.monotonic() + pause_s)
        else:
            self._closing.wait(pause_s)

    def spell_missing(self) -> str:
        """What is missing, in words."""
        wanted = () if self._state is None else self._state.wanted
        shards = ", ".join(
            repr(shard.key) if shard.source_rank is None else f"{shard.key!r} of source rank {shard.source_rank}"
            for shard in self.missing
        )
        return f"{len(self.missing)} of {len(wanted)} shards are missing: {shards}"

    def redirect(self, route: ReceiveRoute) -> None:
        """Nothing; the missing shards are asked of the sender that this route names, by the same keys."""
        if route != self.route:
            self.route = route
            self.retry()

    def retry(self) -> None:
        """Nothing; what failed, and consumed nothing that is lost, may be asked for again; keys stay as they are."""
        if self._state is not None and not self.is_lost:
            self.failure = None

    def acknowledge(self) -> None:
        """Nothing; the senders may forget what came: it was used. Idempotent."""
        self._end_deliveries(Delivery.settle)

    def give_back(self) -> bool:
        """Whether nothing stays here: what came is with its senders again, and the same keys find it. Idempotent.

        What cannot go back whole stays with this fetch, in memory of its own, for whoever takes the fetch up again.
        """
        if self.payload is not None and not self._deliveries:
            return False
        for shard in self._state.missing if self._state is not None else ():
            abandon(self._connector, shard.key)
        if not self._is_returnable:
            return not self._own_deliveries()
        self.payload = None
        self._end_deliveries(Delivery.put_back)
        return True

    @property
    def _is_returnable(self) -> bool:
        return all(delivery.returnable for delivery in self._deliveries.values())

    def _ask(self, shard: Shard, deadline: float) -> None:
        try:
            metadata = self._metadata(shard)
            delivery = ask(self._connector, self.route.stages, shard.key, metadata, deadline=deadline)
            if delivery is None:
                return
            self._deliveries[shard.key] = delivery
            require_request(delivery.data, self.request_id, shard)
        except OmniKVError as error:
            # A broken payload would be just as broken the next time; its room is better freed.
            self._fail(error, consumed=isinstance(error, WireError))
            return
        assert self._state is not None
        self._state, _ = step(self._state, Arrived(shard.key))
        if not self._state.missing:
            self._complete()

    def _metadata(self, shard: Shard) -> dict[str, Any] | None:
        route = self.route
        if addresses_ranks(self._connector):
            return {"source_rank": shard.source_rank or 0}
        if route.address is None or (shard.source_rank is None and not route.address_every_shard):
            return None
        return route.address.for_rank(shard.source_rank)

    def _complete(self) -> None:
        assert self._state is not None
        wanted = self._state.wanted
        shards = [self._deliveries[shard.key] for shard in wanted]
        try:
            data = assemble_shards(self.request_id, self.route, shards, [shard.source_rank for shard in wanted])
            data = place_payload(self.request_id, data, shards, self._device)
        except OmniKVError as error:
            self._fail(error, consumed=True)
            return
        self.payload = ReceivedPayload(data=data, nbytes=sum(shard.nbytes for shard in shards))
        logger.info(
            "received KV of request %s from %s: %d bytes under %d key(s) in %.1f ms",
            self.request_id, self.route.stages.from_stage, self.payload.nbytes, len(shards),
            1e3 * (time.monotonic() - self._started),
        )  # fmt: skip
        if not self._is_returnable:
            # The payload is ours whatever becomes of it, and a connector's own memory is scarce.
            self.acknowledge()

    def _fail(self, error: OmniKVError, *, consumed: bool) -> None:
        self.failure = error
        error.consumed = consumed or not self._is_returnable
        if consumed:
            self.acknowledge()

    def _own_deliveries(self) -> bool:
        try:
            for key, delivery in list(self._deliveries.items()):
                self._deliveries[key] = delivery.owned()
        except RuntimeError as error:
            logger.warning("what came of request %s could not be kept for a retry: %s", self.request_id, error)
            self.acknowledge()
            return False
        return True

    def _end_deliveries(self, end: Callable[[Delivery], None]) -> None:
        deliveries, self._deliveries = self._deliveries, {}
        for delivery in deliveries.values():
            end(delivery)

    def _timeout(self) -> ReceiveTimeout:
        why = "this rank is closing" if self.is_closing else "the deadline passed"
        error = ReceiveTimeout(
            f"KV of request {self.request_id!r} did not come from stage {self.route.stages.from_stage!r}: {why}, and "
            f"{self.spell_missing()}",
            request_id=self.request_id,
        )
        error.consumed = not self._is_returnable
        return error


def fetch_until(
    first: KeyedFetch, beside: Sequence[KeyedFetch] = (), *, until: float, deadline: float | None = None
) -> None:
    """Nothing; waits until `first` is over or `until` (monotonic seconds), and takes what comes for all meanwhile.

    What is found late in the wait may take until `deadline` to be brought over, where the connector bounds that.
    """
    first.begin_wait(until)
    while True:
        for fetch in (first, *beside):
            fetch.look(until if deadline is None else deadline)
        pause_s = first.end_round()
        if pause_s is None:
            return
        first.wait(pause_s)
