"""Sending a request's KV through an engine's connector: extracted whole or not at all, one payload a target rank.

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

import torch

from omnikv.core.keys import SendKeyHook, build_rank_aware_send_keys, is_rank_aware
from omnikv.core.layout import Layout
from omnikv.core.topology import KVTPTopology, get_kv_target_ranks
from omnikv.core.wire import SLICE_STAMP_KEY
from omnikv.errors import ConfigError, LocalProtocolError, OmniKVError, PutRejected
from omnikv.handoff.engine_connector import Stages, addresses_ranks, put_once, put_with_retry
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.fill import fill
from omnikv.tensors.kv import DenseSource, LayerKV, LayerSource
from omnikv.tensors.layouts import infer_layout, layer_views
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


def extract_kv(
    request_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    kv_caches: Sequence[Any],
    block_size: int,
    cache_dtype: str,
    custom_metadata: Mapping[str, Any] | None = None,
    *,
    layout: Layout | None = None,
) -> KVCacheTransferData:
    """The request's KV out of an engine's paged caches, in memory of its own, with the published metadata.

    Without a `layout`, each cache's is read from its shape, where that has one reading alone.

    Raises:
        ConfigError: a layer of unknown form or with two readings, an id outside the pool or named twice (X11), or more
            tokens than the blocks hold. Nothing is extracted then.
    """
    pairs = _as_pairs(request_id, kv_caches, block_size, layout)
    paged = PagedKV(pairs, block_ids=block_ids, num_tokens=num_tokens, layout=Layout.split_pair(block_size))
    layers = _gather(paged, pairs)
    return KVCacheTransferData(
        request_id=request_id,
        layer_blocks={"key_cache": [layer.key for layer in layers], "value_cache": [layer.value for layer in layers]},
        block_ids=list(block_ids),
        metadata={
            "block_size": block_size,
            "num_layers": len(layers),
            "dtype": str(cache_dtype),
            "seq_len": num_tokens,
            **(custom_metadata or {}),
        },
    )


def _as_pairs(
    request_id: str, kv_caches: Sequence[Any], block_size: int, layout: Layout | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Key and value blocks of every layer, `[blocks, block_size, kv_heads, head_dim]`, whatever its layout."""
    at = 0
    pairs = []
    try:
        for at, cache in enumerate(kv_caches):
            pairs.append(layer_views(cache, layout or infer_layout(cache, block_size), layer=at))
    except ConfigError as error:
        raise ConfigError(
            f"request {request_id!r} is not sent: layer {at}: {error}; an engine's omni_kv_config declares it by "
            "kv_layout",
            request_id=request_id,
        ) from error
    return pairs


def _gather(paged: PagedKV, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[LayerKV]:
    """The layers in memory of their own, on the device of their caches."""
    sources = paged.layer_sources()
    layers = [
        LayerKV(
            torch.empty(source.key.shape, dtype=source.key.dtype, device=key.device),
            torch.empty(source.value.shape, dtype=source.value.dtype, device=value.device),
        )
        for source, (key, value) in zip(sources, caches, strict=True)
    ]
    fill([job for source, layer in zip(sources, layers, strict=True) for job in zip(source, layer, strict=True)])
    return layers


def send_kv(connector: Any, kv: KVCacheTransferData, route: SendRoute, *, closing: threading.Event) -> int:
    """The bytes put, over all target ranks.

    When one of several puts fails, a connector that can tell receivers tells all of them; no part is used alone.

    Raises:
        ConfigError: an empty request id, or a payload that cannot be packed.
        TopologyError: the parallel sizes or the heads do not divide, or this rank is outside its stage.
        PutRejected: the connector did not take a payload.
        TransportError: the connector failed.
    """
    if not kv.request_id:
        raise ConfigError("a request without an id cannot be sent: its receiver would have no key to ask for")
    started = time.monotonic()
    parts = _parts(kv, route, by_rank=addresses_ranks(connector))
    nbytes, done = 0, 0
    try:
        for part in parts:
            nbytes += _put(connector, part, route.stages, closing)
            done += 1
    except OmniKVError as error:
        # A key refused for good may still hold an earlier payload of the same request, which must not be lost (X07).
        taken = isinstance(error, PutRejected) and not error.retryable
        undone = parts[:done] if taken else parts
        _tell_receivers(connector, route.stages, [(part.key, part.target_rank) for part in undone], str(error))
        raise
    logger.info(
        "sent KV of request %s to %s: %d bytes under %d key(s) in %.1f ms",
        kv.request_id, route.stages.to_stage, nbytes, len(parts), 1e3 * (time.monotonic() - started),
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
            fail(transfer_id, str(error))
            raise
        transfer(kv, transfer_id)

    for request_id, what in finished.items():
        cause = _try(send_one, request_id, what)
        counters["sent" if cause is None else "send_failed"] += 1
        if cause is not None:
            logger.error("KV of request %s was not sent: %s", request_id, cause)
    return list(finished)


def _try(send_one: Callable[[str, Mapping[str, Any]], object], request_id: str, what: Mapping[str, Any]) -> str | None:
    try:
        send_one(request_id, what)
    # edge: an engine's resolver and caches take part here, and one request must not keep another's blocks.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def announce_failure(connector: Any, request_id: str, route: SendRoute, cause: str) -> None:
    """Nothing; tells every receiver of this request that it will not come, where the connector can.

    Raises:
        ConfigError: the engine's key builder does not name one key a receiver.
        TopologyError: the parallel sizes do not divide, or this rank is outside its stage.
    """
    if addresses_ranks(connector):
        _tell_receivers(connector, route.stages, _keyed_targets(request_id, route, by_rank=True), cause)


def _tell_receivers(connector: Any, stages: Stages, targets: Sequence[tuple[str, int]], cause: str) -> None:
    if not addresses_ranks(connector):
        return
    try:
        for key, target_rank in targets:
            connector.fail(*stages, key, cause, target_rank=target_rank)
    except OmniKVError as error:
        logger.warning("the receivers of %s could not be told that it will not come: %s", targets, error)


def _parts(kv: KVCacheTransferData, route: SendRoute, *, by_rank: bool) -> list[_Part]:
    topo = route.topo
    targets = _keyed_targets(kv.request_id, route, by_rank=by_rank)
    if topo.source_tp_size >= topo.target_tp_size or callable(route.key_hook):
        return [_Part(key, target, kv) for key, target in targets]
    return [_Part(key, target, _cut(kv, topo, target)) for key, target in targets]


def _keyed_targets(request_id: str, route: SendRoute, *, by_rank: bool) -> list[tuple[str, int]]:
    """Each key with the receiver rank that asks for it."""
    topo = route.topo
    keys = build_rank_aware_send_keys(request_id, *route.stages, topo, hook=route.key_hook)
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
    for key, value in zip(layer_blocks["key_cache"], layer_blocks["value_cache"], strict=True):
        yield None if key is None and value is None else LayerSource(DenseSource(key), DenseSource(value))
