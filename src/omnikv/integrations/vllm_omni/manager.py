"""The published KV transfer manager: an engine's names and signatures over omnikv's components.

Everything here is a name, an argument list and a few lines that say which component does the work:

    settings, connector, ranks    .settings, .connectors, .parallel
    sending                       .sending, handoff.keyed_extract, handoff.keyed_send
    receiving                     .receiving, .prefetching, handoff.group_receive

`get_local_tp_rank` and `get_tp_world_size` are looked up as globals of this module, where engines' tests patch them.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from omnikv.core.receive_role import ReceiveLayout, ReceiveRole
from omnikv.core.topology import KVTPTopology
from omnikv.handoff.group_receive import GroupReceive
from omnikv.handoff.keyed_receive import KeyedFetch
from omnikv.handoff.prefetcher import Prefetcher
from omnikv.integrations.vllm_omni import settings
from omnikv.integrations.vllm_omni.connectors import open_or_log
from omnikv.integrations.vllm_omni.kv_utils import get_local_tp_rank, get_tp_world_size
from omnikv.integrations.vllm_omni.parallel import read_layout
from omnikv.integrations.vllm_omni.prefetching import PrefetchingStage
from omnikv.integrations.vllm_omni.receiving import KVPrefetchConsumeError
from omnikv.integrations.vllm_omni.sender_book import SenderBook
from omnikv.integrations.vllm_omni.sending import SendingStage
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig
from omnikv.tensors.pack import KVCacheTransferData

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

_TransferTopoConfig = ReceiveLayout


class OmniKVTransferManager(SendingStage, PrefetchingStage):
    """Sends and receives the KV of one rank of one stage, as engines call it. `counters` say what came of it."""

    def __init__(self, config: OmniKVCacheConfig, *, async_prefetch: bool = False) -> None:
        """A manager of this rank, which listens from now on if its stage sends.

        Raises:
            ConfigError: a setting that is none; a connector that cannot be opened is logged and counted instead.
        """
        settings.require_sound(config)
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
            settings.vote_rules(config),
            lambda: (config.recv_timeout, config.kv_vote_timeout),
            self.counters,
            channel_address=settings.channel_address(config, os.environ),
        )
        self._async_prefetch = async_prefetch
        self._prefetcher: Prefetcher[KeyedFetch] = Prefetcher()
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
        """A manager from the model's `omni_kv_config`, else from the connector in vLLM's `kv_transfer_config`.

        Where the settings do not say how many KV heads the model has, vLLM's configuration does.
        """
        if isinstance(getattr(model_config, "omni_kv_config", None), dict):
            manager = cls.from_od_config(model_config)
        else:
            connector = settings.connector_of_transfer_config(getattr(vllm_config, "kv_transfer_config", None))
            manager = cls(OmniKVCacheConfig(connector_config=connector))
        if manager.config.kv_num_heads is None:
            manager.config.kv_num_heads = settings.num_kv_heads_of(model_config, vllm_config)
        return manager

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
