"""Putting and getting payloads by key through an engine's connector object.

An engine brings its own connector: an object with `put(from_stage, to_stage, put_key, data)` and
`get(from_stage, to_stage, get_key, metadata)`. Nothing is known of how it fails, so this is its edge: whatever it
raises becomes one of our errors here, with the connector's own as the cause.

Three optional attributes make a connector of ours (`omnikv.handoff.transport_connector`) do better than the published
interface allows; plain connectors lack them:

* `blocks_until_deadline`: its `get_with_deadline` waits for a payload and is woken by it, so nobody polls;
* `addresses_ranks`: it finds its peer by rank, so `get` takes `{"source_rank": r}` and payloads are packed straight
  into the transport's memory by `put_plan(..., target_rank=r)`;
* a payload with `put_back()`: an incomplete receive, or one that its group drops, gives it back unconsumed.

Two optional methods of the published interface are used where a connector's class has them: `get_with_deadline`, which
bounds a get that would block, and `abandon_get`, which frees what a get that found nothing left at the sender.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import torch

from omnikv.errors import OmniKVError, PutRejected, TransportError, WireError, WireReason
from omnikv.tensors.pack import KVCacheTransferData
from omnikv.tensors.place import borrows_from, map_tensors

logger = logging.getLogger("omnikv.connector")

PUT_ATTEMPTS = 3
FIRST_RETRY_S = 0.1
# What a last look, just at its deadline, may take with a connector that keeps deadlines.
_LAST_LOOK_S = 0.1
# Errors that the same call with the same arguments meets again.
_PERMANENT = (TypeError, ValueError, NotImplementedError, AttributeError, KeyError)


class Stages(NamedTuple):
    """The two ends of an edge, by their published names."""

    from_stage: str
    to_stage: str


def blocks_until_deadline(connector: Any) -> bool:
    """Whether the connector waits by itself, and is woken when a payload comes."""
    return getattr(connector, "blocks_until_deadline", False) is True


def addresses_ranks(connector: Any) -> bool:
    """Whether the connector finds its peers by rank rather than by host and port."""
    return getattr(connector, "addresses_ranks", False) is True


def put_with_retry(put: Callable[[], int], *, closing: threading.Event) -> int:
    """What `put` gives, tried again twice, after 0.1 and 0.2 s, as released engines do.

    An error that cannot change is not tried again. `closing` ends the pauses.

    Raises:
        OmniKVError: the last error that `put` raised.
    """
    for pause_s in (FIRST_RETRY_S * 2**attempt for attempt in range(PUT_ATTEMPTS - 1)):
        try:
            return put()
        except OmniKVError as error:
            if not error.retryable:
                raise
            logger.debug("a put failed and is tried again: %s", error)
        closing.wait(pause_s)
    return put()


def put_once(connector: Any, stages: Stages, key: str, data: object) -> int:
    """The size in bytes that the connector reports once it took the payload.

    Raises:
        PutRejected: the connector refused; retryable, since it gives no reason.
        TransportError: the connector raised; its own error is the cause, and says whether a retry can help.
        OmniKVError: a connector of ours raised it.
    """
    try:
        accepted, nbytes, _ = connector.put(
            from_stage=stages.from_stage, to_stage=stages.to_stage, put_key=key, data=data
        )
    except OmniKVError:
        raise
    # edge: an engine's connector may raise anything, and the sender must survive it.
    except Exception as error:
        failure = TransportError(f"putting {key!r} failed: {_words(error)}", key=key)
        failure.retryable = not isinstance(error, _PERMANENT)
        raise failure from error
    if not accepted:
        refusal = PutRejected(f"the connector refused {key!r} and gave no reason", key=key)
        refusal.retryable = True
        raise refusal
    return _size(nbytes)


def ask(
    connector: Any, stages: Stages, key: str, metadata: Mapping[str, Any] | None, *, deadline: float
) -> Delivery | None:
    """What the connector has under `key`, or None.

    A connector that waits by itself waits for it until `deadline` (monotonic seconds); any other is asked for what is
    there, which takes no longer than that where its class can bound a get.

    Raises:
        TransportError: the connector raised; its own error is the cause.
        WireError: what it gave is no payload; it has been consumed.
        OmniKVError: a connector of ours raised it.
    """
    where = {"from_stage": stages.from_stage, "to_stage": stages.to_stage, "get_key": key, "metadata": metadata}
    try:
        result = _get(connector, where, deadline)
        if not result:
            return None
        raw, nbytes = result
        if raw is None:
            return None
    except OmniKVError:
        raise
    # edge: an engine's connector may raise anything; only absence is asked for again, a fault is not.
    except Exception as error:
        raise TransportError(f"getting {key!r} failed: {_words(error)}", key=key) from error
    return open_payload(raw, _size(nbytes), key)


def abandon(connector: Any, key: str) -> None:
    """Nothing; the connector frees what asking for `key` in vain left at the sender, if it can."""
    if not _has(connector, "abandon_get"):
        return
    try:
        connector.abandon_get(key)
    # edge: an engine's connector may raise anything, and nobody waits for this.
    except Exception:
        logger.exception("the connector could not abandon %r", key)


def _get(connector: Any, where: Mapping[str, Any], deadline: float) -> Any:
    if blocks_until_deadline(connector):
        return connector.get_with_deadline(**where, deadline=deadline)
    if _has(connector, "get_with_deadline"):
        bound = max(deadline, time.monotonic() + _LAST_LOOK_S)
        try:
            return connector.get_with_deadline(**where, deadline=bound)
        except NotImplementedError:  # Inherited from the engine's interface; this connector has none of its own.
            pass
    return connector.get(**where)


def _size(nbytes: object) -> int:
    # A payload that was taken or given counts, whatever its connector says of its size.
    return int(nbytes) if isinstance(nbytes, SupportsIndex) else 0


def _has(connector: Any, method: str) -> bool:
    # Asked of the class: a stand-in that makes up its attributes would seem to have everything.
    return callable(getattr(type(connector), method, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A payload that the connector gave up to us: its fields, its size, and the memory that it may still borrow."""

    data: dict[str, Any]
    nbytes: int
    # The connector's own buffer, which must be released; None where the payload's memory is ours.
    lease: Any = None
    borrowed: tuple[torch.Tensor, ...] = ()

    @property
    def returnable(self) -> bool:
        """Whether the connector takes the payload back unconsumed."""
        return hasattr(self.lease, "put_back")

    def settle(self) -> None:
        """Tell the connector that its memory was read; views on it end here."""
        if self.lease is not None:
            _end_lease(self.lease.release)

    def put_back(self) -> None:
        """Give the payload back unconsumed where the connector can take it, else only its memory."""
        if self.lease is not None:
            _end_lease(getattr(self.lease, "put_back", self.lease.release))

    def owned(self) -> Delivery:
        """The same payload in memory of its own; the connector's is released, or stays as it was when there is no room.

        Raises:
            RuntimeError: torch had no memory for it.
        """
        if self.lease is None:
            return self
        buffers = list(self.borrowed)
        data = map_tensors(self.data, lambda part: part.clone() if borrows_from(part, buffers) else part)
        self.settle()
        return Delivery(data=data, nbytes=self.nbytes)


def open_payload(raw: Any, nbytes: int, key: str) -> Delivery:
    """The payload in whatever form a connector gives it: a leased buffer, bytes, a packed tensor, or a plain dict.

    A leased buffer that holds no payload is released before this raises.

    Raises:
        WireError: it is no payload.
    """
    if isinstance(raw, dict):
        return Delivery(data=raw, nbytes=nbytes)
    if isinstance(raw, bytes | bytearray | memoryview):
        return Delivery(data=KVCacheTransferData.from_bytes(raw), nbytes=nbytes)
    if isinstance(raw, torch.Tensor):
        return Delivery(data=_open_tensor(raw), nbytes=nbytes)
    if hasattr(raw, "tensor") and hasattr(raw, "release"):
        return _open_lease(raw, nbytes)
    raise WireError(
        f"the connector gave {type(raw).__name__} for {key!r}, which is no form of a payload",
        reason=WireReason.HEADER_FIELD,
        key=key,
    )


def _open_lease(raw: Any, nbytes: int) -> Delivery:
    with ExitStack() as on_failure:
        on_failure.callback(_end_lease, raw.release)
        tensor = raw.tensor
        data = _open_tensor(tensor)
        on_failure.pop_all()
    if tensor.device.type != "cpu":
        # Decoded from a device it is a copy already, and the pool is small.
        _end_lease(raw.release)
        return Delivery(data=data, nbytes=nbytes)
    return Delivery(data=data, nbytes=nbytes, lease=raw, borrowed=(tensor,))


def _open_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.device.type != "cpu":
        return KVCacheTransferData.from_bytes_device(tensor)
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise WireError(
            f"a packed payload must be a contiguous 1-D uint8 tensor, got {tensor.dim()}-D {tensor.dtype}",
            reason=WireReason.HEADER_FIELD,
        )
    return KVCacheTransferData.from_bytes(_as_buffer(tensor))


def _as_buffer(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, which keep the tensor alive; numpy, which could do this, may be absent."""
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    vars(array)["owner"] = tensor
    return memoryview(array).cast("B")


def _end_lease(end: Any) -> None:
    try:
        end()
    # edge: a connector's buffer may raise anything; the payload in it was read, so this is its own loss.
    except Exception:
        logger.exception("a connector's buffer could not be released")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
