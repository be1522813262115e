"""Fetching ahead under the published names: the next request's KV comes while the engine works on another.

`handoff.prefetcher` owns the thread and says what becomes of what it brought; the rest is as in `.receiving`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from omnikv.core.published_vote import is_dummy_request_id
from omnikv.errors import OmniKVError, PayloadLost, ReceiveTimeout
from omnikv.handoff.keyed_receive import KeyedFetch, ReceivedPayload
from omnikv.handoff.open_request import OpenRequest
from omnikv.handoff.prefetcher import Prefetcher
from omnikv.integrations.vllm_omni.receiving import KVPrefetchConsumeError, Received, ReceivingStage
from omnikv.tensors.place import has_free_memory, move_tensors

logger = logging.getLogger("omnikv.vllm_omni")


class PrefetchingStage(ReceivingStage):
    """A receiving rank that may fetch ahead; the prefetcher belongs to the manager that it is a part of."""

    _async_prefetch: bool
    _prefetcher: Prefetcher[KeyedFetch]

    def start_prefetch(
        self, kv_prefetch_job: Mapping[str, Any] | None, target_device: torch.device | None = None
    ) -> None:
        """Begin to fetch the next request in the background, unless prefetching is off or the job says too little."""
        if not (self._async_prefetch and self.config.need_recv_cache and isinstance(kv_prefetch_job, Mapping)):
            return
        request_id, sender_info = kv_prefetch_job.get("request_id"), kv_prefetch_job.get("kv_sender_info")
        # A follower's KV comes from its leader; without a sender of its own a fetch could ask the wrong replica.
        if not request_id or not sender_info or self.topo_config.is_follower or is_dummy_request_id(request_id):
            return
        device = None if target_device is None else torch.device(target_device)
        if not has_free_memory(device, self.config.kv_prefetch_min_free_mem_ratio):
            logger.warning("KV of request %s is not prefetched: too little device memory is free", request_id)
            return
        self._prefetcher.submit(request_id, lambda: self._prefetch_payload(request_id, sender_info, device), device)

    def consume_prefetched_kv(self, req: Any) -> Received:
        """The prefetched payload and its size, or `(None, 0)` when there is none, or it did not come in time.

        Raises:
            KVPrefetchConsumeError: it was taken from the connector and lost.
        """
        with self._together.opened(req, self._resolve_request_id) as (request, is_alone):
            received = self._take_prefetched(request) if request.request_id else None
            if received is not None and is_alone:
                self._together.acknowledge(request)
        return (None, 0) if received is None else (received.data, received.nbytes)

    def _take_prefetched(self, request: OpenRequest) -> ReceivedPayload | None:
        request_id = str(request.request_id)
        try:
            fetch = self._prefetcher.take(request_id, deadline=request.until)
        except ReceiveTimeout as error:
            request.wait_for(request_id)
            self._note_failure(request, request_id, error)
            return None
        except PayloadLost as error:
            raise KVPrefetchConsumeError(str(error), request_id=request_id) from error
        if fetch is None:
            return None
        if fetch.is_lost:
            raise KVPrefetchConsumeError(str(fetch.failure), request_id=request_id) from fetch.failure
        request.adopt(fetch)
        return fetch.payload

    def wait_prefetch(self, timeout: float | None = None) -> bool:
        """Whether no fetch runs in the background any more, at the latest after `timeout` seconds."""
        return self._prefetcher.wait_idle(timeout)

    def _prefetch_payload(self, request_id: str, sender_info: Any, device: torch.device | None) -> KeyedFetch | None:
        request = self._together.begin(request_id)
        try:
            self._fetch(request, request_id, device, sender_info)
        except OmniKVError as error:
            logger.warning("KV of request %s was not prefetched: %s", request_id, error)
        return request.fetches.get(request_id)

    def consume_and_distribute_kv_cache(self, req: Any, target_device: torch.device | None = None) -> bool:
        """As `receive_multi_kv_cache_distributed`, with what was prefetched if there is any."""
        return self._agree_and_hand_on(req, target_device, lambda: self._consume_or_receive(req, target_device))

    def _consume_or_receive(self, req: Any, device: torch.device | None) -> bool:
        if self._async_prefetch:
            data, _ = self.consume_prefetched_kv(req)
            if data is not None:
                # It may have been prefetched to another device.
                self.apply_kv_cache_to_request(req, move_tensors(data, device))
                return True
            if str(self._resolve_request_id(req)) in self._prefetcher:
                # Its fetch still runs, and another beside it would take away what it waits for.
                return False
        return self.receive_multi_kv_cache(req, None, device)
