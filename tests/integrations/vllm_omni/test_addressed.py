"""Connectors over our own transports, configured as a released engine's file says: hosts, ports, roles."""

from __future__ import annotations

import contextlib
import importlib
import socket
import time
import uuid

import pytest

from omnikv.core.topology import KV_RANK_PORT_STRIDE, KVTPTopology
from omnikv.errors import ConfigError
from omnikv.integrations.vllm_omni.addressed import NixlConnector, OmniKVTcpConnector
from omnikv.integrations.vllm_omni.connectors import open_connector
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig
from omnikv.integrations.vllm_omni.shared_memory import SharedMemoryConnector

HOST = "127.0.0.1"


def free_ports(count):
    """The first of `count` ports, a rank's stride apart, that are free now."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1]
            try:
                for rank in range(1, count):
                    stack.enter_context(socket.create_server((HOST, first + rank * KV_RANK_PORT_STRIDE)))
            except (OSError, OverflowError):
                continue
            return first


@pytest.fixture
def namespace():
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.mark.parametrize("connector", [OmniKVTcpConnector, NixlConnector])
def test_a_payload_goes_from_the_senders_port_to_a_receiver_that_is_told_of_it_later(connector, namespace, monkeypatch):
    if connector is NixlConnector:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        try:
            importlib.import_module("nixl_cu12._api")
        except ImportError as error:
            pytest.skip(f"NIXL cannot be loaded here: {error}")
    port = free_ports(1)
    common = {"namespace": namespace}
    with contextlib.ExitStack() as stack:
        sender = connector({**common, "role": "sender", "host": HOST, "zmq_port": port, "pool_nbytes": 1 << 20})
        stack.callback(sender.close)
        receiver = connector({**common, "role": "receiver", "sender_host": "auto", "landing_nbytes": 1 << 20})
        stack.callback(receiver.close)
        assert sender.put("0", "1", "r1", b"payload")[:2] == (True, 7)
        assert receiver.get("0", "1", "r1") is None
        receiver.update_sender_info(HOST, port)
        got, nbytes = receiver.get_with_deadline("0", "1", "r1", deadline=time.monotonic() + 30)
        assert (bytes(got.tensor.tolist()), nbytes) == (b"payload", 7)
        got.release()


def test_a_receiver_finds_every_rank_of_its_sender_by_the_published_stride(namespace):
    topology = KVTPTopology(2, 1, 0)
    port = free_ports(2)
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            config = {"role": "sender", "host": HOST, "zmq_port": port + rank * KV_RANK_PORT_STRIDE}
            sender = OmniKVTcpConnector({**config, "namespace": namespace}, KVTPTopology(2, 1, rank))
            stack.callback(sender.close)
            sender.put("0", "1", "r1", bytes([rank]))
        told = {"role": "receiver", "sender_host": HOST, "sender_zmq_port": port, "namespace": namespace}
        receiver = OmniKVTcpConnector(told, topology)
        stack.callback(receiver.close)
        for rank in range(2):
            metadata = {"source_rank": rank}
            got, _ = receiver.get_with_deadline("0", "1", "r1", metadata, deadline=time.monotonic() + 30)
            assert got.tensor.tolist() == [rank]
            got.release()


def test_a_role_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="role must be 'sender' or 'receiver', got 'both'"):
        OmniKVTcpConnector({"role": "both"})


def test_settings_that_name_a_published_connector_open_ours_where_no_engine_is(namespace):
    port = free_ports(1)
    settings = {"type": "OmniKVTcpConnector", "host": HOST, "zmq_port": port, "namespace": namespace}
    config = OmniKVCacheConfig(connector_config=settings, from_stage="0", to_stage="1", need_send_cache=True)
    with contextlib.closing(open_connector(config, KVTPTopology(1, 1, 0))) as connector:
        assert isinstance(connector, OmniKVTcpConnector)
        connector.put("0", "1", "r1", b"x")
        # By the published formula: the base, 100, and the stage.
        with socket.create_connection((HOST, port + 100)):
            pass
    shared = OmniKVCacheConfig(connector_config={"type": "SharedMemoryConnector", "shm_threshold_bytes": 1})
    assert isinstance(open_connector(shared, KVTPTopology(1, 1, 0)), SharedMemoryConnector)


@pytest.mark.parametrize("connector", [OmniKVTcpConnector, NixlConnector])
def test_a_connector_refuses_to_lend_since_its_caller_would_not_know_until_when(connector, namespace):
    with pytest.raises(ConfigError, match=r"lends nothing.*leave lend out, or send by omnikv.KVSender"):
        connector({"role": "sender", "host": HOST, "zmq_port": 0, "namespace": namespace, "lend": True})
