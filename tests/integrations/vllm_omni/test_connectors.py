"""Which connector the settings open, and what it is told."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType

import pytest

from omnikv.core.senders import SenderAddress
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError, TransportError, TransportUnavailable
from omnikv.handoff.transport_connector import TransportConnector
from omnikv.integrations.vllm_omni.connectors import connector_options, open_connector, open_or_log, point_at_sender
from omnikv.integrations.vllm_omni.settings import OmniKVCacheConfig

TOPOLOGY = KVTPTopology(2, 2, 1)


def config(connector, **more):
    return OmniKVCacheConfig(connector_config=connector, **more)


@pytest.fixture
def engine(monkeypatch):
    """An engine's factory that knows one connector, under the engine's module names."""

    class Spec:
        def __init__(self, name, extra):
            self.name, self.extra = name, extra

    made: list[tuple[str, dict]] = []

    class OmniConnectorFactory:
        error = None

        @classmethod
        def list_registered_connectors(cls):
            return ["EngineConnector", "shm"]

        @classmethod
        def create_connector(cls, spec):
            if cls.error is not None:
                raise cls.error
            made.append((spec.name, spec.extra))
            return "the engine's own"

    for name, content in {
        "vllm_omni": {},
        "vllm_omni.distributed": {},
        "vllm_omni.distributed.omni_connectors": {},
        "vllm_omni.distributed.omni_connectors.utils": {},
        "vllm_omni.distributed.omni_connectors.utils.config": {"ConnectorSpec": Spec},
        "vllm_omni.distributed.omni_connectors.factory": {"OmniConnectorFactory": OmniConnectorFactory},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    OmniConnectorFactory.made = made
    return OmniConnectorFactory


@pytest.mark.parametrize("connector", [None, {}, {"host": "h"}])
def test_settings_without_a_type_open_nothing(connector):
    assert open_connector(config(connector), TOPOLOGY) is None


def test_a_transport_of_ours_needs_no_engine():
    connector = open_connector(
        config({"type": "memory", "namespace": "n", "sender_host": "h", "zmq_port": 1}), TOPOLOGY
    )
    assert isinstance(connector, TransportConnector)
    assert connector.health()["transport"] == "memory"
    connector.close()


def test_an_unknown_type_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'mock' is not known.*SharedMemory.*memory, mooncake, nixl, shm, tcp"):
        open_connector(config({"type": "mock"}), TOPOLOGY)


def test_the_engines_own_connector_is_opened_by_its_factory(engine):
    opened = open_connector(config({"type": "EngineConnector", "size": 4}), TOPOLOGY)
    assert opened == "the engine's own"
    assert engine.made == [("EngineConnector", {"size": 4})]


def test_a_name_that_the_engine_registered_is_the_engines(engine):
    assert open_connector(config({"type": "shm"}), TOPOLOGY) == "the engine's own"


def test_an_engines_connector_that_does_not_start_keeps_its_cause(engine):
    engine.error = OSError("no device")
    with pytest.raises(TransportError, match="no device") as caught:
        open_connector(config({"type": "EngineConnector"}), TOPOLOGY)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_engines_connector_whose_library_is_missing_is_unavailable(engine):
    engine.error = ImportError("no nixl")
    with pytest.raises(TransportUnavailable, match="not installed"):
        open_connector(config({"type": "EngineConnector"}), TOPOLOGY)


def test_a_failure_to_open_is_logged_once_with_its_cause(caplog):
    counters = Counter()
    assert open_or_log(config({"type": "mock"}), TOPOLOGY, counters) is False
    assert counters == {"connector_failed": 1}
    assert "'mock' is not known" in caplog.text


TRANSFER = {"type": "MooncakeTransferEngineConnector", "zmq_port": 50051}


def test_a_sender_that_listens_is_told_its_role_its_edge_and_its_own_port():
    options = connector_options(config(TRANSFER, from_stage="2", to_stage="3", need_send_cache=True), TOPOLOGY)
    assert options == {"role": "sender", "from_stage": "2", "to_stage": "3", "zmq_port": 50051 + 100 + 16 + 2}


def test_a_receiver_keeps_the_port_of_its_settings():
    options = connector_options(config(TRANSFER, need_recv_cache=True), TOPOLOGY)
    assert options == {"role": "receiver", "from_stage": "0", "to_stage": "1", "zmq_port": 50051}


def test_a_nixl_receiver_does_not_listen_on_its_senders_port():
    options = connector_options(config({"type": "NixlConnector", "zmq_port": 5}, need_recv_cache=True), TOPOLOGY)
    assert "zmq_port" not in options


def test_a_port_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("KV_PORT", "6000")
    options = connector_options(config({**TRANSFER, "zmq_port": "$KV_PORT"}, need_send_cache=True), TOPOLOGY)
    assert options["zmq_port"] == 6116


@pytest.mark.parametrize("port", ["$NOT_SET_ANYWHERE", "many", None])
def test_a_port_that_is_none_is_an_error(port):
    with pytest.raises(ConfigError, match="zmq_port"):
        connector_options(config({**TRANSFER, "zmq_port": port}), TOPOLOGY)


def test_other_connectors_get_their_settings_as_they_are():
    assert connector_options(config({"type": "SharedMemoryConnector", "zmq_port": 7}), TOPOLOGY) == {"zmq_port": 7}


ADDRESS = SenderAddress(host="h", base_port=1000)


def test_settings_and_connector_learn_the_sender_of_this_rank():
    told, settings = [], {"type": "x"}

    class Connector:
        def update_sender_info(self, host, port):
            told.append((host, port))

    point_at_sender(Connector(), settings, ADDRESS, local_rank=2)
    assert told == [("h", 1032)]
    assert settings == {"type": "x", "sender_host": "h", "sender_zmq_port": 1032}


def test_a_connector_that_refuses_is_told_by_its_attributes():
    class Connector:
        sender_host = None

        def update_sender_info(self, host, port):
            raise TypeError("older signature")

    connector = Connector()
    point_at_sender(connector, None, ADDRESS, local_rank=0)
    assert connector.sender_host == "h"
    assert not hasattr(connector, "sender_zmq_port")


@pytest.mark.parametrize("connector", [None, False, object()])
def test_a_connector_that_cannot_be_told_is_left_alone(connector):
    settings = {}
    point_at_sender(connector, settings, ADDRESS, local_rank=0)
    assert settings == {}
