"""The sending half of the published manager: what a stage does with requests that it has finished."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from omnikv.core.topology import KVTPTopology
from omnikv.handoff.engine_connector import Stages
from omnikv.handoff.keyed_extract import extract_kv
from omnikv.handoff.keyed_send import SendRoute, announce_failure, send_finished, send_kv
from omnikv.integrations.vllm_omni import settings
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig
from omnikv.tensors.pack import KVCacheTransferData
from omnikv.tensors.shards import heads_stamp


class SendingStage(ABC):
    """One rank of a stage that sends; what it sends with belongs to the manager that it is a half of."""

    config: OmniKVCacheConfig
    counters: Counter[str]
    send_stages: tuple[str | None, str | None]
    kv_send_key_builder: Callable[..., Any] | None
    _tp_topo: KVTPTopology
    _closing: threading.Event

    @property
    @abstractmethod
    def connector(self) -> Any:
        """The connector to send through; None when there is none or it could not be opened."""

    def handle_finished_requests_kv_transfer(
        self,
        finished_reqs: dict[str, dict[str, Any]],
        kv_caches: list[Any],
        block_size: int,
        cache_dtype: str,
        request_id_resolver: Callable[[str], str] | None = None,
    ) -> list[str]:
        """Every id of `finished_reqs`, after sending what could be sent: the engine frees these requests' blocks."""
        if not finished_reqs or not self.config.need_send_cache:
            return list(finished_reqs or ())

        def extract(request_id: str, what: Mapping[str, Any]) -> KVCacheTransferData:
            layout = settings.declared_layout(self.config, block_size)
            blocks, num_tokens, more = what.get("block_ids") or [], what.get("seq_len", 0), what.get("custom_metadata")
            return self._extract_kv_cache(
                request_id, blocks, num_tokens, kv_caches, block_size, cache_dtype, more, layout=layout
            )

        return send_finished(
            self.connector,
            finished_reqs,
            extract=extract,
            transfer=self._transfer_kv_cache,
            resolve_id=request_id_resolver,
            fail=lambda request_id, cause: announce_failure(self.connector, request_id, self._send_route(), cause),
            counters=self.counters,
        )

    def decline_kv_transfer(self, request_id: str, cause: str) -> None:
        """Nothing; tells the receivers, where the connector can, that this request's KV will not be sent, and why.

        For an engine that decides not to send what a receiver may wait for (D05), a companion for instance, under the
        id that it would have travelled under.

        Raises:
            ConfigError: this stage sends on no edge, or its key builder does not name one key a receiver.
            TopologyError: the parallel sizes do not divide, or this rank is outside its stage.
            HandoffError: the engine's key builder failed.
        """
        self.counters["declined"] += 1
        announce_failure(self.connector, request_id, self._send_route(), cause)

    _extract_kv_cache = staticmethod(extract_kv)

    def _transfer_kv_cache(self, kv_data: KVCacheTransferData, transfer_req_id: str) -> None:
        stamp = heads_stamp(self._tp_topo, self.config.kv_num_heads)
        sent = replace(kv_data, request_id=transfer_req_id, metadata={**(kv_data.metadata or {}), **stamp})
        send_kv(self.connector, sent, self._send_route(), closing=self._closing)

    def _send_route(self) -> SendRoute:
        stages = Stages(*settings.require_edge("omni_from_stage and omni_to_stage", self.send_stages))
        return SendRoute(stages=stages, topo=self._tp_topo, key_hook=self.kv_send_key_builder)
