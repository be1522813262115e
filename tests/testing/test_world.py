"""Simulated groups end well under every seed; broken votes do not; and a seed tells the same story every time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import omnikv.testing
from omnikv.core.messages import Ballot, RoleBallot, Ruling, spell_facts
from omnikv.errors import LocalProtocolError
from omnikv.testing.mutants import MUTANTS
from omnikv.testing.steps import Steps
from omnikv.testing.world import World, main
from omnikv.testing.world_clock import VirtualClock
from omnikv.testing.world_faults import Dice, Fate, Part
from omnikv.testing.world_links import Link
from omnikv.testing.world_oracle import Aftermath, Ending, judge
from omnikv.testing.world_payloads import Payloads
from omnikv.testing.world_scale import Scale, measure
from omnikv.testing.world_seats import SteppedSeats

SEEDS = range(500)
PART = Part("request-0", 1, "primary", 0)


@pytest.fixture(scope="module")
def reports():
    return [World(seed).run() for seed in SEEDS]


def test_every_world_ends_well(reports):
    wrong = [report for report in reports if report.wrongs]
    assert not wrong, "\n".join(map(str, wrong))


def test_worlds_see_every_ending_and_move_payloads(reports):
    endings = {branch for report in reports for branch in report.endings}
    assert endings == {"keep", "drop", "doubt"}
    assert sum(report.leases > 20 for report in reports) > len(SEEDS) * 0.9
    # Without a rank that fails, nobody is in doubt; there are many such worlds.
    assert sum("doubt" not in report.endings for report in reports) > len(SEEDS) / 2


def test_worlds_fetch_again_try_again_and_lose_ranks():
    story = "\n".join(line for seed in range(60) for line in World(seed, trace=True).run().trace)
    for words in [" refetch", "round 2: ", "(try 1): keep", "has crashed", "is stopped", "goes on", "has left"]:
        assert words in story
    for words in ["arrives damaged", "arrives (B", "is called off"]:
        assert words in story


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_mistake_is_found_by_some_seed(name):
    assert any(World(seed, seats=SteppedSeats(MUTANTS[name])).run().wrongs for seed in SEEDS)


def test_ranks_that_go_different_ways_are_found_and_named():
    wrongs = [
        wrong for seed in SEEDS for wrong in World(seed, seats=SteppedSeats(MUTANTS["timeout-means-drop"])).run().wrongs
    ]
    assert any(re.search(r"went different ways: .*rank \d: drop", wrong) for wrong in wrongs)


@pytest.mark.parametrize("seed", [3, 298])
def test_a_seed_tells_the_same_story_every_time(seed):
    first, second = (World(seed, trace=True).run() for _ in range(2))
    assert first.trace
    assert first == second


def test_tracing_does_not_change_the_story():
    assert World(11).run().endings == World(11, trace=True).run().endings


def test_a_failing_seed_is_printed_with_the_command_that_replays_it(capsys):
    assert main(["--seeds", "40", "--mutant", "early-keep"]) == 1
    out = capsys.readouterr().out
    seed = re.search(r"replay: python -m omnikv.testing.world --seed (\d+) --trace --mutant early-keep", out)[1]
    stories = []
    for _ in range(2):
        assert main(["--seed", seed, "--trace", "--mutant", "early-keep"]) == 1
        stories.append(capsys.readouterr().out)
    assert stories[0] == stories[1]
    assert "WRONG: " in stories[0]


def test_the_command_says_how_many_worlds_it_ran(capsys):
    assert main(["--seeds", "3"]) == 0
    assert "3 worlds, 0 of them wrong" in capsys.readouterr().out


def test_sizes_may_be_given():
    report = World(5, ranks=6, requests=3).run()
    assert (report.ranks, report.requests, report.wrongs) == (6, 3, ())


def test_the_dice_of_one_seed_fall_alike():
    assert [Dice(8, None, None).latency_s() for _ in range(2)] == [Dice(8, None, None).latency_s()] * 2


# The parts of a world


def test_the_clock_goes_from_event_to_event_in_order():
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append(("late", clock.now_s)))
    clock.at(1.0, lambda: (seen.append(("early", clock.now_s)), clock.after(0.5, lambda: seen.append(("then", 1.5)))))
    clock.run()
    assert seen == [("early", 1.0), ("then", 1.5), ("late", 2.0)]


def test_a_link_keeps_the_order_even_when_the_second_message_is_faster():
    clock, latencies, seen = VirtualClock(), iter([0.5, 0.1]), []
    link = Link(clock, lambda: next(latencies), lambda action: action())
    link.send(lambda: seen.append(1))
    link.send(lambda: seen.append(2))
    clock.run()
    assert seen == [1, 2]


def test_a_severed_link_delivers_a_beginning_and_then_the_loss():
    clock, seen = VirtualClock(), []
    link = Link(clock, lambda: 0.1, lambda action: action())
    for number in range(3):
        link.send(lambda number=number: seen.append(number))
    link.sever(2, lambda: seen.append("lost"))
    link.send(lambda: seen.append("after the end"))
    clock.run()
    assert seen == [0, 1, "lost"]


def test_a_payload_that_is_given_back_can_be_leased_again_but_not_consumed_twice():
    payloads = Payloads()
    payloads.expect(PART, Fate())
    payloads.publish(PART)
    assert payloads.lease(PART)
    assert payloads.lease(PART) is None
    payloads.give_back(PART)
    assert payloads.lease(PART)
    payloads.acknowledge(PART)
    assert (payloads.still_leased(), payloads.acknowledged(), payloads.wrongs) == ([], [PART], [])
    payloads.publish(PART)
    payloads.lease(PART)
    payloads.acknowledge(PART)
    assert payloads.wrongs == ["primary of request-0 from source 0 at rank 1 was consumed 2 times"]


def test_the_world_is_found_in_the_package_and_nothing_else_is():
    assert omnikv.testing.World is World
    with pytest.raises(AttributeError, match="has no attribute 'Worlds'"):
        omnikv.testing.Worlds  # noqa: B018


def test_exploring_and_simulating_need_no_torch():
    code = "import sys, omnikv.testing.explore, omnikv.testing.world; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_world_of_given_sizes_is_replayed_with_them():
    report = World(5, ranks=4, requests=2, seats=SteppedSeats(MUTANTS["early-keep"])).run()
    assert report.replay == "python -m omnikv.testing.world --seed 5 --trace --ranks 4 --requests 2"
    assert str(report).endswith(f"replay: {report.replay}")


def test_a_step_that_refuses_is_a_wrong_of_its_world():
    def refuse(state, event):
        raise LocalProtocolError("cannot take this")

    report = World(1, seats=SteppedSeats(Steps(leader=refuse))).run()
    assert "a step of rank 0 refuses: cannot take this" in report.wrongs


# The oracle


def ending(rank, branch, *, usable=(), late_s=-1.0):
    return Ending(rank=rank, key="request-0", use=0, round=0, branch=branch, usable=usable, late_s=late_s)


def have(content="A"):
    return Ballot(0, True, (RoleBallot("primary", "have", True, facts=spell_facts({"content": content})),))


BALLOTS = (have(), have())


def aftermath(*endings, ballots=BALLOTS, states=("live", "live"), fault=True, runs=None, books=(), payloads=None):
    return Aftermath(
        endings=endings,
        ballots={("request-0", 0, 0): dict(enumerate(ballots))},
        payloads=payloads or Payloads(),
        states=states,
        had_rank_fault=fault,
        open_runs=runs or {},
        open_books=books,
    )


KEPT = [ending(0, "keep", usable=("primary",)), ending(1, "keep", usable=("primary",))]


def test_the_oracle_is_content_with_ranks_that_keep_the_same():
    assert judge(aftermath(*KEPT, fault=False)) == []


def test_the_oracle_is_content_with_doubt_after_a_fault():
    assert judge(aftermath(KEPT[0], ending(1, "doubt"))) == []


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (aftermath(KEPT[0], ending(1, "drop")), "went different ways: rank 0: keep primary; rank 1: drop"),
        (aftermath(KEPT[0], ending(1, "doubt"), fault=False), "is in doubt without cause: rank 1"),
        (aftermath(*KEPT, ballots=(have(), have("B"))), "was kept by rank 0: keep primary, which its ballots do not"),
        (aftermath(*KEPT, ballots=(have(),)), "was kept by rank 0"),
        (aftermath(ending(0, "drop"), ending(1, "drop"), fault=False), "which its ballots do not demand"),
        (aftermath(ending(0, "drop", late_s=0.5)), "ended 0.500 s too late"),
        (aftermath(runs={1: ("request-0",)}), "rank 1 never ended request-0"),
        (aftermath(books=("request-0",)), "the books of rank 0 are still open on request-0"),
    ],
)
def test_the_oracle_finds(after, words):
    assert any(words in wrong for wrong in judge(after))


def test_the_oracle_finds_a_lease_that_never_came_back_and_a_payload_consumed_for_nothing():
    payloads = Payloads()
    for part in (PART, PART._replace(source=1)):
        payloads.expect(part, Fate())
        payloads.publish(part)
        payloads.lease(part)
    payloads.acknowledge(PART)
    assert judge(aftermath(ending(1, "drop"), payloads=payloads)) == [
        "the lease on primary of request-0 from source 1 at rank 1 never came back",
        "primary of request-0 from source 0 at rank 1 was consumed without being kept",
    ]


# Large groups


def test_a_verdict_takes_two_messages_a_follower_at_rank_0():
    figures = measure(Scale(ranks=9, requests=1))
    assert figures.messages == 16
    # One way, eight ballots read, eight rulings sent, and the other way.
    assert figures.median_s == pytest.approx(50e-6 + 8 * 5.1e-6 + 8 * 5e-6 + 50e-6)


def test_ballots_that_travel_together_share_their_message():
    alone, together = (measure(Scale(ranks=5, requests=60, ballots_per_message=count)) for count in (1, 20))
    assert together.messages == alone.messages / 20
    assert together.votes_nbytes < alone.votes_nbytes
    assert together.kept_nbytes == pytest.approx(alone.kept_nbytes / 20, rel=0.2)
    assert together.p99_s < alone.p99_s / 5


def test_costs_at_rank_0_grow_with_the_group():
    small, large = (measure(Scale(ranks=ranks, requests=40)) for ranks in (4, 16))
    assert large.messages == 5 * small.messages
    assert large.verdicts_per_s < small.verdicts_per_s


def test_the_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr("omnikv.testing.world_scale.SCALES", (Scale(ranks=3, requests=10),))
    assert main(["--scale"]) == 0
    assert "| 3 | 10 | 1 | 4.00 |" in capsys.readouterr().out


def test_a_ruling_that_nobody_voted_for_is_refused():
    world = World(2, requests=1)
    with pytest.raises(LocalProtocolError, match="on which it has not voted"):
        world._ranks[1].told("request-0", Ruling("drop", 0))
