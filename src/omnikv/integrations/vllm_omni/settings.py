"""What an engine's configuration says about KV transfer, read into the published record."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from omnikv.core.layout import Layout, is_count
from omnikv.core.topology import KVTPTopology
from omnikv.errors import ConfigError
from omnikv.handoff.engine_seat import VotesOver
from omnikv.handoff.lockstep import Dialect, VoteRules

CHANNEL_ADDRESS_VARIABLE = "OMNIKV_KV_CHANNEL_ADDRESS"
_ADDRESS = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<host>[^\[\]:\s]+))(?::(?P<port>\d{1,5}))?")


@dataclass
class OmniKVCacheConfig:
    """The published settings of one rank's KV transfer. `recv_timeout` is in seconds, for one request.

    Those that begin with `kv_` after the prefetch's are omnikv's own, and all but the address equal on every rank of a
    stage: how its ranks agree on a request (`kv_agreement`: "auto", "published" or "contents"), what carries that
    (`kv_agreement_over`: "auto", "objects" or "channel"), how long a vote may take after the receive and how long a
    round of it waits, in seconds, and which companions no request may lack. `kv_channel_address` is this host's own,
    "host" or "host:port", where the other hosts of a stage reach the rank that leads the vote. `kv_layout` says how the
    engine's caches lie (`Layout.named`) where their shapes have two readings, or are those of another layout.
    `kv_num_heads` is how many KV heads the model has over all ranks: it matters where a stage has more ranks than that,
    so that ranks hold copies of a head, which a receiver must not take for heads of their own. A sender that knows it
    states it in its payloads, and `from_vllm_config` asks vLLM's configuration for it, so only receivers of a released
    engine's payloads need it.
    """

    connector_config: dict[str, Any] | None = None
    from_stage: str | None = None
    to_stage: str | None = None
    stage_id: str | int | None = None
    engine_input_source: list[str | int] | None = None
    need_recv_cache: bool = False
    need_send_cache: bool = False
    recv_timeout: float = 30.0
    from_tp: int = 1
    to_tp: int = 1
    enable_kv_async_prefetch: bool = False
    kv_prefetch_min_free_mem_ratio: float = 0.0
    kv_agreement: str = "auto"
    kv_agreement_over: str = "auto"
    kv_vote_timeout: float = 30.0
    kv_round_timeout: float = 0.5
    kv_required_roles: list[str] | tuple[str, ...] = ()
    kv_channel_address: str | None = None
    kv_layout: str | None = None
    kv_num_heads: int | None = None


def read_settings(raw: Any, *, async_prefetch: bool = False) -> OmniKVCacheConfig:
    """The settings in an engine's `omni_kv_config` mapping; the defaults, which transfer nothing, without one.

    Raises:
        ConfigError: a parallel size or the timeout is no number.
    """
    if not raw or not isinstance(raw, Mapping):
        return OmniKVCacheConfig()
    ranks = raw.get("rank_mapping")
    ranks = ranks if isinstance(ranks, Mapping) else {}
    try:
        return OmniKVCacheConfig(
            connector_config=raw.get("connector_config"),
            from_stage=raw.get("omni_from_stage"),
            to_stage=raw.get("omni_to_stage"),
            stage_id=raw.get("stage_id"),
            engine_input_source=raw.get("engine_input_source", []),
            need_recv_cache=raw.get("need_recv_cache", False),
            need_send_cache=raw.get("need_send_cache", False),
            recv_timeout=float(raw.get("recv_timeout", 30.0)),
            from_tp=int(ranks.get("from_tp", 1)),
            to_tp=int(ranks.get("to_tp", 1)),
            enable_kv_async_prefetch=async_prefetch,
            kv_prefetch_min_free_mem_ratio=float(raw.get("kv_prefetch_min_free_mem_ratio", 0.0)),
            kv_agreement=raw.get("kv_agreement", "auto"),
            kv_agreement_over=raw.get("kv_agreement_over", "auto"),
            kv_vote_timeout=float(raw.get("kv_vote_timeout", 30.0)),
            kv_round_timeout=float(raw.get("kv_round_timeout", 0.5)),
            kv_required_roles=raw.get("kv_required_roles") or (),
            kv_channel_address=raw.get("kv_channel_address"),
            kv_layout=raw.get("kv_layout"),
            kv_num_heads=None if raw.get("kv_num_heads") is None else int(raw["kv_num_heads"]),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"omni_kv_config has a setting that is no number: {error}") from error


def require_sound(config: OmniKVCacheConfig) -> None:
    """Nothing, when every number that the settings state is one that a receive can keep.

    A receive that never ends would hold its rank for ever, and its peers in a vote with it.

    Raises:
        ConfigError: a time is no finite number of seconds, or the number of KV heads no positive one.
    """
    for name, least in (
        ("recv_timeout", "0 or more"),
        ("kv_vote_timeout", "0 or more"),
        ("kv_round_timeout", "above 0"),
    ):
        value: object = getattr(config, name)
        is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not is_time or (value == 0 and least == "above 0"):
            raise ConfigError(f"{name} must be a finite number of seconds, {least}, got {value!r}")
    if config.kv_num_heads is not None and not is_count(config.kv_num_heads):
        raise ConfigError(f"kv_num_heads must be the model's number of KV heads or None, got {config.kv_num_heads!r}")


def declared_layout(config: OmniKVCacheConfig, block_size: int) -> Layout | None:
    """The layout that the settings declare for caches with blocks of `block_size` tokens, or None.

    Raises:
        ConfigError: they name none that is known.
    """
    return None if config.kv_layout is None else Layout.named(config.kv_layout, block_size)


def vote_rules(config: OmniKVCacheConfig) -> VoteRules:
    """How the ranks of this stage agree.

    Raises:
        ConfigError: a setting names no such way, or required roles are no list of names.
    """
    for name, value, known in (
        ("kv_agreement", config.kv_agreement, get_args(Dialect)),
        ("kv_agreement_over", config.kv_agreement_over, get_args(VotesOver)),
    ):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    required: Any = config.kv_required_roles or ()
    if isinstance(required, str) or not all(isinstance(role, str) and role for role in required):
        raise ConfigError(f"kv_required_roles must be a list of role names, got {required!r}")
    return VoteRules(
        need_recv_cache=bool(config.need_recv_cache),
        dialect=cast(Dialect, config.kv_agreement),
        over=cast(VotesOver, config.kv_agreement_over),
        required_roles=tuple(sorted(set(required))),
        slice_s=float(config.kv_round_timeout),
    )


def channel_address(config: OmniKVCacheConfig, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where this rank listens for the votes of other hosts, from the settings or the environment; None without either.

    Port 0 stands for any free one.

    Raises:
        ConfigError: it is no "host", "host:port" or "[host]:port" of one interface.
    """
    given: object = config.kv_channel_address or environ.get(CHANNEL_ADDRESS_VARIABLE)
    if not given:
        return None
    match = _ADDRESS.fullmatch(given) if isinstance(given, str) else None
    host = (match["bracketed"] or match["host"]) if match else ""
    port = int(match["port"] or 0) if match else 0
    if host in ("", "0.0.0.0", "::") or port > 65535:
        raise ConfigError(
            f"kv_channel_address (or {CHANNEL_ADDRESS_VARIABLE}) must be 'host' or 'host:port' of the interface that "
            f"the other hosts of this stage reach, IPv6 as '[host]:port', got {given!r}"
        )
    return host, port


def wants_async_prefetch(raw: Any, *, has_companion: bool) -> bool:
    """Whether KV is fetched in the background: asked for, and nothing stands against it.

    Guidance companions are collected by a function of the model's, in the foreground. A receive pool on a device would
    be filled from two streams.
    """
    if not isinstance(raw, Mapping) or not raw.get("enable_kv_async_prefetch", False):
        return False
    connector = raw.get("connector_config")
    device = connector.get("memory_pool_device", "cpu") if isinstance(connector, Mapping) else "cpu"
    return not has_companion and str(device).lower() == "cpu"


def connector_of_transfer_config(kv_transfer_config: Any) -> dict[str, Any] | None:
    """The connector settings nested in vLLM's own `kv_transfer_config`, or None."""
    extra = getattr(kv_transfer_config, "kv_connector_extra_config", None)
    nested = extra.get("omni_connector_config") if isinstance(extra, Mapping) else None
    for found in (getattr(kv_transfer_config, "omni_connector_config", None), nested):
        if isinstance(found, dict) and found:
            return found
    return None


def num_kv_heads_of(*configs: Any) -> int | None:
    """How many KV heads the model has over all ranks, as vLLM's `ModelConfig` says it, or None where none does."""
    for config in configs:
        for candidate in (config, getattr(config, "model_config", None)):
            ask = getattr(candidate, "get_total_num_kv_heads", None)
            found = ask() if callable(ask) else None
            if is_count(found):
                return found
    return None


def send_stages(config: OmniKVCacheConfig) -> tuple[str | None, str | None]:
    """The edge that this stage sends on, as text; a pair of None when it sends on none."""
    return _edge(config.from_stage, config.to_stage)


def recv_stages(config: OmniKVCacheConfig) -> tuple[str | None, str | None]:
    """The edge that this stage receives on: from its first declared source, else the stage before it."""
    source: str | int | None = config.from_stage
    if config.engine_input_source:
        source = config.engine_input_source[0]
    elif isinstance(config.stage_id, int):
        source = config.stage_id - 1
    return _edge(source, config.stage_id)


def require_edge(what: str, stages: tuple[str | None, str | None]) -> tuple[str, str]:
    """Both ends of an edge.

    Raises:
        ConfigError: there is none; `what` names the settings that would give one.
    """
    from_stage, to_stage = stages
    if not from_stage or not to_stage:
        raise ConfigError(f"this stage moves KV on no edge: set {what} in its omni_kv_config")
    return from_stage, to_stage


def choose_topology(config: OmniKVCacheConfig, *, local_rank: int, detected_tp: int) -> KVTPTopology:
    """The parallel sizes in force: the configured ones, or, where none are, this stage's own size on both sides.

    Raises:
        TopologyError: a size is not positive.
    """
    configured = config.from_tp > 1 or config.to_tp > 1
    return KVTPTopology(
        source_tp_size=config.from_tp if configured else detected_tp,
        target_tp_size=config.to_tp if configured else detected_tp,
        local_rank=local_rank,
    )


def _edge(source: str | int | None, target: str | int | None) -> tuple[str | None, str | None]:
    ends = (source, target)
    if any(end is None or end == "" for end in ends):
        return None, None
    return str(source), str(target)
