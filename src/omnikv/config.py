"""Settings of a handoff: resolved once from keywords, a mapping or the environment, then frozen."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from omnikv.errors import ConfigError

ENVIRONMENT_PREFIX = "OMNIKV_"
# The host's memory is saturated long before so many threads copy.
MAX_PACK_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How payloads travel and how long a rank waits.

    Attributes:
        transport: name of a registered transport.
        options: keyword options of that transport. They may hold secrets, so they are never shown.
        receive_timeout_s: how long a receive waits for its payloads when the call does not say.
        vote_timeout_s: how long after the receive's deadline a rank waits for its group's ruling.
        slice_s: how long a round of a receive in a group waits before the ranks vote on how it goes; longer where a
            request's time would hold more rounds than a vote has.
        payload_ttl_s: how long a sender keeps a payload that no receiver is interested in; may be infinite.
        admission_timeout_s: how long a send waits for room in a full transport when the call does not say; 0 is not.
        checksum: whether senders carry a checksum of the payload; None means wherever the bytes leave shared memory.
        pack_threads: how many threads of a sender write a payload; None means two for large ones, where there are as
            many cores.

    Raises:
        ConfigError: a value has the wrong type or range.
    """

    transport: str = "shm"
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    receive_timeout_s: float = 30.0
    vote_timeout_s: float = 10.0
    slice_s: float = 0.5
    payload_ttl_s: float = 300.0
    admission_timeout_s: float = 0.0
    checksum: bool | None = None
    pack_threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.transport, str) or not self.transport:
            raise ConfigError(f"transport must be the name of a transport, got {self.transport!r}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options must map option names to values, got a {type(self.options).__name__}")
        for name in ("receive_timeout_s", "vote_timeout_s", "slice_s"):
            self._require_seconds(name, "a finite number of seconds above 0", lambda value: 0 < value < math.inf)
        self._require_seconds("payload_ttl_s", "a number of seconds above 0", lambda value: value > 0)
        self._require_seconds(
            "admission_timeout_s", "a finite number of seconds, at least 0", lambda value: 0 <= value < math.inf
        )
        if self.checksum is not None and not isinstance(self.checksum, bool):
            raise ConfigError(f"checksum must be true, false or unset, got {self.checksum!r}")
        threads = self.pack_threads
        if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_PACK_THREADS):
            raise ConfigError(f"pack_threads must be 1 to {MAX_PACK_THREADS}, or unset, got {threads!r}")

    def _require_seconds(self, name: str, what: str, is_right: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_right(value):
            raise ConfigError(f"{name} must be {what}, got {value!r}")
        # 30 and 30.0 are one setting, and give one fingerprint.
        object.__setattr__(self, name, float(value))

    def with_overrides(self, **values: Any) -> HandoffConfig:
        """This configuration with every value that is not None put in place of its own."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def facts(self) -> dict[str, str]:
        """Every setting as text by name, for the ranks of a group to compare: equal in every process when they are.

        Of the options only numbers, true and false are among them. Texts, tables, functions and objects say where a
        rank is, whom it meets and by which secret: that differs between ranks, and some of it is to be shown to nobody.
        """
        return {entry.name: _spell(_shared(getattr(self, entry.name))) for entry in fields(self)}

    def fingerprint(self) -> str:
        """16 hex digits of `facts`."""
        text = json.dumps(self.facts(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load(values: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> HandoffConfig:
    """The configuration that `values` describe, over what `environ` says, over the defaults.

    The environment's names are the attributes' in capitals behind `OMNIKV_`: `OMNIKV_RECEIVE_TIMEOUT_S=5`; options
    are a JSON object.

    Raises:
        ConfigError: an unknown key, or a value that cannot be read.
    """
    known = {entry.name for entry in fields(HandoffConfig)}
    merged: dict[str, Any] = {}
    for name in sorted(known):
        raw = (environ or {}).get(ENVIRONMENT_PREFIX + name.upper())
        if raw is not None:
            merged[name] = _from_text(name, raw)
    unknown = sorted(set(values or {}) - known)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known settings: {', '.join(sorted(known))}")
    return HandoffConfig(**{**merged, **(values or {})})


def _from_text(name: str, raw: str) -> Any:
    if name == "transport":
        return raw
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        # Options may hold secrets, and the foreign error would show them.
        shown, cause = ("", None) if name == "options" else (f"={raw!r}", error)
        raise ConfigError(
            f"{ENVIRONMENT_PREFIX}{name.upper()}{shown} is no number, true, false or JSON object"
        ) from cause


def _shared(setting: Any) -> Any:
    """What of a setting is the same at all ranks of a group."""
    if not isinstance(setting, Mapping):
        return setting
    return {str(name): value for name, value in setting.items() if isinstance(value, int | float)}


def _spell(value: Any) -> str:
    """`value` as text that does not depend on the order in which a mapping was filled."""
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else repr(value)
