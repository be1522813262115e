"""Published connectors over our own transports between hosts: ranks are found by the hosts and ports in the settings.

A sender listens at its `host` and `zmq_port`. A receiver is told where the sender of its own rank listens, by its
settings or by `update_sender_info`; the other ranks' ports follow by the published stride.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from omnikv.core.topology import KV_RANK_PORT_STRIDE, KVTPTopology
from omnikv.errors import ConfigError
from omnikv.handoff.transport_connector import TransportConnector

_ALONE = KVTPTopology(source_tp_size=1, target_tp_size=1, local_rank=0)
_PUBLISHED = frozenset(
    {"role", "host", "zmq_port", "sender_host", "sender_zmq_port", "from_stage", "to_stage", "stage_id"}
)
_DEFAULT_PORT = 50051


class AddressedConnector(TransportConnector):
    """Serves one rank of one stage over `transport_name`. `config` is what a configuration file says.

    What is no published setting goes to the transport: `secret_file`, `pool_nbytes` and so on, but not `lend`.

    Raises:
        ConfigError: a setting is wrong, or the role is not said and `put` and `get` would both need it.
    """

    transport_name: ClassVar[str]

    def __init__(self, config: Mapping[str, Any] | None = None, topology: KVTPTopology = _ALONE) -> None:
        settings = dict(config or {})
        self._sender_host: str | None = settings.get("sender_host")
        self._sender_port: int | None = settings.get("sender_zmq_port")
        options = {name: value for name, value in settings.items() if name not in _PUBLISHED}
        namespace, replica = options.pop("namespace", "default"), options.pop("replica", 0)
        if options.get("lend"):
            raise ConfigError(
                f"{self.transport_name}: a connector copies what it is given and lends nothing, since `put` does not "
                "say when its caller may write there again: leave lend out, or send by omnikv.KVSender"
            )
        role = str(settings.get("role", "sender")).lower()
        if role == "sender":
            host, port = settings.get("host") or "127.0.0.1", int(settings.get("zmq_port", _DEFAULT_PORT))
            options.setdefault("listen", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        elif role == "receiver":
            options.setdefault("peers", self._address_of)
        else:
            raise ConfigError(f"{self.transport_name}: role must be 'sender' or 'receiver', got {role!r}")
        super().__init__(self.transport_name, topology, namespace=namespace, replica=replica, options=options)

    def update_sender_info(self, sender_host: str, sender_zmq_port: int) -> None:
        """Nothing; the sender of this receiver's own rank listens there, and the others by the published stride."""
        self._sender_host, self._sender_port = sender_host, sender_zmq_port

    def _address_of(self, rank: int) -> str | None:
        if not self._sender_host or not self._sender_port or self._sender_host.lower() == "auto":
            return None
        port = self._sender_port + (rank - self._rank) * KV_RANK_PORT_STRIDE
        return f"[{self._sender_host}]:{port}" if ":" in self._sender_host else f"{self._sender_host}:{port}"


class NixlConnector(AddressedConnector):
    """The published name, over our transport `nixl`. Both ends must be ours."""

    transport_name = "nixl"


class OmniKVTcpConnector(AddressedConnector):
    """Our transport `tcp`, by name."""

    transport_name = "tcp"
