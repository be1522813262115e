"""The receiving half of the published manager: what a stage does for the requests that it is about to run.

Each step is done by a component: where the sender is by `sender_book`, the fetches of a request by
`handoff.open_request`, votes and handing on by `handoff.group_receive`, and the fields of a request by `core.roles`.
`.prefetching` adds what is fetched ahead.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from omnikv.core import roles
from omnikv.core.published_vote import is_dummy_request_id
from omnikv.core.receive_role import ReceiveLayout
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError, OmniKVError, PayloadLost
from omnikv.handoff.engine_connector import Stages
from omnikv.handoff.group_receive import GroupReceive
from omnikv.handoff.keyed_assemble import ReceiveRoute
from omnikv.handoff.keyed_receive import ReceivedPayload
from omnikv.handoff.open_request import OpenRequest
from omnikv.integrations.vllm_omni import settings
from omnikv.integrations.vllm_omni.companions import Collector, collect_companions
from omnikv.integrations.vllm_omni.connectors import point_at_sender
from omnikv.integrations.vllm_omni.sender_book import SenderBook
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig
from omnikv.tensors.place import move_tensors, record_current_stream

logger = logging.getLogger("omnikv.vllm_omni")

# A published payload and its size, or `(None, 0)`.
Received = tuple[dict[str, Any] | None, int]


class KVPrefetchConsumeError(PayloadLost):
    """A payload was taken from the connector and then lost; fetching again cannot help."""


class ReceivingStage(ABC):
    """One rank of a stage that receives; what it receives with belongs to the manager that it is a half of."""

    config: OmniKVCacheConfig
    counters: Counter[str]
    recv_stages: tuple[str | None, str | None]
    kv_recv_key_builder: Callable[..., Any] | None
    kv_payload_merger: Callable[..., Any] | None
    kv_payload_slicer: Callable[..., Any] | None
    _closing: threading.Event
    _connector: Any
    _senders: SenderBook
    _together: GroupReceive
    _tp_topo: KVTPTopology

    @property
    @abstractmethod
    def connector(self) -> Any:
        """The connector to receive through; None when there is none or it could not be opened."""

    @property
    @abstractmethod
    def topo_config(self) -> ReceiveLayout:
        """This rank's role and groups."""

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
    ) -> Received:
        """`(payload, nbytes)` for this rank, or `(None, 0)` when it did not come; the cause is logged once.

        Raises:
            KVPrefetchConsumeError: it came and was lost afterwards.
        """
        if not self.config.need_recv_cache or is_dummy_request_id(request_id):
            return None, 0
        if not request_id:
            logger.warning("a request without an id cannot receive KV")
            return None, 0
        with self._together.opened_id(request_id) as (request, is_alone):
            try:
                received = self._fetch(request, request_id, target_device, sender_info)
            except PayloadLost as error:
                self._note_failure(request, request_id, error)
                raise KVPrefetchConsumeError(str(error), request_id=request_id) from error
            except OmniKVError as error:
                self._note_failure(request, request_id, error)
                return None, 0
            if is_alone:
                self._together.acknowledge(request)
        return received.data, received.nbytes

    def _fetch(
        self, request: OpenRequest, request_id: str, device: torch.device | None, sender_info: Any
    ) -> ReceivedPayload:
        route = self._receive_route(sender_info)
        connector = self.connector
        if connector is None:
            raise ConfigError(f"this stage has no connector to receive request {request_id!r} through")
        return request.fetch(connector, request_id, route, device=device, closing=self._closing)

    def _note_failure(self, request: OpenRequest, request_id: str, error: OmniKVError) -> None:
        request.failures[request_id] = str(error)
        if request_id in request.waiting:
            logger.debug("KV of request %s is waited for in another round: %s", request_id, error)
            return
        self.counters["receive_failed"] += 1
        logger.error("KV of request %s was not received: %s", request_id, error)

    def _receive_route(self, sender_info: Any) -> ReceiveRoute:
        return ReceiveRoute(
            stages=Stages(*settings.require_edge("a source stage and stage_id", self.recv_stages)),
            topo=self._tp_topo,
            address=self._senders.for_receive(sender_info),
            address_every_shard=sender_info is not None,
            key_hook=self.kv_recv_key_builder,
            merger=self.kv_payload_merger,
            slicer=self.kv_payload_slicer,
            num_kv_heads=self.config.kv_num_heads,
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
        # A prefetch fills it on a stream of its own.
        record_current_stream(data)
        roles.apply_payload(req, roles.received_fields(data, SimpleNamespace))

    def receive_multi_kv_cache(
        self,
        req: Any,
        cfg_kv_collect_func: Collector | None = None,
        target_device: torch.device | None = None,
    ) -> bool:
        """Whether the primary KV came; guidance companions are collected by the model's function and set as well.

        All of them share one deadline, and are waited for side by side. In a round that may be followed by another the
        function is not called before all that it may ask for is here, so that it is called once.
        """
        with self._together.opened(req, self._resolve_request_id) as (request, is_alone):
            request.fetches_companions = cfg_kv_collect_func is not None
            received = self.receive_kv_cache(req, target_device)
            if cfg_kv_collect_func is not None and request.can_refetch and (not received or request.must_wait()):
                return received
            collect_companions(req, cfg_kv_collect_func, self, target_device, request=request, counters=self.counters)
            if is_alone and received:
                self._together.acknowledge(request)
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

    def _agree_and_hand_on(self, req: Any, device: torch.device | None, receive: Callable[[], bool]) -> bool:
        layout = self.topo_config
        with self._together.opened(req, self._resolve_request_id) as (request, _):
            received = False if layout.is_follower else self._together.receive(receive, request, layout)
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
