"""Every way that a payload's life can go: a proof by exhaustion that the shipped steps free its room once, in time.

Theory of operation. One identity at one sender, with two declared readers and one that is not, each of which may be
replaced by a later process of its own. From a state everything that may happen next is tried, breadth first, whether it
makes sense or not: reserving, publishing, dropping, leasing, acknowledging and giving back by anybody under any lease
ever given out, leases that lapse and are acknowledged after that, interest, failing, aborting, time, closing; so
everything happens twice, late, and for generations that are over. Beside the shipped state runs a naive account, in the
plainest words, of what ought to be true; they must say the same:

* the room of a generation is freed exactly once, when nobody may touch it any more, and not later;
* a reader is let in exactly when the payload is ready, not over, and meant for it, and told exactly how it ended;
* an acknowledgement that comes after its lease lapsed counts exactly when it may still be true of what lies there;
* a payload expires exactly when nobody was interested in it for its whole time.

`python -m omnikv.testing.explore_lease` prints what was explored, and the shortest way to whatever is broken.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from omnikv.core import lease as core
from omnikv.core.lease import Answer, Effect, End, Event, Life
from omnikv.errors import LocalProtocolError
from omnikv.testing.explore_search import Visited

Step = Callable[[Life, Event, float], tuple[Life, tuple[Effect, ...]]]

TTL_TICKS = 2
READERS = (0, 1, 2)
NUM_READERS = 2
HOLDERS = ("first", "later")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What ought to be true. `held` are (lease, reader, holder); `idle` counts the ticks without interest.

    `unheard` are (lease, reader, name) of leases whose end nobody heard, while what is said of them may still count.
    """

    generation: int = 0
    is_written: bool = False
    is_published: bool = False
    end: str = "none"
    used: frozenset[int] = frozenset()
    held: frozenset[tuple[int, int, str]] = frozenset()
    unheard: frozenset[tuple[int, int, str]] = frozenset()
    leases: int = 0
    interested: frozenset[str] = frozenset()
    idle: int = 0

    @property
    def is_readable(self) -> bool:
        return self.is_published and self.end == "none"

    @property
    def may_be_touched(self) -> bool:
        """Whether somebody writes, reads, or may still come to read."""
        return self.is_written or bool(self.held) or self.is_readable

    def ended(self, how: str) -> Account:
        """The account after an end, of which only the first counts."""
        return (
            self if self.end != "none" else replace(self, end=how, interested=frozenset(), unheard=frozenset(), idle=0)
        )

    def settled(self) -> Account:
        """The account with its clock at rest where somebody is interested."""
        runs = self.is_readable and not self.held and not self.interested
        return self if runs else replace(self, idle=0)


Situation = tuple[Life, Account]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many generations and leases an exploration goes through, under how many names interest is said."""

    generations: int = 2
    leases: int = 3
    names: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExploration:
    """What was found: how many states and transitions, and the shortest way to what is broken, if anything is."""

    states: int
    transitions: int
    violation: str = ""
    path: tuple[str, ...] = ()


def explore_lease(bounds: Bounds | None = None, step: Step = core.step) -> LeaseExploration:
    """What an exhaustive exploration finds; it ends at the first thing that is broken, a nearest one."""
    bounds = bounds or Bounds()
    visited: Visited[Situation] = Visited.from_start((Life(), Account()))
    transitions = 0
    for number, situation in enumerate(visited.states):
        for place, event in enumerate(_events(situation[1], bounds)):
            transitions += 1
            try:
                after = _advance(situation, event, step)
            except AssertionError as broken:
                path = [_event_at(visited.states[at], bounds, edge) for at, edge in visited.way_to(number, place)]
                return LeaseExploration(
                    states=len(visited.states), transitions=transitions, violation=str(broken), path=tuple(path)
                )
            visited.add(after, number, place)
    return LeaseExploration(states=len(visited.states), transitions=transitions)


def _event_at(situation: Situation, bounds: Bounds, place: int) -> str:
    return repr(list(_events(situation[1], bounds))[place])


def _events(account: Account, bounds: Bounds) -> Iterator[Event]:
    """Everything that may happen next, sensible or not."""
    if account.generation < bounds.generations:
        yield core.Reserve(account.generation + 1, NUM_READERS, TTL_TICKS)
    for generation in range(1, account.generation + 1):
        yield core.Publish(generation)
        yield core.Drop(generation)
    if account.leases < bounds.leases:
        for reader in READERS:
            for holder in HOLDERS:
                yield core.Take(account.leases + 1, reader, holder)
    for lease in range(1, account.leases + 1):
        for holder in HOLDERS:
            yield core.Acknowledge(lease, holder)
            yield core.GiveBack(lease, holder)
            yield core.Lapse(lease, holder, _unheard(holder))
            yield core.Acknowledge(lease, _unheard(holder))
    for who in HOLDERS[: bounds.names]:
        yield core.Interest(who)
        yield core.NoInterest(who)
    yield from (core.Fail("broken"), core.Abort("gone"), core.TimePassed(), core.Close())


def _unheard(holder: str) -> str:
    return f"{holder}, unheard"


def _advance(situation: Situation, event: Event, step: Step) -> Situation:
    life, before = situation
    if isinstance(event, core.TimePassed):
        # The clock always shows 0: a tick brings every due time one nearer, and states recur.
        due_at = life.expires_at
        life = life if due_at is None else life._replace(expires_at=due_at - 1)
    expected = _expected(before, event)
    try:
        after, effects = step(life, event, 0.0)
    except LocalProtocolError:
        _require(expected is None, "it was refused, and ought to be possible")
        return situation
    if expected is None:
        raise AssertionError("it was possible, and ought to be refused")
    freed = effects.count(Effect.FREE_ROOM)
    ought = int(before.may_be_touched and (not expected.may_be_touched or isinstance(event, core.Close)))
    _require(freed == ought, f"the room was freed {freed} times, and ought to be {ought} times")
    _compare(after, expected)
    return after, expected


def _compare(life: Life, account: Account) -> None:
    _require(life.has_room == account.may_be_touched, f"has_room is {life.has_room}")
    for reader in READERS:
        told = core.answer(life, reader)
        said = told.how if isinstance(told, End) else told.value
        ought = _answer(account, reader)
        _require(said == ought, f"reader {reader} is told {said!r}, and ought to be told {ought!r}")
    runs = account.is_readable and not account.held and not account.interested
    due_at = float(TTL_TICKS - account.idle) if runs else None
    _require(life.expires_at == due_at, f"it is due in {life.expires_at} ticks, and ought to be in {due_at}")


def _answer(account: Account, reader: int) -> str:
    if account.end not in ("none", "dropped"):
        return account.end
    if account.end == "dropped" or account.generation == 0:
        return Answer.WAIT.value
    if reader in account.used or reader >= NUM_READERS:
        return "released"
    holds = any(of == reader for _, of, _ in account.held)
    return Answer.TAKE.value if account.is_readable and not holds else Answer.WAIT.value


def _expected(account: Account, event: Event) -> Account | None:
    """The account after `event`, or None where it ought to be refused."""
    match event:
        case core.Reserve(generation):
            if account.may_be_touched:
                return None
            return Account(generation=generation, is_written=True, leases=account.leases, interested=account.interested)
        case core.Publish(generation):
            if generation != account.generation or not account.is_written or account.end != "none":
                return None
            return replace(account, is_written=False, is_published=True).settled()
        case core.Drop(generation):
            if generation != account.generation or not account.is_written:
                return account
            return replace(account, is_written=False, end="dropped" if account.end == "none" else account.end)
        case core.Take(lease, reader, holder):
            if _answer(account, reader) != Answer.TAKE.value:
                return None
            held = account.held | {(lease, reader, str(holder))}
            unheard = frozenset(one for one in account.unheard if one[1] != reader)
            return replace(account, held=held, unheard=unheard, leases=account.leases + 1).settled()
        case core.Acknowledge() | core.GiveBack():
            return _given_back(account, event)
        case core.Lapse(lease, holder, name):
            lost = {grip for grip in account.held if (grip[0], grip[2]) == (lease, holder)}
            after = replace(account, held=account.held - lost)
            if after.is_readable:
                after = replace(after, unheard=after.unheard | {(of, reader, str(name)) for of, reader, _ in lost})
            return after.settled()
        case core.Interest(who):
            return replace(account, interested=account.interested | {str(who)}).settled()
        case core.NoInterest(who):
            return replace(account, interested=account.interested - {str(who)}).settled()
        case core.Fail() | core.Abort():
            how = "failed" if isinstance(event, core.Fail) else "aborted"
            return (replace(account, end="none") if account.end == "dropped" else account).ended(how)
        case core.TimePassed():
            later = replace(account, idle=account.idle + 1).settled()
            return later.ended("expired") if later.idle >= TTL_TICKS else later
        case core.Close():
            # A sender that closes serves nothing any more, so nothing of it can come later either.
            return Account(leases=account.leases)


def _given_back(account: Account, event: core.Acknowledge | core.GiveBack) -> Account:
    may_tell = account.held if isinstance(event, core.GiveBack) else account.held | account.unheard
    held = {grip for grip in may_tell if (grip[0], grip[2]) == (event.lease, event.holder)}
    if not held:
        return account
    after = replace(account, held=account.held - held, unheard=account.unheard - held)
    if isinstance(event, core.Acknowledge):
        (reader,) = (of for _, of, _ in held)
        after = replace(after, used=after.used | {reader}, interested=after.interested - {str(event.holder)})
        if after.is_readable and len(after.used) == NUM_READERS:
            after = after.ended("released")
    return after.settled()


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def main() -> int:
    """0 when everything holds, 1 when something is broken; prints what was explored."""
    started_s = time.monotonic()
    found = explore_lease(Bounds(leases=4, names=2))
    lines = [f"{found.states} states, {found.transitions} transitions"]
    if found.violation:
        lines += [*(f"  {number}. {event}" for number, event in enumerate(found.path, 1)), f"BROKEN: {found.violation}"]
    else:
        lines.append("everything holds")
    sys.stdout.write("\n".join(lines) + f"; {time.monotonic() - started_s:.1f} s\n")
    return 1 if found.violation else 0


if __name__ == "__main__":
    sys.exit(main())
