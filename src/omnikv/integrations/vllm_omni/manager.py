"""The published KV transfer manager: an engine's names and signatures over omnikv's components.

Everything here is a name, an argument list and a few lines that say which component does the work:

    settings, connector, ranks    .settings, .connectors, .parallel    where the sender is    .sender_book
    sending                       .sending, handoff.keyed_send         receiving              handoff.keyed_receive
    receiving with a group        handoff.group_receive: .open_request, .lockstep (the vote), .distribute (handing on)
    background fetching           handoff.prefetcher                   request fields         core.roles

`get_local_tp_rank` and `get_tp_world_size` are looked up as globals of this module, where engines' tests patch them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from omnikv.core import roles
from omnikv.core.published_vote import is_dummy_request_id
from omnikv.core.receive_role import ReceiveLayout, ReceiveRole
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError, OmniKVError, PayloadLost
from omnikv.handoff.engine_connector import Stages
from omnikv.handoff.group_receive import GroupReceive
from omnikv.handoff.keyed_receive import ReceiveRoute, receive_kv
from omnikv.handoff.open_request import OpenRequest
from omnikv.handoff.prefetcher import Prefetcher
from omnikv.integrations.vllm_omni import settings
from omnikv.integrations.vllm_omni.companions import Collector, collect_companions
from omnikv.integrations.vllm_omni.connectors import open_or_log, point_at_sender
from omnikv.integrations.vllm_omni.kv_utils import get_local_tp_rank, get_tp_world_size
from omnikv.integrations.vllm_omni.parallel import read_layout
from omnikv.integrations.vllm_omni.sender_book import SenderBook
from omnikv.integrations.vllm_omni.sending import SendingStage
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig
from omnikv.tensors.pack import KVCacheTransferData
from omnikv.tensors.place import has_free_memory, move_tensors, record_current_stream

__all__ = [
    "KVCacheTransferData",
    "KVPrefetchConsumeError",
    "OmniKVCacheConfig",
    "OmniKVTransferManager",
    "ReceiveRole",
    "_TransferTopoConfig",
    "get_local_tp_rank",
    "get_tp_world_size",
]

logger = logging.getLogger("omnikv.vllm_omni")

_TransferTopoConfig = ReceiveLayout
_Received = tuple[dict[str, Any] | None, int]


class KVPrefetchConsumeError(PayloadLost):
    """A payload was taken from the connector and then lost; fetching again cannot help."""


class OmniKVTransferManager(SendingStage):
    """Sends and receives the KV of one rank of one stage, as engines call it. `counters` say what came of it."""

    def __init__(self, config: OmniKVCacheConfig, *, async_prefetch: bool = False) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self.send_stages = settings.send_stages(config)
        self.recv_stages = settings.recv_stages(config)
        # An engine sets these to build keys, or to join and cut payloads, in its own way.
        self.kv_send_key_builder: Callable[..., Any] | None = None
        self.kv_recv_key_builder: Callable[..., Any] | None = None
        self.kv_payload_merger: Callable[..., Any] | None = None
        self.kv_payload_slicer: Callable[..., Any] | None = None
        self._tp_topo = settings.choose_topology(
            config, local_rank=get_local_tp_rank(), detected_tp=get_tp_world_size()
        )
        self._topo_config: ReceiveLayout | None = None
        self._senders = SenderBook(self.recv_stages[0], self.counters)
        # None: not opened yet. False: could not be opened, and is not tried again.
        self._connector: Any = None
        self._closing = threading.Event()
        self._together = GroupReceive(
            settings.vote_rules(config), lambda: (config.recv_timeout, config.kv_vote_timeout), self.counters
        )
        self._async_prefetch = async_prefetch
        self._prefetcher = Prefetcher()
        if config.need_send_cache and config.connector_config:
            _ = self.connector  # A sender listens from the start.

    @classmethod
    def from_od_config(cls, config: Any) -> OmniKVTransferManager:
        """A manager for a stage whose configuration carries `omni_kv_config`."""
        raw = getattr(config, "omni_kv_config", None)
        has_companion = getattr(config, "cfg_kv_collect_func", None) is not None
        prefetch = settings.wants_async_prefetch(raw, has_companion=has_companion)
        return cls(settings.read_settings(raw, async_prefetch=prefetch), async_prefetch=prefetch)

    from_model_config = from_od_config

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, model_config: Any) -> OmniKVTransferManager:
        """A manager from the model's `omni_kv_config`, else from the connector in vLLM's `kv_transfer_config`."""
        if isinstance(getattr(model_config, "omni_kv_config", None), dict):
            return cls.from_od_config(model_config)
        connector = settings.connector_of_transfer_config(getattr(vllm_config, "kv_transfer_config", None))
        return cls(OmniKVCacheConfig(connector_config=connector))

    @property
    def tp_topology(self) -> KVTPTopology:
        """The parallel sizes in force and this rank's place."""
        return self._tp_topo

    @property
    def topo_config(self) -> ReceiveLayout:
        """This rank's role and groups, read once when first needed."""
        if self._topo_config is None:
            self._topo_config = read_layout(self._tp_topo)
        return self._topo_config

    @property
    def connector(self) -> Any:
        """The connector, opened when first needed; None when there is none or it could not be opened."""
        if self._connector is None:
            self._connector = open_or_log(self.config, self._tp_topo, self.counters)
        return None if self._connector is False else self._connector

    get_connector = connector

    def close(self) -> None:
        """Stop waiting, join the prefetch thread and close the connector. Idempotent."""
        self._closing.set()
        try:
            self._prefetcher.close()
            self._together.close()
        finally:
            connector, self._connector = self._connector, False
            if connector:
                connector.close()

    def shutdown_prefetch(self) -> None:
        """Drop what was prefetched and join the thread; receives in the foreground still work."""
        self._prefetcher.close()

    # Where the sender is

    def update_sender_info(self, sender_info: dict[str, Any], sender_stage_id: str | int | None = None) -> None:
        """Remember where the source stage's rank 0 listens; what cannot be used makes the next receive fail at once."""
        if not self.config.need_recv_cache and (self.config.connector_config or {}).get("role") != "receiver":
            return
        address = self._senders.update(sender_info, sender_stage_id)
        if address is not None:
            point_at_sender(self._connector, self.config.connector_config, address, self._tp_topo.local_rank)

    @property
    def _sender_base_host(self) -> str | None:
        return self._senders.host

    @property
    def _sender_base_zmq_port(self) -> int | None:
        return self._senders.base_port

    def _resolve_sender_info(
        self, sender_info: dict[str, Any], sender_stage_id: str | int | None = None
    ) -> dict[str, Any] | None:
        return self._senders.resolve(sender_info, sender_stage_id)

    # Receiving

    def receive_kv_cache_for_request(
        self,
        request_id: str,
        target_device: torch.device | None = None,
        *,
        sender_info: dict[str, Any] | None = None,
    ) -> _Received:
        """`(payload, nbytes)` for this rank, or `(None, 0)` when it did not come; the cause is logged once.

        Raises:
            KVPrefetchConsumeError: it came and was lost afterwards.
        """
        try:
            return self._receive(request_id, target_device, sender_info, self._together.find(request_id))
        except PayloadLost as error:
            self.counters["receive_failed"] += 1
            raise KVPrefetchConsumeError(str(error), request_id=request_id) from error
        except OmniKVError as error:
            self.counters["receive_failed"] += 1
            self._together.request(request_id).failures[request_id] = str(error)
            logger.error("KV of request %s was not received: %s", request_id, error)
            return None, 0

    def _receive(
        self, request_id: str, device: torch.device | None, sender_info: Any, request: OpenRequest | None = None
    ) -> _Received:
        if not self.config.need_recv_cache or is_dummy_request_id(request_id):
            return None, 0
        deadline = self._together.request(request_id if request is not None else None).deadlines.fetch
        route = self._receive_route(sender_info)
        connector = self.connector
        if connector is None:
            raise ConfigError(f"this stage has no connector to receive request {request_id!r} through")
        received = receive_kv(
            connector,
            request_id,
            route,
            deadline=deadline,
            device=device,
            closing=self._closing,
            hold=request is not None,
        )
        if request is not None:
            request.held.append(received)
        self.counters["received"] += 1
        return received.data, received.nbytes

    def _receive_route(self, sender_info: Any) -> ReceiveRoute:
        return ReceiveRoute(
            stages=Stages(*settings.require_edge("a source stage and stage_id", self.recv_stages)),
            topo=self._tp_topo,
            address=self._senders.for_receive(sender_info),
            address_every_shard=sender_info is not None,
            key_hook=self.kv_recv_key_builder,
            merger=self.kv_payload_merger,
            slicer=self.kv_payload_slicer,
        )

    def receive_kv_cache(self, req: Any, target_device: torch.device | None = None) -> bool:
        """Whether the request's primary KV came and was set on it."""
        sender_info = getattr(req, "kv_sender_info", None)
        if sender_info:
            self.update_sender_info(sender_info, sender_stage_id=self.recv_stages[0])
        request_id = self._resolve_request_id(req)
        if not request_id:
            logger.warning("a request without an id cannot receive KV")
            return False
        data, _ = self.receive_kv_cache_for_request(request_id, target_device)
        if data:
            self.apply_kv_cache_to_request(req, data)
        return bool(data)

    def apply_kv_cache_to_request(self, req: Any, data: dict[str, Any]) -> None:
        """Set a received payload on the request, and on its sampling parameters where it has them."""
        roles.apply_payload(req, roles.received_fields(data, SimpleNamespace))

    def receive_multi_kv_cache(
        self,
        req: Any,
        cfg_kv_collect_func: Collector | None = None,
        target_device: torch.device | None = None,
    ) -> bool:
        """Whether the primary KV came; guidance companions are collected by the model's function and set as well.

        All of them share one deadline.
        """
        with self._together.opened(req, self._resolve_request_id) as request:
            received = self.receive_kv_cache(req, target_device)
            collect_companions(req, cfg_kv_collect_func, self, target_device, request=request, counters=self.counters)
            return received

    def receive_multi_kv_cache_distributed(
        self,
        req: Any,
        cfg_kv_collect_func: Collector | None = None,
        target_device: torch.device | None = None,
    ) -> bool:
        """Whether this rank holds the request's KV, after its group voted and leaders handed theirs on."""
        return self._agree_and_hand_on(
            req, target_device, lambda: self.receive_multi_kv_cache(req, cfg_kv_collect_func, target_device)
        )

    def consume_and_distribute_kv_cache(self, req: Any, target_device: torch.device | None = None) -> bool:
        """As `receive_multi_kv_cache_distributed`, with what was prefetched if there is any."""
        return self._agree_and_hand_on(req, target_device, lambda: self._consume_or_receive(req, target_device))

    def _consume_or_receive(self, req: Any, device: torch.device | None) -> bool:
        if self._async_prefetch:
            data, _ = self.consume_prefetched_kv(req)
            if data is not None:
                record_current_stream(data)
                self.apply_kv_cache_to_request(req, data)
                return True
        return self.receive_multi_kv_cache(req, None, device)

    def _agree_and_hand_on(self, req: Any, device: torch.device | None, receive: Callable[[], bool]) -> bool:
        layout = self.topo_config
        with self._together.opened(req, self._resolve_request_id, votes=True) as request:
            received = False if layout.is_follower else self._together.receive(receive, request)
            received = self._tp_local_receive_consensus(req, received)
            if layout.is_leader:
                received = self._together.settle(req, layout, self._resolve_request_id, received=received)
            payload = self.distribute_kv_cache(req, device, received=received)
            if payload is not None:
                self._apply_request_kv_payload(req, payload, device)
            return self._together.conclude(req, layout, request, received=received, handed_on=payload is not None)

    def _tp_local_receive_consensus(self, req: Any, received: bool) -> bool:
        layout = self.topo_config
        if not layout.is_local:
            return received
        return self._together.settle(req, layout, self._resolve_request_id, received=received)

    def distribute_kv_cache(
        self, req: Any, target_device: torch.device | None = None, *, received: bool = False
    ) -> roles.Payload | None:
        """What this rank must set on its request after leaders handed KV on, or None. Every rank must call this.

        Raises:
            VerdictInDoubt: some ranks have the KV and others do not, or the groups do not answer; tear them down.
        """
        return self._together.hand_on(
            req, self.topo_config, self._resolve_request_id, received=received, device=target_device
        )

    # Prefetching

    def start_prefetch(
        self, kv_prefetch_job: Mapping[str, Any] | None, target_device: torch.device | None = None
    ) -> None:
        """Begin to fetch the next request in the background, unless prefetching is off or the job says too little."""
        if not (self._async_prefetch and self.config.need_recv_cache and kv_prefetch_job):
            return
        request_id, sender_info = kv_prefetch_job.get("request_id"), kv_prefetch_job.get("kv_sender_info")
        # A follower's KV comes from its leader; without a sender of its own a fetch could ask the wrong replica.
        if not request_id or not sender_info or self.topo_config.is_follower:
            return
        if not has_free_memory(target_device, self.config.kv_prefetch_min_free_mem_ratio):
            logger.warning("KV of request %s is not prefetched: too little device memory is free", request_id)
            return
        self._prefetcher.submit(
            request_id, lambda: self._prefetch_payload(request_id, sender_info, target_device), target_device
        )

    def consume_prefetched_kv(self, req: Any) -> _Received:
        """The prefetched payload and its size, or `(None, 0)` when there is none.

        Raises:
            KVPrefetchConsumeError: it was taken from the connector and lost.
        """
        request_id = self._resolve_request_id(req)
        if not request_id:
            return None, 0
        try:
            return self._prefetcher.take(request_id)
        except KVPrefetchConsumeError:
            raise
        except PayloadLost as error:
            raise KVPrefetchConsumeError(str(error), request_id=request_id) from error

    def wait_prefetch(self, timeout: float | None = None) -> bool:
        """Whether no fetch runs in the background any more, at the latest after `timeout` seconds."""
        return self._prefetcher.wait_idle(timeout)

    def _prefetch_payload(self, request_id: str, sender_info: Any, device: torch.device | None) -> _Received:
        try:
            return self._receive(request_id, device, sender_info)
        except OmniKVError as error:
            if error.consumed:
                raise KVPrefetchConsumeError(str(error), request_id=request_id) from error
            logger.warning("KV of request %s was not prefetched: %s", request_id, error)
            return None, 0

    # A request's fields

    _collect_request_kv_payload = staticmethod(roles.collect_payload)
    _clear_request_kv_payload = staticmethod(roles.clear_payload)
    _build_cfg_rank_local_payloads = staticmethod(roles.branch_payloads)

    @staticmethod
    def _apply_request_kv_payload(
        req: Any, kv_payload: roles.Payload, target_device: torch.device | None = None
    ) -> None:
        roles.apply_payload(req, move_tensors(kv_payload, target_device))

    @staticmethod
    def _resolve_request_id(req: Any) -> str | None:
        request_id: str | None = getattr(req, "request_id", None)
        return request_id
