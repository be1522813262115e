"""Transports by name: built-in ones are loaded when first asked for, strangers come through entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import Any

from omnikv.errors import ConfigError, TransportUnavailable
from omnikv.transports.base import Endpoint, Transport
from omnikv.transports.bounded import BoundedTransport

TransportFactory = Callable[..., Transport]
ENTRY_POINT_GROUP = "omnikv.transports"

_BUILT_IN = {
    "faulty": "omnikv.transports.faulty:FaultyTransport",
    "memory": "omnikv.transports.memory:MemoryTransport",
    "mooncake": "omnikv.transports.mooncake:MooncakeTransport",
    "nixl": "omnikv.transports.nixl:NixlTransport",
    "shm": "omnikv.transports.shm:ShmTransport",
    "tcp": "omnikv.transports.tcp:TcpTransport",
}
_registered: dict[str, TransportFactory] = {}


def register_transport(name: str, factory: TransportFactory) -> None:
    """Nothing; `open_transport(name, endpoint, options)` will call `factory(endpoint, **options)`.

    Raises:
        ConfigError: the name is taken.
    """
    if name in available_transports():
        raise ConfigError(f"transport {name!r} is already registered; choose another name")
    _registered[name] = factory


def unregister_transport(name: str) -> None:
    """Nothing; forgets a factory that `register_transport` took. Unknown names are ignored."""
    _registered.pop(name, None)


def available_transports() -> list[str]:
    """The names that `open_transport` knows, sorted."""
    strangers = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return sorted({*_BUILT_IN, *_registered, *strangers})


def open_transport(name: str, endpoint: Endpoint, options: Mapping[str, Any] | None = None) -> Transport:
    """A transport of the kind `name` that serves `endpoint` and keeps deadlines; the caller closes it.

    Raises:
        ConfigError: no such transport, or it does not take these options.
        TransportUnavailable: its library is missing or it cannot start on this machine.
    """
    factory = _find_factory(name)
    wanted = dict(options or {})
    try:
        # Bound rather than called: a TypeError from inside of the factory is its own.
        signature(factory).bind(endpoint, **wanted)
    except TypeError as error:
        hint = "; lend is an option of nixl alone, the others copy what they send" if "lend" in wanted else ""
        raise ConfigError(f"transport {name!r} does not take the options {list(wanted)}: {error}{hint}") from error
    transport = factory(endpoint, **wanted)
    return transport if transport.capabilities.keeps_deadlines else BoundedTransport(transport)


def _find_factory(name: str) -> TransportFactory:
    if name in _registered:
        return _registered[name]
    try:
        if name in _BUILT_IN:
            module, _, attribute = _BUILT_IN[name].partition(":")
            factory: TransportFactory = getattr(import_module(module), attribute)
            return factory
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
            loaded: TransportFactory = entry.load()
            return loaded
    except (ImportError, AttributeError) as error:
        raise TransportUnavailable(f"transport {name!r} cannot be loaded: {error}", transport=name) from error
    raise ConfigError(f"unknown transport {name!r}; available: {', '.join(available_transports())}")
