"""The exploration of a payload's life finds nothing in the shipped steps, and every mistake that is made on purpose."""

import pytest

from omnikv.core import lease as core
from omnikv.core.lease import Effect, Phase
from omnikv.testing.explore_lease import Bounds, explore_lease, main


def test_every_way_that_a_payloads_life_can_go_is_right():
    found = explore_lease(Bounds(leases=3, names=2))
    assert found.violation == "", found.path
    assert found.states > 1000


def frees_under_readers(life, effects):
    if life.has_room and life.phase not in (Phase.ANNOUNCED, Phase.READY) and not life.is_written:
        return life._replace(has_room=False), (Effect.FREE_ROOM, *effects)
    return life, effects


def frees_under_the_writer(life, effects):
    if life.has_room and life.phase not in (Phase.ANNOUNCED, Phase.READY) and not life.grips:
        return life._replace(has_room=False), (Effect.FREE_ROOM, *effects)
    return life, effects


def frees_twice(life, effects):
    in_use = life.phase in (Phase.ANNOUNCED, Phase.READY) or life.is_written or life.grips
    return life, (effects if in_use or life.phase is Phase.ABSENT else (Effect.FREE_ROOM, *effects))


MUTANTS = {
    "room is freed under its readers": ("_tidy", frees_under_readers),
    "room is freed under its writer": ("_tidy", frees_under_the_writer),
    "room is freed again and again": ("_tidy", frees_twice),
    "room is never freed": ("_tidy", lambda life, effects: (life, effects)),
    "anybody may end a lease": (
        "_find",
        lambda grips, lease, holder: next((grip for grip in grips if grip.lease == lease), None),
    ),
    "what is said late of a lease counts although another took the payload since": (
        "_taken",
        lambda life, grip: life._replace(grips=(*life.grips, grip)),
    ),
    "what is said late of a lease is not heard": (
        "_lapsed",
        lambda life, lease, holder, name: life._replace(grips=core._without(life.grips, lease)),
    ),
    "a lease that lapses keeps others out": (
        "_lapsed",
        lambda life, lease, holder, name: life,
    ),
    "what is said late of a lease ends the payload for all readers": (
        "_acknowledged",
        lambda life, lease, holder, acknowledged=core._acknowledged: acknowledged(
            life._replace(num_readers=1) if core._find(life.lapsed, lease, holder) else life, lease, holder
        ),
    ),
    "a lease does not stop the clock": (
        "_clock",
        lambda before, after, now: now + after.ttl_s if after.phase is Phase.READY and not after.interest else None,
    ),
    "the clock is never started anew": (
        "_clock",
        lambda before, after, now: before.expires_at or (now + after.ttl_s if after.phase is Phase.READY else None),
    ),
    "the latest end counts": (
        "_after",
        lambda life, event, after=core._after: (
            life._replace(phase=Phase.ABORTED, interest=frozenset(), expires_at=None)
            if isinstance(event, core.Abort)
            else after(life, event)
        ),
    ),
    "a drop of an earlier generation counts": (
        "_after",
        lambda life, event, after=core._after: after(
            life, core.Drop(life.generation) if isinstance(event, core.Drop) else event
        ),
    ),
    "time does not pass": ("_pass_time", lambda life, now: (life, ())),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, monkeypatch):
    attribute, mistake = MUTANTS[name]
    monkeypatch.setattr(core, attribute, mistake)
    found = explore_lease()
    assert found.violation
    assert found.path


def test_the_command_prints_what_it_explored(capsys):
    assert main() == 0
    assert "everything holds" in capsys.readouterr().out
