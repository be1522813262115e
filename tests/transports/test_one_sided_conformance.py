"""The transports over Mooncake and NIXL pass the suite that is shipped for strangers' ones, where their engines are."""

import importlib

import pytest
from tcp_ends import TcpPair

from omnikv.testing.conformance import transport_scenarios

ENGINES = {"mooncake": "mooncake.engine", "nixl": "nixl_cu12._api"}


@pytest.fixture(autouse=True)
def engine(name_of_transport, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    try:
        return importlib.import_module(ENGINES[name_of_transport])
    except ImportError as error:
        pytest.skip(f"{name_of_transport}'s engine cannot be loaded here: {error}")


@pytest.mark.parametrize(
    ("name", "check"), transport_scenarios(), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("name_of_transport", ENGINES)
def test_transports_over_engines_conform(name_of_transport, name, check):
    check(TcpPair(transport=name_of_transport))
