"""Names of payloads: the structured identity that omnikv uses, and the connector keys that engines publish.

A published key joins its fields with "_", so different payloads can share one: request "a_1" leaving stage "0" and
request "a" leaving stage "1_0" collide, the receiving stage is not in it at all, and neither are the parallel sizes
(field report X06). `PayloadId` keeps the fields apart; its encoding escapes each field before joining them, so two
identities are equal exactly when all their fields are. The published key stays available as one projection, because
stages that run a released engine speak it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from omnikv.core.topology import KVTPTopology, get_kv_source_ranks, get_kv_target_ranks
from omnikv.errors import ConfigError, TopologyError

PRIMARY_ROLE = "primary"
MAX_FIELD_CHARS = 1024

# Either may return one plain key by itself.
SendKeyHook = Callable[[str, str, str], "str | Sequence[str]"]
RecvKeyHook = Callable[[str, str, str], "str | Sequence[str | tuple[str, int | None]]"]


def _require_text(what: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} must be a non-empty string, got {value!r}")
    if len(value) > MAX_FIELD_CHARS:
        raise ConfigError(
            f"{what} has {len(value)} characters, at most {MAX_FIELD_CHARS} are allowed: {value[:40]!r}..."
        )
    if not value.isprintable() and any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise ConfigError(f"{what} holds a lone surrogate and has no UTF-8 form: {value!r}")


def _require_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{what} must be an integer of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One direction between two stages of one pipeline: where a payload comes from and where it goes.

    `namespace` keeps unrelated pipelines on one host apart, `replica` the data-parallel copies of one pipeline.

    Raises:
        ConfigError: a name is empty, too long or no text; `replica` is negative.
    """

    from_stage: str
    to_stage: str
    namespace: str = "default"
    replica: int = 0

    def __post_init__(self) -> None:
        _require_text("from_stage", self.from_stage)
        _require_text("to_stage", self.to_stage)
        _require_text("namespace", self.namespace)
        _require_count("replica", self.replica)

    def encode(self) -> str:
        """The edge as text that no other edge has."""
        return "/".join(
            (
                quote(self.namespace, safe=""),
                quote(self.from_stage, safe=""),
                quote(self.to_stage, safe=""),
                str(self.replica),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadId:
    """The identity of one payload: one part of one role of one request, from one source rank to one target rank.

    `transfer_id` is what both stages agreed to call the request; an engine's local request id may differ from it.
    `attempt` tells a request that is sent again from its earlier self.

    Raises:
        ConfigError: a text field is empty or too long; a number is negative.
    """

    edge: Edge
    transfer_id: str
    source_rank: int
    target_rank: int
    role: str = PRIMARY_ROLE
    attempt: int = 0

    def __post_init__(self) -> None:
        _require_text("transfer_id", self.transfer_id)
        _require_text("role", self.role)
        _require_count("source_rank", self.source_rank)
        _require_count("target_rank", self.target_rank)
        _require_count("attempt", self.attempt)

    def __hash__(self) -> int:
        # Without the edge, which all payloads of one transport share: it is hashed many times a payload.
        return hash((self.transfer_id, self.role, self.attempt, self.source_rank, self.target_rank))

    def encode(self) -> str:
        """The identity as text: fields percent-escaped, joined by "/"; equal texts mean equal identities."""
        own = (quote(self.transfer_id, safe=""), quote(self.role, safe=""))
        numbers = (str(self.attempt), str(self.source_rank), str(self.target_rank))
        return "/".join((self.edge.encode(), *own, *numbers))

    def published_key(self, *, ranks: bool) -> str:
        """The connector key that engines use, with or without `ranks`: a projection, which different payloads share."""
        if ranks:
            return get_kv_connector_key(self.transfer_id, self.edge.from_stage, 0, self.source_rank, self.target_rank)
        return plain_connector_key(self.transfer_id, self.edge.from_stage, self.edge.to_stage)

    @classmethod
    def decode(cls, text: str) -> PayloadId:
        """The identity that `encode` gave as `text`.

        Raises:
            ConfigError: `text` is no encoded identity.
        """
        parts = text.split("/")
        if len(parts) != 9:
            raise ConfigError(f"an encoded payload identity has 9 fields, got {len(parts)}: {text[:80]!r}")
        namespace, from_stage, to_stage, replica, transfer_id, role, attempt, source, target = parts
        try:
            numbers = [int(part) for part in (replica, attempt, source, target)]
        except ValueError as error:
            raise ConfigError(f"an encoded payload identity has a malformed number: {text[:80]!r}") from error
        edge = Edge(
            namespace=unquote(namespace), from_stage=unquote(from_stage), to_stage=unquote(to_stage), replica=numbers[0]
        )
        return cls(
            edge=edge,
            transfer_id=unquote(transfer_id),
            role=unquote(role),
            attempt=numbers[1],
            source_rank=numbers[2],
            target_rank=numbers[3],
        )


def get_kv_connector_key(req_id: str, from_stage: int | str, chunk_id: int, from_rank: int, to_rank: int) -> str:
    """The published rank-aware key `{req_id}_{from_stage}_{chunk_id}_{from_rank}_{to_rank}` (vllm-omni #2677)."""
    return f"{req_id}_{from_stage}_{chunk_id}_{from_rank}_{to_rank}"


def plain_connector_key(req_id: str, from_stage: str, to_stage: str) -> str:
    """The published key of a stage pair without tensor parallelism, where no rank has to be named."""
    return f"omni_{from_stage}_to_{to_stage}_kv_cache_{req_id}"


def is_rank_aware(topo: KVTPTopology) -> bool:
    """Whether keys of this topology name ranks; both sides ask this one function, so they cannot differ (D04)."""
    return topo.source_tp_size > 1 or topo.target_tp_size > 1


def build_rank_aware_send_keys(
    request_id: str, from_stage: str, to_stage: str, topo: KVTPTopology, hook: SendKeyHook | None = None
) -> list[str]:
    """The keys under which this sender rank puts a request: one a target rank, in target order.

    A hook's keys win if it returns any.

    Raises:
        ConfigError: a hook returned something that is no key.
        TopologyError: the parallel sizes do not divide, or the local rank is not one of the sender's.
    """
    keys = _hooked(hook, request_id, from_stage, to_stage)
    if keys:
        for key in keys:
            _require_key("send", key)
        return keys
    if not is_rank_aware(topo):
        return [plain_connector_key(request_id, from_stage, to_stage)]
    return [
        get_kv_connector_key(request_id, from_stage, 0, topo.local_rank, target) for target in get_kv_target_ranks(topo)
    ]


def build_rank_aware_recv_keys(
    request_id: str, from_stage: str, to_stage: str, topo: KVTPTopology, hook: RecvKeyHook | None = None
) -> list[tuple[str, int | None]]:
    """`(key, source rank)` for each shard that this receiver rank needs; the rank is None without tensor parallelism.

    A hook's keys win if it returns any. It may return pairs, or plain keys in the order of the source ranks, which
    then get their rank from the topology: a key without its rank would be asked of the wrong sender (D13).

    Raises:
        ConfigError: a hook returned something that is neither a key nor such a pair.
        TopologyError: the sizes do not divide, the local rank is not one of the receiver's, a hook's plain keys are not
            as many as the source ranks, or it names a rank that the sender has not.
    """
    raw = _hooked(hook, request_id, from_stage, to_stage)
    if raw:
        return _with_source_ranks(raw, topo)
    if not is_rank_aware(topo):
        return [(plain_connector_key(request_id, from_stage, to_stage), None)]
    return [
        (get_kv_connector_key(request_id, from_stage, 0, source, topo.local_rank), source)
        for source in get_kv_source_ranks(topo)
    ]


def _hooked(hook: Callable[[str, str, str], Any] | None, request_id: str, from_stage: str, to_stage: str) -> list[Any]:
    """What a hook returned, which may be anything; nothing without one."""
    found = hook(request_id, from_stage, to_stage) if callable(hook) else ()
    # One key by itself, which is not a list of its letters.
    return [found] if found and isinstance(found, str) else list(found or ())


def _require_key(side: str, key: object) -> None:
    if not isinstance(key, str) or not key:
        raise ConfigError(f"a {side} key hook must return keys that are non-empty strings, got {key!r}")


def _require_pair(pair: tuple[Any, ...], topo: KVTPTopology) -> None:
    key, rank = pair if len(pair) == 2 else (pair, None)
    _require_key("receive", key)
    if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < topo.source_tp_size):
        return
    raise TopologyError(
        f"the receive key hook names source rank {rank!r} for {key!r}, but the sender's ranks are 0 to "
        f"{topo.source_tp_size - 1}"
    )


def _with_source_ranks(raw: list[Any], topo: KVTPTopology) -> list[tuple[str, int | None]]:
    pairs = [entry for entry in raw if isinstance(entry, tuple)]
    if len(pairs) == len(raw):
        for pair in pairs:
            _require_pair(pair, topo)
        return pairs
    plain = [entry for entry in raw if isinstance(entry, str)]
    if len(plain) != len(raw):
        raise TopologyError(f"a receive key hook must return all plain keys or all (key, rank) pairs, got {raw!r}")
    for key in plain:
        _require_key("receive", key)
    if not is_rank_aware(topo) and len(plain) == 1:
        return [(plain[0], None)]
    sources = get_kv_source_ranks(topo)
    if len(plain) != len(sources):
        raise TopologyError(
            f"the receive key hook returned {len(plain)} plain keys, but rank {topo.local_rank} of "
            f"{topo.target_tp_size} reads from {len(sources)} source ranks {sources}; return one key a source rank, "
            "or (key, source_rank) pairs"
        )
    return list(zip(plain, sources, strict=True))
