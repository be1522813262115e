"""Sending a request's KV through an engine's connector: one payload a target rank, and no receiver left waiting.

Whatever keeps a payload from being put, the receivers are told, where the connector can tell them.

The keys are the published ones. When this rank serves several receivers, each gets its own heads, cut here and stamped,
unless the engine builds its own keys: then only it knows who reads what, and every key carries all heads.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from omnikv.core.keys import SendKeyHook, build_rank_aware_send_keys, is_rank_aware
from omnikv.core.topology import KVTPTopology, get_kv_target_ranks
from omnikv.core.wire import SLICE_STAMP_KEY
from omnikv.errors import ConfigError, LocalProtocolError, OmniKVError, PutRejected
from omnikv.handoff.engine_connector import Stages, addresses_ranks, put_once, put_with_retry
from omnikv.handoff.keyed_assemble import by_hook
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.pack import KVCacheTransferData, PayloadPlan, plan_payload
from omnikv.tensors.shards import sender_stamp, slice_for_target

logger = logging.getLogger("omnikv.send")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRoute:
    """Where a sender rank's payloads go: the edge, the rank's place, and an engine's own key builder if it has one."""

    stages: Stages
    topo: KVTPTopology
    key_hook: SendKeyHook | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    key: str
    target_rank: int
    kv: KVCacheTransferData


def send_kv(connector: Any, kv: KVCacheTransferData, route: SendRoute, *, closing: threading.Event) -> int:
    """The bytes put, over all target ranks.

    When a part cannot be cut, packed or put, whatever the reason, a connector that can tell receivers tells all of
    them (X02); no part is used alone.

    Raises:
        ConfigError: an empty request id, or a payload that cannot be packed.
        TopologyError: the parallel sizes or the heads do not divide, or this rank is outside its stage.
        HandoffError: the engine's key builder failed.
        PutRejected: the connector did not take a payload.
        TransportError: the connector failed.
    """
    if not kv.request_id:
        raise ConfigError("a request without an id cannot be sent: its receiver would have no key to ask for")
    started = time.monotonic()
    targets = _keyed_targets(kv.request_id, route, by_rank=addresses_ranks(connector))
    nbytes, done = 0, 0
    try:
        # All parts are cut before the first is put.
        for part in _parts(kv, route, targets):
            nbytes += _put(connector, part, route.stages, closing)
            done += 1
    # edge: an engine's payload and memory take part here; whatever they raise, receivers would wait in vain.
    except Exception as error:
        # A key refused for good may still hold an earlier payload of the same request, which must not be lost (X07).
        taken = isinstance(error, PutRejected) and not error.retryable
        _tell_receivers(connector, route.stages, targets[:done] if taken else targets, str(error))
        raise
    logger.info(
        "sent KV of request %s to %s: %d bytes under %d key(s) in %.1f ms",
        kv.request_id, route.stages.to_stage, nbytes, len(targets), 1e3 * (time.monotonic() - started),
    )  # fmt: skip
    return nbytes


def send_finished(
    connector: Any,
    finished: Mapping[str, Mapping[str, Any]],
    *,
    extract: Callable[[str, Mapping[str, Any]], KVCacheTransferData],
    transfer: Callable[[KVCacheTransferData, str], None],
    resolve_id: Callable[[str], str] | None,
    fail: Callable[[str, str], None],
    counters: Counter[str],
) -> list[str]:
    """Every id of `finished`, whatever became of it: the engine frees the blocks of exactly these.

    Each request is extracted whole and then transferred under the id that `resolve_id` gives it. One that could not be
    sent is logged in one line with its cause, counted, and its receivers are told by `fail`.
    """
    if connector is None:
        counters["send_failed"] += len(finished)
        logger.error("KV of %s was not sent: this stage has no connector", ", ".join(map(str, finished)))
        return list(finished)

    def send_one(request_id: str, what: Mapping[str, Any]) -> None:
        transfer_id = resolve_id(request_id) if resolve_id is not None else request_id
        try:
            kv = extract(request_id, what)
        # edge: an engine's caches take part here; whatever they raise, receivers would wait in vain (D05).
        except Exception as error:
            untold = _try(fail, transfer_id, str(error))
            if untold is not None:
                logger.warning("the receivers of %s could not be told that it will not come: %s", transfer_id, untold)
            raise
        transfer(kv, transfer_id)

    for request_id, what in finished.items():
        cause = _try(send_one, request_id, what)
        counters["sent" if cause is None else "send_failed"] += 1
        if cause is not None:
            logger.error("KV of request %s was not sent: %s", request_id, cause)
    return list(finished)


def _try(call: Callable[..., object], *arguments: object) -> str | None:
    """What went wrong in the call, in words; None when nothing did."""
    try:
        call(*arguments)
    # edge: an engine's resolver and caches take part here, and one request must not keep another's blocks.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def announce_failure(connector: Any, request_id: str, route: SendRoute, cause: str) -> None:
    """Nothing; tells every receiver of this request that it will not come, where the connector can.

    Raises:
        ConfigError: the engine's key builder does not name one key a receiver.
        TopologyError: the parallel sizes do not divide, or this rank is outside its stage.
        HandoffError: the engine's key builder failed.
    """
    if addresses_ranks(connector):
        _tell_receivers(connector, route.stages, _keyed_targets(request_id, route, by_rank=True), cause)


def _tell_receivers(connector: Any, stages: Stages, targets: Sequence[tuple[str, int]], cause: str) -> None:
    if not addresses_ranks(connector):
        return
    for key, target_rank in targets:
        _tell_receiver(connector, stages, key, target_rank, cause)


def _tell_receiver(connector: Any, stages: Stages, key: str, target_rank: int, cause: str) -> None:
    try:
        connector.fail(*stages, key, cause, target_rank=target_rank)
    except OmniKVError as error:  # It must not keep the news from the others.
        logger.warning("rank %d could not be told that %s will not come: %s", target_rank, key, error)


def _parts(kv: KVCacheTransferData, route: SendRoute, targets: Sequence[tuple[str, int]]) -> list[_Part]:
    topo = route.topo
    if topo.source_tp_size >= topo.target_tp_size or callable(route.key_hook):
        return [_Part(key, target, kv) for key, target in targets]
    return [_Part(key, target, _cut(kv, topo, target)) for key, target in targets]


def _keyed_targets(request_id: str, route: SendRoute, *, by_rank: bool) -> list[tuple[str, int]]:
    """Each key with the receiver rank that asks for it.

    Raises:
        ConfigError: the engine's key builder does not name one key a receiver where receivers are addressed by rank.
        TopologyError: the parallel sizes do not divide, or this rank is outside its stage.
        HandoffError: the engine's key builder failed.
    """
    topo = route.topo
    keys = by_hook(
        "key builder",
        request_id,
        lambda: build_rank_aware_send_keys(request_id, *route.stages, topo, hook=route.key_hook),
    )
    targets = get_kv_target_ranks(topo) if is_rank_aware(topo) else [0]
    if len(keys) == len(targets):
        return list(zip(keys, targets, strict=True))
    if by_rank:
        raise ConfigError(
            f"the send key builder gave {len(keys)} keys for the {len(targets)} receivers {targets}: a transport "
            "addresses receivers by rank, so return one key a receiver, in their order"
        )
    # An engine's own keys name their receivers in a way that only the engine knows; no rank is needed to put them.
    return [(key, 0) for key in keys]


def _cut(kv: KVCacheTransferData, topo: KVTPTopology, target_rank: int) -> KVCacheTransferData:
    return replace(
        kv,
        layer_blocks=slice_for_target(kv.layer_blocks, topo, target_rank),
        block_ids=list(kv.block_ids),
        metadata=dict(kv.metadata or {}) | {SLICE_STAMP_KEY: sender_stamp(topo, target_rank)},
    )


def _put(connector: Any, part: _Part, stages: Stages, closing: threading.Event) -> int:
    put: Callable[[], int]
    if addresses_ranks(connector):
        plan = _plan(part.kv, checksum=connector.wants_checksum(*stages))
        put = partial(connector.put_plan, *stages, part.key, plan, target_rank=part.target_rank)
    else:
        put = partial(put_once, connector, stages, part.key, _packed(connector, part.kv))
    return put_with_retry(put, closing=closing)


def _packed(connector: Any, kv: KVCacheTransferData) -> object:
    """The payload in the form that costs this connector least."""
    if getattr(connector, "supports_raw_data", False) is True:
        try:
            return kv.to_gpu_tensor()
        except LocalProtocolError:
            pass  # All of it is on the CPU.
    try:
        return kv.to_bytes()
    except ConfigError:
        # Metadata that JSON cannot hold goes as a plain dict, which connectors serialise in their own way.
        if _is_json(kv.metadata):
            raise
        return kv.to_dict()


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _plan(kv: KVCacheTransferData, *, checksum: bool) -> PayloadPlan:
    return plan_payload(
        request_id=kv.request_id,
        layers=list(_sources(kv.layer_blocks)),
        block_ids=kv.block_ids,
        metadata=kv.metadata,
        checksum=checksum,
    )


def _sources(layer_blocks: Mapping[str, Any]) -> Iterator[LayerSource | None]:
    keys, values = layer_blocks["key_cache"], layer_blocks["value_cache"]
    if len(keys) != len(values):
        raise ConfigError(f"a payload needs a key and a value for each layer, got {len(keys)} and {len(values)} layers")
    for key, value in zip(keys, values, strict=True):
        yield None if key is None and value is None else LayerSource(DenseSource(key), DenseSource(value))
