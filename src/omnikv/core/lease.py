"""A payload's life at its sender: who may read it, until when, and what everybody is told when it ends.

Theory of operation. An identity is absent, or lives once for each time that it is reserved; each life is a generation
with a number of its own:

    absent --Reserve--> announced --Publish--> ready --Acknowledge by every reader--> released
               ^            |                   |
               '---Drop-----'                   |--nobody interested for `ttl_s`--> expired
    any of these --Fail--> failed               '-- Take / GiveBack: leased by some of its readers, and not
    any of these --Abort--> aborted

Each of `num_readers` readers may lease a ready payload, once at a time, until it acknowledges. What ended stays ended,
and whoever asks is told how, until the identity is reserved again. The first end counts; all later ones, and whatever
comes late for an earlier generation or an ended lease, do nothing, so that every event may be doubled and come in any
order.

The clock of a life starts when it is published. Interest stops it: a reader that waits or has announced that it will
come, and every lease. When the last interest goes, the clock starts anew. Time passes before any event is looked at,
so what has expired can never be read.

A lease whose holder cannot be heard any more has *lapsed*: the payload is ready again, for whoever asks next for that
reader. The holder may have used it and said so in vain; if it says so again, under the name that was noted for it, this
counts like an acknowledgement in time, as long as the payload stayed ready and nobody leased it for that reader since.
So an acknowledgement has its effect once, whether it is heard never too often or late.

Room is memory that somebody may touch. It is freed once, when the life has ended and nobody writes or reads any more:
a payload that fails while it is written or read keeps its room until its writer or reader is done.

Pure: time comes in as `now`, monotonic seconds; holders of leases and interested ones are any hashable names. One that
waits is named by itself, one that announced its interest by the name under which it would hold a lease.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable
from typing import Literal, NamedTuple

from omnikv.core.keys import PayloadId
from omnikv.errors import Aborted, AlreadyConsumed, Expired, HandoffError, LocalProtocolError, ProducerFailed


class Phase(enum.Enum):
    """Where an identity stands; the last four are ends."""

    ABSENT = "absent"
    ANNOUNCED = "announced"
    READY = "ready"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"
    ABORTED = "aborted"


EndName = Literal["released", "expired", "failed", "aborted"]
_ENDS: dict[Phase, EndName] = {
    Phase.RELEASED: "released",
    Phase.EXPIRED: "expired",
    Phase.FAILED: "failed",
    Phase.ABORTED: "aborted",
}
# Compared by identity; looking one up hashes it, in Python.
_GOING_ON = (Phase.ABSENT, Phase.ANNOUNCED, Phase.READY)


class Grip(NamedTuple):
    """One lease: its number, which reader has it, and who holds it for that reader."""

    lease: int
    reader: int
    holder: Hashable


class Life(NamedTuple):
    """What is known of one identity. `expires_at` is None while its clock stands; `done` are the readers that used it.

    `lapsed` are leases that ended unheard, at most one a reader, each with the name that may still acknowledge it.
    `is_written` says that its writer is not done with its room, and `has_room` that the room is not freed.
    """

    phase: Phase = Phase.ABSENT
    generation: int = 0
    num_readers: int = 1
    ttl_s: float = math.inf
    is_written: bool = False
    has_room: bool = False
    grips: tuple[Grip, ...] = ()
    lapsed: tuple[Grip, ...] = ()
    done: frozenset[int] = frozenset()
    interest: frozenset[Hashable] = frozenset()
    expires_at: float | None = None
    cause: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the latest generation has ended in a way that is remembered."""
        return self.phase not in _GOING_ON


class Reserve(NamedTuple):
    """A new generation is announced and will be written, for `num_readers`, each life of which may idle for `ttl_s`."""

    generation: int
    num_readers: int
    ttl_s: float


class Publish(NamedTuple):
    """The writer of this generation is done: it is whole."""

    generation: int


class Drop(NamedTuple):
    """The writer of this generation gave up, or is done with what it could not publish."""

    generation: int


class Take(NamedTuple):
    """A reader gets a lease, where `answer` says that it may."""

    lease: int
    reader: int
    holder: Hashable


class Acknowledge(NamedTuple):
    """The holder of a lease used the payload; or the name noted for a lapsed one says so."""

    lease: int
    holder: Hashable


class GiveBack(NamedTuple):
    """The holder of a lease did not use the payload, or is gone."""

    lease: int
    holder: Hashable


class Lapse(NamedTuple):
    """The holder of a lease cannot be heard any more; what it did with the payload it may yet say, as `name`."""

    lease: int
    holder: Hashable
    name: Hashable


class Interest(NamedTuple):
    """Somebody waits for the payload, or says that it will come for it."""

    who: Hashable


class NoInterest(NamedTuple):
    """Somebody waits no more."""

    who: Hashable


class Fail(NamedTuple):
    """The producer cannot deliver, and why."""

    cause: str


class Abort(NamedTuple):
    """The request is not wanted any more, and why."""

    cause: str


class TimePassed(NamedTuple):
    """Nothing but that."""


class Close(NamedTuple):
    """The sender ends, and everything with it."""


Event = (
    Reserve
    | Publish
    | Drop
    | Take
    | Acknowledge
    | GiveBack
    | Lapse
    | Interest
    | NoInterest
    | Fail
    | Abort
    | TimePassed
    | Close
)


class Effect(enum.Enum):
    """What the shell must do: give the room back, or answer anew whoever waits."""

    FREE_ROOM = "free room"
    LOOK_AGAIN = "look again"


class End(NamedTuple):
    """How a life ended for one who asks: which generation, and the cause in words where there is one."""

    how: EndName
    generation: int
    cause: str


class Answer(enum.Enum):
    """What one who asks is told, where it is not an `End`."""

    TAKE = "take"
    WAIT = "wait"


def answer(life: Life, reader: int) -> Answer | End:
    """What a reader that asks now is told: take a lease, wait, or that there is nothing for it any more, and why.

    Of a life whose time may have come, ask after `TimePassed`.
    """
    if life.is_over:
        return End(_ENDS[life.phase], life.generation, life.cause)
    if life.phase is Phase.ABSENT:
        return Answer.WAIT
    if reader in life.done:
        return End("released", life.generation, f"reader {reader} has used it")
    if reader >= life.num_readers:
        return End("released", life.generation, f"reader {reader} is not one of its {life.num_readers}")
    if life.phase is Phase.READY and all(grip.reader != reader for grip in life.grips):
        return Answer.TAKE
    return Answer.WAIT


def step(life: Life, event: Event, now: float) -> tuple[Life, tuple[Effect, ...]]:
    """The next state and what the shell must do.

    Raises:
        LocalProtocolError: reserved while it lives, published when it cannot be, or taken when it may not be.
    """
    life, effects = _pass_time(life, now)
    after = _after(life, event)
    if after is life:
        return life, effects
    expires_at = _clock(life, after, now)
    if expires_at != after.expires_at:
        after = after._replace(expires_at=expires_at)
    changed = effects + ((Effect.LOOK_AGAIN,) if _may_matter(life, after) else ())
    return _tidy(after, changed)


def _pass_time(life: Life, now: float) -> tuple[Life, tuple[Effect, ...]]:
    if life.expires_at is None or now < life.expires_at:
        return life, ()
    cause = f"nobody came for it in {life.ttl_s:g} s"
    return _tidy(_ended(life, Phase.EXPIRED, cause), (Effect.LOOK_AGAIN,))


def _after(life: Life, event: Event) -> Life:
    match event:
        case Reserve(generation, num_readers, ttl_s):
            return _reserved(life, event, generation, num_readers, ttl_s)
        case Publish(generation):
            if generation != life.generation or life.phase is not Phase.ANNOUNCED:
                raise _refusal(life, event)
            return life._replace(phase=Phase.READY, is_written=False)
        case Drop(generation):
            return _dropped(life) if generation == life.generation and life.is_written else life
        case Take(lease, reader, holder):
            if answer(life, reader) is not Answer.TAKE:
                raise _refusal(life, event)
            return _taken(life, Grip(lease, reader, holder))
        case Acknowledge(lease, holder):
            return _acknowledged(life, lease, holder)
        case GiveBack(lease, holder):
            return life._replace(grips=_without(life.grips, lease)) if _find(life.grips, lease, holder) else life
        case Lapse(lease, holder, name):
            return _lapsed(life, lease, holder, name)
        case Interest(who):
            return life if who in life.interest else life._replace(interest=life.interest | {who})
        case NoInterest(who):
            return life._replace(interest=life.interest - {who}) if who in life.interest else life
        case Fail(cause):
            return life if life.is_over else _ended(life, Phase.FAILED, cause)
        case Abort(cause):
            return life if life.is_over else _ended(life, Phase.ABORTED, cause)
        case Close():
            return Life(has_room=life.has_room)
        case TimePassed():
            return life


def _reserved(life: Life, event: Event, generation: int, num_readers: int, ttl_s: float) -> Life:
    if life.has_room:
        raise _refusal(life, event)
    return Life(
        phase=Phase.ANNOUNCED,
        generation=generation,
        num_readers=num_readers,
        ttl_s=ttl_s,
        is_written=True,
        has_room=True,
        interest=life.interest,
    )


def _dropped(life: Life) -> Life:
    if life.phase is Phase.ANNOUNCED:
        return Life(generation=life.generation, has_room=True, interest=life.interest)
    return life._replace(is_written=False)


def _taken(life: Life, grip: Grip) -> Life:
    grips = (*life.grips, grip)
    if not life.lapsed:
        return life._replace(grips=grips)
    # Whoever reads it now says what became of it.
    return life._replace(grips=grips, lapsed=tuple(earlier for earlier in life.lapsed if earlier.reader != grip.reader))


def _lapsed(life: Life, lease: int, holder: Hashable, name: Hashable) -> Life:
    grip = _find(life.grips, lease, holder)
    if grip is None:
        return life
    after = life._replace(grips=_without(life.grips, lease))
    if life.phase is not Phase.READY:
        return after
    return after._replace(lapsed=(*life.lapsed, grip._replace(holder=name)))


def _acknowledged(life: Life, lease: int, holder: Hashable) -> Life:
    grip = _find(life.grips, lease, holder) or _find(life.lapsed, lease, holder)
    if grip is None:
        return life
    after = life._replace(
        grips=_without(life.grips, lease),
        lapsed=_without(life.lapsed, lease),
        done=life.done | {grip.reader},
        interest=life.interest - {holder},
    )
    is_last = after.phase is Phase.READY and len(after.done) == after.num_readers
    return _ended(after, Phase.RELEASED, "every reader has used it") if is_last else after


def _ended(life: Life, phase: Phase, cause: str) -> Life:
    # Whoever was interested is told; what comes under this identity later is another life.
    return life._replace(phase=phase, cause=cause, lapsed=(), interest=frozenset(), expires_at=None)


def _clock(before: Life, after: Life, now: float) -> float | None:
    """When `after` expires: its clock stands while anybody is interested, and starts anew after that."""
    if after.phase is not Phase.READY or after.grips or after.interest or after.ttl_s == math.inf:
        return None
    return now + after.ttl_s if before.expires_at is None else before.expires_at


def _may_matter(before: Life, after: Life) -> bool:
    """Whether one who was told to wait may be told something else now."""
    return after.phase is not before.phase or len(after.grips) < len(before.grips)


def _tidy(life: Life, effects: tuple[Effect, ...]) -> tuple[Life, tuple[Effect, ...]]:
    """Frees the room once it is nobody's any more."""
    in_use = life.phase in (Phase.ANNOUNCED, Phase.READY) or life.is_written or life.grips
    if life.has_room and not in_use:
        return life._replace(has_room=False), (Effect.FREE_ROOM, *effects)
    return life, effects


def _find(grips: tuple[Grip, ...], lease: int, holder: Hashable) -> Grip | None:
    return next((grip for grip in grips if grip.lease == lease and grip.holder == holder), None)


def _without(grips: tuple[Grip, ...], lease: int) -> tuple[Grip, ...]:
    return tuple(grip for grip in grips if grip.lease != lease)


def _refusal(life: Life, event: Event) -> LocalProtocolError:
    return LocalProtocolError(f"{event} is not possible: generation {life.generation} is {life.phase.value}")


def error_of(payload: PayloadId, end: End) -> HandoffError:
    """The error that tells one who asked for `payload` how its life ended."""
    name = payload.encode()
    kinds: dict[EndName, tuple[type[HandoffError], str]] = {
        "failed": (ProducerFailed, f"the sender failed {name}: {end.cause}"),
        "aborted": (Aborted, f"the sender aborted {name}: {end.cause}"),
        "expired": (Expired, f"{name} has expired (generation {end.generation}): {end.cause}; send it again"),
        "released": (
            AlreadyConsumed,
            f"{name} was already consumed (generation {end.generation}): {end.cause}; send it again as a new attempt",
        ),
    }
    kind, words = kinds[end.how]
    return kind(words, request_id=payload.transfer_id, key=name, rank=payload.source_rank)
