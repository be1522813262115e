"""Every exception that omnikv raises.

A caller needs three facts to act on a failure, so each class states them: whether the payload was consumed
(`consumed`), whether the same call can succeed later (`retryable`), and what it was about (`request_id`, `key`,
`rank`). Classes also derive from the built-in that fits, so code that knows nothing of omnikv still catches them.
`docs/errors.md` holds the table of what every rank does on each.
"""

from __future__ import annotations

import enum
from typing import Any


class OmniKVError(Exception):
    """The root of everything raised here; catch it to catch all of omnikv and nothing else."""

    retryable: bool = False
    consumed: bool = False

    def __init__(
        self, message: str, *, request_id: str | None = None, key: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.key = key
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries in engines' executors; keyword-only arguments would not survive the default.
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[OmniKVError], args: tuple[Any, ...], state: dict[str, Any]) -> OmniKVError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(OmniKVError, ValueError):
    """A setting or argument is wrong; raised before any I/O."""


class TopologyError(ConfigError):
    """Ranks, heads or parallel sizes do not fit together."""


class LocalProtocolError(OmniKVError, RuntimeError):
    """We drove one of our own state machines against its rules; `history` holds the events that led there."""

    def __init__(self, message: str, *, history: tuple[str, ...] = (), request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.history = history


class RemoteProtocolError(OmniKVError):
    """A peer said something that the protocol does not allow."""


class WireReason(str, enum.Enum):
    """Why a payload was refused; closed, so that callers and counters may enumerate it."""

    TRUNCATED = "truncated"
    HEADER_TOO_LARGE = "header_too_large"
    HEADER_NOT_JSON = "header_not_json"
    HEADER_FIELD = "header_field"
    LAYER_COUNT = "layer_count"
    TENSOR_NAME = "tensor_name"
    DUPLICATE_LAYER = "duplicate_layer"
    MISSING_LAYER = "missing_layer"
    DTYPE = "dtype"
    SHAPE = "shape"
    SPAN_OUT_OF_RANGE = "span_out_of_range"
    SPAN_OVERLAP = "span_overlap"
    SPAN_GAP = "span_gap"
    WRONG_REQUEST = "wrong_request"
    WRONG_RANK = "wrong_rank"
    CHECKSUM = "checksum"


class WireError(RemoteProtocolError, ValueError):
    """Bytes that are not a payload we can trust: `reason` says which rule broke, `offset` where (bytes)."""

    def __init__(
        self,
        message: str,
        *,
        reason: WireReason,
        offset: int = 0,
        request_id: str | None = None,
        key: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, key=key, rank=rank)
        self.reason = reason
        self.offset = offset


class TransportError(OmniKVError):
    """Moving bytes failed; `__cause__` is the foreign error, `transport` and `endpoint` say where."""

    def __init__(
        self,
        message: str,
        *,
        transport: str | None = None,
        endpoint: str | None = None,
        request_id: str | None = None,
        key: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, key=key, rank=rank)
        self.transport = transport
        self.endpoint = endpoint


class TransportUnavailable(TransportError, ImportError):
    """A transport is not installed or cannot start on this machine."""


class ConnectError(TransportError, ConnectionError):
    """A peer could not be reached, or refused us."""

    retryable = True


class PutRejected(TransportError):
    """A payload was not accepted: no room now (`retryable`), can never fit, or its identity is `already_live`."""

    def __init__(
        self,
        message: str,
        *,
        already_live: bool = False,
        retryable: bool = False,
        transport: str | None = None,
        endpoint: str | None = None,
        request_id: str | None = None,
        key: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, transport=transport, endpoint=endpoint, request_id=request_id, key=key, rank=rank)
        self.already_live = already_live
        self.retryable = retryable


class TransportTimeout(TransportError, TimeoutError):
    """A transport's own operation did not end by its deadline."""

    retryable = True


class HandoffError(OmniKVError):
    """A request's KV did not reach this rank."""


class ReceiveTimeout(HandoffError, TimeoutError):
    """The deadline passed first; nothing was consumed, so a retry or a fallback is open."""

    retryable = True


class ProducerFailed(HandoffError):
    """The sender said that it failed, or died; told at once, nothing was consumed."""


class Aborted(ProducerFailed):
    """The request was called off, by its sender or by this receiver; nobody needs its KV any more."""


class Expired(HandoffError):
    """The payload's time to live ended at its sender; told at once, nothing was consumed."""


class AlreadyConsumed(HandoffError):
    """The payload was used already, by this reader or by all readers that it had; told at once."""

    consumed = True


class PayloadLost(HandoffError, RuntimeError):
    """The payload was consumed and then lost; a retry cannot help."""

    consumed = True


class AgreementError(OmniKVError):
    """Ranks in lockstep could not all hold the same state."""


class Dropped(AgreementError):
    """Every rank of the group drops this request's KV; raised only where the caller asked for raising."""


class VerdictInDoubt(AgreementError):
    """This rank voted and cannot learn the verdict: its peers may go either way, so the group must be torn down."""


class AliasError(OmniKVError, ImportError):
    """The published names of an engine cannot be offered as asked."""
