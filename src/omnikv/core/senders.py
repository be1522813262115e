"""Where a request's sender listens, from what an orchestrator tells about its stages.

An orchestrator attaches either one entry `{"host": ..., "zmq_port": ...}` or a table of entries by source stage, whose
keys may be integers or texts. The port is that of the sender's rank 0; each further rank listens one stride higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnikv.core.topology import kv_rank_port
from omnikv.errors import ConfigError

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderAddress:
    """Rank 0 of a sending stage: its host, and its port where one was given."""

    host: str
    base_port: int | None

    def for_rank(self, rank: int | None) -> dict[str, Any] | None:
        """What a connector needs to ask this rank of the sender, or None when no port is known.

        Raises:
            ConfigError: the rank's port would be no port.
        """
        if self.base_port is None:
            return None
        port = kv_rank_port(self.base_port, rank or 0)
        if port > MAX_PORT:
            raise ConfigError(
                f"rank {rank} of the sender at {self.host!r} would listen on port {port}, above {MAX_PORT}: its rank 0 "
                f"is said to listen on {self.base_port}; choose a lower zmq_port"
            )
        return {"source_host": self.host, "source_port": port}


def is_single_entry(sender_info: Any) -> bool:
    """Whether this is one sender's entry rather than a table of them."""
    return isinstance(sender_info, Mapping) and "host" in sender_info


def find_entry(sender_info: Any, stage: str | int | None) -> dict[str, Any]:
    """The entry of the source stage `stage`, or the only one there is.

    A table with one entry serves whatever stage is expected, as in released engines: they key it by number even where
    stages have names, so a differing key alone does not prove a wrong sender. `matches` tells the two cases apart.

    Raises:
        ConfigError: no table, or it has several entries and none, or two that differ, for `stage`; the known stages
            are listed (D12).
    """
    if not isinstance(sender_info, Mapping):
        raise ConfigError(f"sender info must be a table, got {sender_info!r}")
    if is_single_entry(sender_info):
        return dict(sender_info)
    known = {key: dict(entry) for key, entry in sender_info.items() if is_single_entry(entry)}
    own = [entry for key, entry in known.items() if matches(key, stage)]
    usable = own or list(known.values())
    if usable and all(entry == usable[0] for entry in usable):
        return usable[0]
    found = "two entries that differ" if own else "no entry"
    stages = ", ".join(repr(key) for key in known) or "none"
    raise ConfigError(
        f"sender info has {found} for source stage {stage!r}: known stages are {stages}; attach the entry of the "
        "stage that sends, or correct this stage's engine_input_source"
    )


def is_assumed(sender_info: Any, stage: str | int | None) -> bool:
    """Whether `find_entry` takes the only entry although it is kept under another stage's key."""
    return (
        isinstance(sender_info, Mapping)
        and not is_single_entry(sender_info)
        and not any(matches(key, stage) for key, entry in sender_info.items() if is_single_entry(entry))
    )


def matches(key: object, stage: str | int | None) -> bool:
    """Whether a table's key names this stage: 1 and "1" are the same one."""
    return stage is not None and str(key) == str(stage)


def read_address(entry: dict[str, Any]) -> SenderAddress:
    """The address that an entry states.

    Raises:
        ConfigError: the host is no text or the port no port.
    """
    host, port = entry.get("host"), entry.get("zmq_port")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"sender info has no host: {entry!r}")
    if port is None:
        return SenderAddress(host=host, base_port=None)
    number = _whole_number(port)
    if number is None:
        raise ConfigError(f"sender info has zmq_port={port!r}, which is no integer; host is {host!r}")
    if not 1 <= number <= MAX_PORT:
        raise ConfigError(f"sender info has zmq_port={number}, outside 1 to {MAX_PORT}; host is {host!r}")
    return SenderAddress(host=host, base_port=number)


def _whole_number(value: object) -> int | None:
    """The integer that a value states, as text too; None where it states none: 5.5 is no port, nor is True."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if isinstance(value, str) or number == value else None
