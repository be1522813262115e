"""Where a request's sender listens, from what an orchestrator tells about its stages.

An orchestrator attaches either one entry `{"host": ..., "zmq_port": ...}` or a table of entries by source stage, whose
keys may be integers or texts. The port is that of the sender's rank 0; each further rank listens one stride higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnikv.core.topology import kv_rank_port
from omnikv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderAddress:
    """Rank 0 of a sending stage: its host, and its port where one was given."""

    host: str
    base_port: int | None

    def for_rank(self, rank: int | None) -> dict[str, Any] | None:
        """What a connector needs to ask this rank of the sender, or None when no port is known."""
        if self.base_port is None:
            return None
        return {"source_host": self.host, "source_port": kv_rank_port(self.base_port, rank or 0)}


def is_single_entry(sender_info: Any) -> bool:
    """Whether this is one sender's entry rather than a table of them."""
    return isinstance(sender_info, dict) and "host" in sender_info


def find_entry(sender_info: Any, stage: str | int | None) -> dict[str, Any]:
    """The entry of the source stage `stage`, or the only one there is.

    A table with one entry serves whatever stage is expected, as in released engines: they key it by number even where
    stages have names, so a differing key alone does not prove a wrong sender. `matches` tells the two cases apart.

    Raises:
        ConfigError: no table, or it has several entries and none for `stage`; the known stages are listed (D12).
    """
    if not isinstance(sender_info, dict):
        raise ConfigError(f"sender info must be a table, got {sender_info!r}")
    if is_single_entry(sender_info):
        return dict(sender_info)
    known: dict[Any, dict[str, Any]] = {key: entry for key, entry in sender_info.items() if is_single_entry(entry)}
    for key, entry in known.items():
        if matches(key, stage):
            return entry
    if len(known) == 1:
        return next(iter(known.values()))
    stages = ", ".join(repr(key) for key in known) or "none"
    raise ConfigError(
        f"sender info has no entry for source stage {stage!r}: known stages are {stages}; attach the entry of the "
        "stage that sends, or correct this stage's engine_input_source"
    )


def is_assumed(sender_info: Any, stage: str | int | None) -> bool:
    """Whether `find_entry` takes the only entry although it is kept under another stage's key."""
    return (
        isinstance(sender_info, dict)
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
    try:
        number = int(port)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sender info has zmq_port={port!r}, which is no integer; host is {host!r}") from error
    if not 1 <= number <= 65535:
        raise ConfigError(f"sender info has zmq_port={number}, outside 1 to 65535; host is {host!r}")
    return SenderAddress(host=host, base_port=number)
