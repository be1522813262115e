"""The connector that a stage's settings ask for: the engine's own, or one over a transport of omnikv.

`connector_config` is `{"type": name, ...}`. A name that the engine's factory has registered is the engine's. Without an
engine the published names are connectors of ours that speak with released ones; any other name is looked up among our
transports, so `{"type": "shm"}` works with and without an engine.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from omnikv.core.senders import SenderAddress
from omnikv.core.topology import KVTPTopology, kv_rank_port
from omnikv.errors import ConfigError, OmniKVError, TransportError, TransportUnavailable
from omnikv.handoff.transport_connector import TransportConnector
from omnikv.integrations.vllm_omni.kv_utils import kv_zmq_port
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig
from omnikv.transports.registry import available_transports

logger = logging.getLogger("omnikv.vllm_omni")

_FACTORY = "vllm_omni.distributed.omni_connectors.factory"
_SPEC = "vllm_omni.distributed.omni_connectors.utils.config"
# Connectors that listen on a port of their own and are told their role (vllm-omni's config module).
TRANSFER_ENGINES = frozenset(
    {
        "MooncakeTransferEngineConnector",
        "MoriTransferEngineConnector",
        "NixlConnector",
        "OmniKVTcpConnector",
        "YuanrongTransferEngineConnector",
    }
)
# Connectors of ours under published names; each is loaded when it is asked for.
_PUBLISHED: Mapping[str, tuple[str, str]] = {
    "MooncakeTransferEngineConnector": ("omnikv.integrations.vllm_omni.mooncake", "MooncakeTransferEngineConnector"),
    "NixlConnector": ("omnikv.integrations.vllm_omni.addressed", "NixlConnector"),
    "OmniKVTcpConnector": ("omnikv.integrations.vllm_omni.addressed", "OmniKVTcpConnector"),
    "SharedMemoryConnector": ("omnikv.integrations.vllm_omni.shared_memory", "SharedMemoryConnector"),
}
_DEFAULT_PORT = 50051
# What the manager and the engine write into a connector's settings; a transport of ours finds its peers by rank.
_NOT_FOR_TRANSPORTS = frozenset(
    {"type", "role", "host", "zmq_port", "sender_host", "sender_zmq_port", "from_stage", "to_stage"}
)


def open_connector(config: OmniKVCacheConfig, topology: KVTPTopology) -> Any:
    """The connector of these settings, or None when they name none.

    Raises:
        ConfigError: neither the engine nor omnikv knows a connector of this name, or its settings are wrong.
        TransportError: the engine's connector could not start; its own error is the cause.
    """
    settings = config.connector_config or {}
    name = settings.get("type")
    if not name:
        return None
    factory = _engine_factory(name)
    if factory is not None:
        return _open_engine_connector(factory, name, config, topology)
    if name in _PUBLISHED:
        return _open_published(name, connector_options(config, topology), topology)
    if name not in available_transports():
        raise ConfigError(
            f"connector type {name!r} is not known: no engine registers it, omnikv's connectors are "
            f"{', '.join(sorted(_PUBLISHED))}, and its transports {', '.join(available_transports())}"
        )
    options = {key: value for key, value in settings.items() if key not in _NOT_FOR_TRANSPORTS}
    namespace, replica = options.pop("namespace", "default"), options.pop("replica", 0)
    return TransportConnector(name, topology, namespace=namespace, replica=replica, options=options)


def open_or_log(config: OmniKVCacheConfig, topology: KVTPTopology, counters: Counter[str]) -> Any:
    """What `open_connector` gives; False, with the cause logged and counted, when it fails."""
    try:
        return open_connector(config, topology)
    except OmniKVError as error:
        counters["connector_failed"] += 1
        logger.error("the KV connector could not be opened, so no KV moves: %s", error)
        return False


def connector_options(config: OmniKVCacheConfig, topology: KVTPTopology) -> dict[str, Any]:
    """What an engine's connector is constructed with: its settings, and for those that listen, role, edge and port.

    Raises:
        ConfigError: the base port is no integer, or names an environment variable that is not set.
        TopologyError: the port of this rank would be no port.
    """
    settings = config.connector_config or {}
    options = {key: value for key, value in settings.items() if key != "type"}
    if settings.get("type") in TRANSFER_ENGINES:
        options["from_stage"] = "0" if config.from_stage is None else str(config.from_stage)
        options["to_stage"] = "1" if config.to_stage is None else str(config.to_stage)
        stage = options["from_stage"]
        port = kv_zmq_port(_base_port(options), int(stage) if stage.isdecimal() else 0, topology.local_rank)
        if config.need_send_cache:
            options |= {"role": "sender", "zmq_port": port}
        elif config.need_recv_cache:
            options["role"] = "receiver"
    if settings.get("type") == "NixlConnector" and options.get("role") == "receiver":
        # The port in the settings is the sender's; this connector would listen on it.
        options.pop("zmq_port", None)
    return options


def point_at_sender(connector: Any, settings: dict[str, Any] | None, address: SenderAddress, local_rank: int) -> None:
    """Nothing; connector and settings now name the sender of this receiver's own rank, as released engines do."""
    port = None if address.base_port is None else kv_rank_port(address.base_port, local_rank)
    if settings:
        settings |= {"sender_host": address.host, "sender_zmq_port": port}
    if not connector or not hasattr(connector, "update_sender_info"):
        return
    try:
        connector.update_sender_info(address.host, port)
    # edge: an engine's connector may raise anything here; its plain attributes say the same.
    except Exception:
        logger.exception("the connector did not take its sender's address; setting its attributes instead")
        for attribute, value in (("sender_host", address.host), ("sender_zmq_port", port)):
            if hasattr(connector, attribute):
                setattr(connector, attribute, value)


def _engine_factory(name: str) -> Any:
    """The engine's factory if it has registered `name`, else None; an engine is loaded only for a name not ours."""
    if "vllm_omni" not in sys.modules and name in available_transports():
        return None
    try:
        factory = importlib.import_module(_FACTORY).OmniConnectorFactory
    except ImportError:
        return None
    return factory if name in factory.list_registered_connectors() else None


def _open_engine_connector(factory: Any, name: str, config: OmniKVCacheConfig, topology: KVTPTopology) -> Any:
    options = connector_options(config, topology)
    try:
        spec = importlib.import_module(_SPEC).ConnectorSpec(name=name, extra=options)
        return factory.create_connector(spec)
    except ImportError as error:
        raise TransportUnavailable(f"the engine's connector {name!r} is not installed: {error}") from error
    # edge: an engine's connector may raise anything when it starts.
    except Exception as error:
        raise TransportError(f"the engine's connector {name!r} did not start: {error}") from error


def _open_published(name: str, options: dict[str, Any], topology: KVTPTopology) -> Any:
    module, attribute = _PUBLISHED[name]
    connector = getattr(importlib.import_module(module), attribute)
    return connector(options, topology) if issubclass(connector, TransportConnector) else connector(options)


def _base_port(options: Mapping[str, Any]) -> int:
    given = options.get("zmq_port", _DEFAULT_PORT)
    try:
        return int(os.path.expandvars(given) if isinstance(given, str) else given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"zmq_port must be an integer after environment expansion, got {given!r}") from error
