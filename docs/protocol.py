"""Writes the tables of docs/protocol.md from the code that they describe: python docs/protocol.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

from omnikv.core import lease
from omnikv.core.messages import Ballot, RoleBallot, Ruling, spell_facts
from omnikv.core.verdict import rule
from omnikv.core.vote import (
    Announce,
    Cast,
    Conclude,
    Doubt,
    Expired,
    FollowerState,
    Heard,
    LeaderState,
    Lost,
    Report,
    Ruled,
    step_follower,
    step_leader,
)
from omnikv.errors import LocalProtocolError

PAGE = Path(__file__).with_name("protocol.md")


def _ballot(standing: str = "have", number: int = 0, *, required: bool = True, can_refetch: bool = True) -> Ballot:
    entry = RoleBallot("primary", standing, required, facts=spell_facts({"tokens": "3"}) if standing == "have" else "")  # type: ignore[arg-type]
    return Ballot(number, can_refetch, (entry,))


KEEP, REFETCH = Ruling("keep", 0, usable=("primary",)), Ruling("refetch", 0, missing=((1, "primary"),))
DROP = Ruling("drop", 0)


def rulings() -> Iterable[list[str]]:
    """Every pair of ballots of two ranks on one role, and what comes of it."""
    columns = list(product((True, False), repeat=2))
    times = [
        f"{'required' if required else 'optional'}, {'with time' if time else 'at the deadline'}"
        for required, time in columns
    ]
    yield ["rank 0", "rank 1", *times]
    for one, other in combinations_with_replacement(("have", "missing", "failed"), 2):
        yield [one, other, *(_ruled(one, other, required, time) for required, time in columns)]
    odd = {
        required: Ballot(0, True, (RoleBallot("primary", "have", required, facts=spell_facts({"tokens": "99"})),))
        for required in (True, False)
    }
    differing = [_say(rule((_ballot(required=required), odd[required]))) for required, _ in columns]
    yield ["have", "have, other facts", *differing]


def _ruled(one: str, other: str, required: bool, time: bool) -> str:
    return _say(rule([_ballot(standing, required=required, can_refetch=time) for standing in (one, other)]))


def _say(ruling: Ruling) -> str:
    return "keep without it" if ruling.kind == "keep" and not ruling.usable else ruling.kind


def leader() -> Iterable[list[str]]:
    """What rank 0 of two does on each event, by what it has heard."""
    after = {
        "nothing yet": [],
        "its own ballot": [Cast(_ballot())],
        "rank 1's ballot": [Heard(1, _ballot())],
        "rank 1 lost": [Lost(1, "closed")],
        "dropped, rank 1's ballot owed": [Cast(_ballot()), Expired()],
        "over": [Cast(_ballot()), Heard(1, _ballot())],
    }
    events = {
        "casts": Cast(_ballot()),
        "hears rank 1": Heard(1, _ballot()),
        "hears rank 1 miss it": Heard(1, _ballot("missing")),
        "loses rank 1": Lost(1, "closed"),
        "deadline": Expired(),
    }
    return _table("the leader has", after, events, LeaderState(size=2), step_leader)


def follower() -> Iterable[list[str]]:
    """What another rank does on each event, by what it has done."""
    after = {
        "is fetching": [],
        "is fetching, was told drop": [Ruled(DROP)],
        "is fetching, lost the leader": [Lost(0, "closed")],
        "voted": [Cast(_ballot())],
        "is in doubt": [Cast(_ballot()), Expired()],
    }
    events = {
        "casts": Cast(_ballot()),
        "is told keep": Ruled(KEEP),
        "is told refetch": Ruled(REFETCH),
        "is told drop": Ruled(DROP),
        "loses the leader": Lost(0, "closed"),
        "deadline": Expired(),
    }
    return _table("the follower", after, events, FollowerState(rank=1), step_follower)


def payload() -> Iterable[list[str]]:
    """What a payload's life does on each event, by where it stands; one reader, with a time to live of 1 s."""
    begun: list[Any] = [lease.Reserve(1, 1, 1.0)]
    ready: list[Any] = [*begun, lease.Publish(1)]
    after = {
        "absent": [],
        "announced": begun,
        "ready": ready,
        "leased": [*ready, lease.Take(1, 0, "reader")],
        "ready, a lease lapsed": [*ready, lease.Take(1, 0, "reader"), lease.Lapse(1, "reader", "reader, back")],
        "released": [*ready, lease.Take(1, 0, "reader"), lease.Acknowledge(1, "reader")],
        "failed": [lease.Fail("why")],
        "failed, still leased": [*ready, lease.Take(1, 0, "reader"), lease.Fail("why")],
        "failed, still written": [*begun, lease.Fail("why")],
    }
    events = {
        "Reserve": lease.Reserve(2, 1, 1.0),
        "Publish": lease.Publish(1),
        "Drop": lease.Drop(1),
        "Take": lease.Take(9, 0, "reader"),
        "Acknowledge": lease.Acknowledge(1, "reader"),
        "GiveBack": lease.GiveBack(1, "reader"),
        "Lapse": lease.Lapse(1, "reader", "reader, back"),
        "late Acknowledge": lease.Acknowledge(1, "reader, back"),
        "Fail": lease.Fail("why"),
        "Abort": lease.Abort("why"),
        "1 s passes": lease.TimePassed(),
    }
    yield ["the payload is", *events]
    for name, path in after.items():
        life = lease.Life()
        for event in path:
            life, _ = lease.step(life, event, 0.0)
        yield [name, *(_life_cell(life, event) for event in events.values())]


def _life_cell(life: lease.Life, event: Any) -> str:
    now = 1.0 if isinstance(event, lease.TimePassed) else 0.0
    try:
        after, effects = lease.step(life, event, now)
    except LocalProtocolError:
        return "refused"
    if after is life:
        return "-"
    where = after.phase.value
    if after.is_over and after.has_room:
        where += ", still leased" if after.grips else ", still written"
    elif after.grips:
        where = "leased"
    elif after.lapsed:
        where += ", a lease lapsed"
    return f"{where}, room freed" if lease.Effect.FREE_ROOM in effects else where


def _table(
    corner: str, after: dict[str, list[Any]], events: dict[str, Any], start: Any, step: Callable[..., Any]
) -> Iterable[list[str]]:
    yield [corner, *events]
    for name, path in after.items():
        state = start
        for event in path:
            state, _ = step(state, event)
        yield [name, *(_cell(state, event, step) for event in events.values())]


def _cell(state: Any, event: Any, step: Callable[..., Any]) -> str:
    try:
        _, effects = step(state, event)
    except LocalProtocolError:
        return "refused"
    return "; ".join(_effect(effect) for effect in effects) or "-"


def _effect(effect: Any) -> str:
    match effect:
        case Report():
            return "reports"
        case Announce(ranks, ruling):
            return f"announces {ruling.kind}" if ranks else "nobody to tell"
        case Conclude(ruling):
            return f"**{ruling.kind}**"
        case Doubt():
            return "**in doubt**"
    raise AssertionError(effect)


def describe(page: str) -> str:
    """The page with its tables as the code is now."""
    for name, rows in (("rulings", rulings()), ("leader", leader()), ("follower", follower()), ("payload", payload())):
        head, *body = [f"| {' | '.join(row)} |" for row in rows]
        table = "\n".join([head, re.sub(r"[^|]+", "---", head), *body])
        start = page.index(f"<!-- table: {name} -->")
        end = page.index("<!-- end -->", start)
        page = f"{page[:start]}<!-- table: {name} -->\n{table}\n{page[end:]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(describe(PAGE.read_text()))
