"""Transports by name: built in, registered by hand, or brought by an installed package of a stranger."""

from __future__ import annotations

import sys

import pytest

from omnikv import Edge
from omnikv.errors import ConfigError, TransportUnavailable
from omnikv.testing.conformance import NamedPair, transport_scenarios
from omnikv.transports.base import Endpoint
from omnikv.transports.memory import MemoryTransport
from omnikv.transports.registry import available_transports, open_transport, register_transport, unregister_transport

STRANGER = """
from omnikv.transports.memory import MemoryTransport


class Parcel(MemoryTransport):
    name = "parcel"


def broken(endpoint):
    return len(endpoint)
"""
ENTRY_POINTS = """[omnikv.transports]
parcel = omnikv_parcel:Parcel
parcel-broken = omnikv_parcel:broken
parcel-gone = omnikv_parcel:Gone
parcel-missing = omnikv_parcel_missing:Parcel
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A package as pip leaves it: a module, and metadata that names its entry points."""
    (tmp_path / "omnikv_parcel.py").write_text(STRANGER)
    info = tmp_path / "omnikv_parcel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omnikv-parcel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("omnikv_parcel", None)


@pytest.fixture
def endpoint(namespace):
    return Endpoint(
        edge=Edge(from_stage="a", to_stage="b", namespace=namespace), side="source", rank=0, peer_ranks=(0,)
    )


@pytest.fixture
def namespace(tmp_path):
    return f"registry-{tmp_path.name}"


def test_a_strangers_package_is_found_by_name_and_proven_by_the_shipped_scenarios(stranger):
    assert "parcel" in available_transports()
    for _, check in transport_scenarios():
        check(NamedPair(transport="parcel"))


@pytest.mark.parametrize("name", ["parcel-gone", "parcel-missing"])
def test_a_strangers_package_that_cannot_be_loaded_is_unavailable(stranger, endpoint, name):
    with pytest.raises(TransportUnavailable, match=f"transport '{name}' cannot be loaded"):
        open_transport(name, endpoint)


def test_a_type_error_inside_of_a_transport_is_not_called_a_wrong_option(stranger, endpoint):
    with pytest.raises(TypeError, match="has no len"):
        open_transport("parcel-broken", endpoint)


@pytest.mark.parametrize("options", [{"poolbytes": 1}, {1: 2}])
def test_options_that_a_transport_does_not_take_are_named(endpoint, options):
    with pytest.raises(ConfigError, match="transport 'memory' does not take the options"):
        open_transport("memory", endpoint, options)


def test_an_unknown_name_is_told_the_known_ones(endpoint):
    known = ", ".join(available_transports())
    with pytest.raises(ConfigError, match=f"unknown transport 'carrier'; available: {known}"):
        open_transport("carrier", endpoint)


def test_a_name_is_registered_once(endpoint):
    register_transport("mine", MemoryTransport)
    try:
        with pytest.raises(ConfigError, match="transport 'mine' is already registered"):
            register_transport("mine", MemoryTransport)
        with open_transport("mine", endpoint) as transport:
            assert isinstance(transport, MemoryTransport)
    finally:
        unregister_transport("mine")
    with pytest.raises(ConfigError, match="transport 'memory' is already registered"):
        register_transport("memory", MemoryTransport)
