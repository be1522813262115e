"""The sending half of a handoff: a request's layers become one payload a target rank, written where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from omnikv.core.keys import PayloadId
from omnikv.core.reshard import HeadIds, Piece
from omnikv.core.wire import Extension
from omnikv.errors import HandoffError, OmniKVError, PutRejected, TransportError
from omnikv.handoff.cut import OwnLayers, cut, regions_of
from omnikv.tensors.lent import LentPayload
from omnikv.tensors.pack import PayloadPlan, plan_payload
from omnikv.transports.base import PutRequest, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPiece:
    """What went to one target rank: the global head ids and the payload's size, header included."""

    target_rank: int
    heads: HeadIds
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What one `send` published, and how long it took (planning, gathering and publishing)."""

    request_id: str
    pieces: tuple[SentPiece, ...]
    send_s: float

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def plan_piece(
    identity: PayloadId,
    piece: Piece,
    own: OwnLayers,
    *,
    plain: bool,
    metadata: Mapping[str, Any] | None,
    checksum: bool,
) -> PayloadPlan:
    """The payload that carries the piece under `identity`, sized but not yet written.

    On a `plain` route its heads tell what it is; elsewhere it names its regions.

    Raises:
        ConfigError: `metadata` is no JSON, or a layer has a dtype that a payload cannot hold.
    """
    extension = Extension(
        source_rank=identity.source_rank,
        target_rank=identity.target_rank,
        role=identity.role,
        attempt=identity.attempt,
        heads=piece.heads,
        num_tokens=None if plain else own.num_tokens,
        regions=() if plain else regions_of(own, piece),
    )
    return plan_payload(
        request_id=identity.transfer_id,
        layers=cut(own, piece),
        metadata=metadata,
        extension=extension,
        checksum=checksum,
    )


def publish_all(
    transport: Transport,
    plans: Sequence[tuple[PayloadId, PayloadPlan]],
    *,
    deadline: float = 0.0,
    pack_threads: int | None = None,
) -> None:
    """Nothing; every payload is reserved, written and then published, or none of them is.

    Room for the whole request is taken before anything is written, and waited for until `deadline` (monotonic seconds);
    nothing is visible before everything is written. So a failure leaves no half request behind: the receivers are told
    its cause instead, unless the same send can succeed later. At most `pack_threads` threads write, None for the usual.
    Where the transport lends, what can stay where it lies is lent instead of written.

    Raises:
        PutRejected: no room by then (`retryable`), never enough room, or the request is already live (whose payloads
            stay as they are).
        HandoffError: a layer could not be copied.
        TransportError: the transport failed.
    """
    with _ReceiversTold(transport, [identity for identity, _ in plans]), ExitStack() as stack:
        parts = [(identity, LentPayload(plan) if transport.lends else plan) for identity, plan in plans]
        wanted = [PutRequest(identity, part.nbytes, head=part.head) for identity, part in parts]
        slots = [stack.enter_context(slot) for slot in transport.reserve_all(wanted, deadline=deadline)]
        for slot, (identity, part) in zip(slots, parts, strict=True):
            with _copy_faults_mapped(identity):
                part.write_into(slot.buffer, pack_threads, slot.written if slot.sends_ahead else None)
            if isinstance(part, LentPayload):
                slot.lend(part.loan)
        for slot in slots:
            slot.publish()


class _ReceiversTold(AbstractContextManager["_ReceiversTold"]):
    """Tells every receiver the cause when the block fails for good, whatever with, and lets that error go on."""

    def __init__(self, transport: Transport, identities: Sequence[PayloadId]) -> None:
        self._transport = transport
        self._identities = identities

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        may_still_come = isinstance(error, PutRejected) and (error.already_live or error.retryable)
        if error is not None and not may_still_come:
            # A transport that cannot tell has told, by its end; the error that led here is the one to hear of.
            with suppress(TransportError):
                fail_all(self._transport, self._identities, f"{type(error).__name__}: {error}")


@contextmanager
def _copy_faults_mapped(identity: PayloadId) -> Iterator[None]:
    try:
        yield
    except OmniKVError:
        raise
    except RuntimeError as error:
        raise HandoffError(
            f"request {identity.transfer_id!r} could not be copied into the transport: {error}",
            request_id=identity.transfer_id,
            rank=identity.source_rank,
        ) from error


def fail_all(transport: Transport, identities: Sequence[PayloadId], cause: str) -> None:
    """Nothing; tells the receiver of every payload that it will not come, and why."""
    for identity in identities:
        transport.fail(identity, cause)
