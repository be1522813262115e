"""A whole group in virtual time: ranks, requests, payloads with fates of their own, failing ranks, the shipped vote.

Theory of operation. A seed gives a world: its ranks and requests, when each payload arrives (late, never, damaged,
twice, or called off), and which ranks crash or stop at which moment. The ranks fetch in slices, vote over links with
latency, fetch again what is missing, keep or fall back, and try dropped requests anew under the same key. Nothing waits
for a real clock and nothing is random but the seed, so a world runs in milliseconds and the same seed tells the same
story. Afterwards an oracle looks at what every rank did:

* all ranks that learnt the end of a request took the same way; kept is only what every rank held with equal contents;
* no rank is in doubt unless a rank crashed or stopped, and without that each drop is what the ballots demand;
* every living rank ended every request that it began, within the deadline, the vote's time and the grace;
* nothing was consumed twice, or without being kept; every lease was acknowledged or given back;
* nobody's step refused what happened, and rank 0's books are closed.

`python -m omnikv.testing.world --seed N --trace` tells one story; `--scale` prints what large groups cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from omnikv.core.messages import Ballot, Ruling
from omnikv.errors import LocalProtocolError
from omnikv.testing.explore_ballots import spell_ballot
from omnikv.testing.mutants import MUTANTS
from omnikv.testing.world_clock import Action, VirtualClock
from omnikv.testing.world_faults import Dice, Part, RankFault, Request
from omnikv.testing.world_links import Link
from omnikv.testing.world_oracle import Aftermath, Ending, judge
from omnikv.testing.world_payloads import Payloads, spell_part
from omnikv.testing.world_rank import RankProcess, Run
from omnikv.testing.world_scale import print_scale
from omnikv.testing.world_seats import Seats, SteppedSeats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReport:
    """What became of a world: how many messages its votes took, how requests ended, and what was wrong with that."""

    seed: int
    ranks: int
    requests: int
    messages: int
    leases: int
    endings: dict[str, int]
    ended_s: float
    replay: str
    wrongs: tuple[str, ...] = ()
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        ended = ", ".join(f"{branch} {count}" for branch, count in sorted(self.endings.items()))
        size = f"{self.ranks} ranks, {self.requests} requests, {self.messages} messages, {self.leases} leases"
        lines = [f"seed {self.seed}: {size}, {self.ended_s:.3f} s; {ended}"]
        if self.wrongs:
            lines += [*(f"WRONG: {wrong}" for wrong in self.wrongs), f"replay: {self.replay}"]
        return "\n".join(lines)


class World:
    """One simulated group with all that a seed brings upon it; `run` tells what became of it."""

    def __init__(
        self,
        seed: int,
        *,
        ranks: int | None = None,
        requests: int | None = None,
        seats: Seats | None = None,
        trace: bool = False,
    ) -> None:
        """Sizes that are not given are the seed's; other `seats` stand in for those that run the shipped steps."""
        self._seed = seed
        self._replay = f"python -m omnikv.testing.world --seed {seed} --trace"
        self._replay += "".join(
            f" --{name} {size}" for name, size in (("ranks", ranks), ("requests", requests)) if size is not None
        )
        self._dice = Dice(seed, ranks, requests)
        self.clock = VirtualClock()
        self.payloads = Payloads()
        self.times = self._dice.times
        self.sources = self._dice.sources
        self._size = self._dice.ranks
        self._tracing = trace
        self._lines: list[str] = []
        self._wrongs: list[str] = []
        self._messages = 0
        self._endings: list[Ending] = []
        self._ballots: dict[tuple[str, int, int], dict[int, Ballot]] = {}
        self._state = ["live"] * self._size
        self._woken_s = [0.0] * self._size
        self._backlog: list[list[tuple[bool, Action]]] = [[] for _ in range(self._size)]
        self._had_rank_fault = False
        seats = seats or SteppedSeats()
        self._leader = seats.leader(self._size, send=self._announce, tell=partial(self._tell, 0))
        self._followers = {
            rank: seats.follower(rank, send=partial(self._report, rank), tell=partial(self._tell, rank))
            for rank in range(1, self._size)
        }
        self._ups = {rank: self._link(0) for rank in range(1, self._size)}
        self._downs = {rank: self._link(rank) for rank in range(1, self._size)}
        self._ranks = [RankProcess(0, self, self._leader)]
        self._ranks += [RankProcess(rank, self, seat) for rank, seat in self._followers.items()]

    def run(self) -> WorldReport:
        """What became of the world once nothing more happens in it."""
        for request in self._dice.requests:
            self._plan(request)
        for fault in self._dice.rank_faults:
            self.clock.at(fault.at_s, partial(self._strike, fault))
        self.clock.run()
        endings: dict[str, int] = {}
        for ending in self._endings:
            endings[ending.branch] = endings.get(ending.branch, 0) + 1
        return WorldReport(
            seed=self._seed,
            replay=self._replay,
            ranks=self._size,
            requests=len(self._dice.requests),
            messages=self._messages,
            leases=self.payloads.leases,
            endings=endings,
            ended_s=self.clock.now_s,
            wrongs=tuple(self._wrongs + self.payloads.wrongs + self._judge()),
            trace=tuple(self._lines),
        )

    # What its ranks see of the world.

    def wake(self, rank: int, delay_s: float, action: Action) -> None:
        """Nothing; `action` happens at `rank` after `delay_s`, later if it is stopped, never if it is gone."""
        self.clock.after(delay_s, lambda: self._at_rank(rank, action))

    def cast(self, rank: int, use: int, key: str, ballot: Ballot) -> None:
        """Nothing; writes down that a rank votes."""
        self._ballots.setdefault((key, use, ballot.round), {})[rank] = ballot
        self._note(f"rank {rank} votes on {key}: {spell_ballot(ballot)}")

    def ended(self, rank: int, run: Run, branch: str, usable: tuple[str, ...]) -> None:
        """Nothing; writes down how a request ended at a rank."""
        self._note(f"rank {rank} ends {run.request.key} (try {run.use}): {branch} {' '.join(usable)}".rstrip())
        due_s = run.started_s + run.request.timeout_s + self.times.vote_timeout_s + self.times.grace_s
        self._endings.append(
            Ending(
                rank=rank,
                key=run.request.key,
                use=run.use,
                round=run.round,
                branch=branch,
                usable=usable,
                late_s=self.clock.now_s - max(due_s, self._woken_s[rank]),
            )
        )

    def leave(self, rank: int) -> None:
        """Nothing; a rank in doubt has its group torn down."""
        self._end_rank(rank, "left", truncate=False)

    # What happens to it.

    def _plan(self, request: Request) -> None:
        for process in self._ranks:
            begins_s = request.start_s + self._dice.skew_s()
            self.wake(process.rank, begins_s, partial(process.begin, request))
            for role, _ in request.roles:
                for source in range(self.sources):
                    self._plan_part(Part(request.key, process.rank, role, source), request)

    def _plan_part(self, part: Part, request: Request) -> None:
        fate = self._dice.fate(part, request)
        self.payloads.expect(part, fate)

        for arrives_s in fate.arrivals_s:
            word = "arrives damaged" if fate.is_damaged else f"arrives ({fate.content})"
            self.clock.at(request.start_s + arrives_s, partial(self._change, part, self.payloads.publish, word))
        if fate.fails_s is not None:
            change = partial(self._change, part, self.payloads.fail, "is called off")
            self.clock.at(request.start_s + fate.fails_s, change)

    def _change(self, part: Part, what: Callable[[Part], None], words: str) -> None:
        self._note(f"{words}: {spell_part(part)}")
        what(part)
        self._at_rank(part.rank, partial(self._ranks[part.rank].notice, part.key))

    def _strike(self, fault: RankFault) -> None:
        if self._state[fault.rank] != "live":
            return
        self._had_rank_fault = True
        if fault.kind == "crash":
            self._end_rank(fault.rank, "crashed", truncate=True)
            return
        self._state[fault.rank] = "stopped"
        self._note(f"rank {fault.rank} is stopped")
        if fault.lasts_s is not None:
            self.clock.after(fault.lasts_s, lambda: self._resume(fault.rank))

    def _resume(self, rank: int) -> None:
        self._state[rank], self._woken_s[rank] = "live", self.clock.now_s
        self._note(f"rank {rank} goes on")
        backlog, self._backlog[rank] = self._backlog[rank], []
        order = self._dice.waking_order()
        if order != "as it came":
            backlog.sort(key=lambda item: item[0] is not (order == "messages first"))
        for is_message, action in backlog:
            self._at_rank(rank, action, is_message=is_message)

    def _end_rank(self, rank: int, state: str, *, truncate: bool) -> None:
        self._note(f"rank {rank} has {state}")
        self._state[rank] = state
        self._ranks[rank].give_back_all()
        for peer, link in self._downs.items() if rank == 0 else [(0, self._ups[rank])]:
            # Of what a crashed rank had sent, its peers may get any beginning.
            keep = self._dice.up_to(link.under_way) if truncate else link.under_way
            lose = self._followers[peer].lose if rank == 0 else partial(self._leader.lose, rank)
            link.sever(keep, lose)

    def _at_rank(self, rank: int, action: Action, *, is_message: bool = False) -> None:
        if self._state[rank] == "stopped":
            self._backlog[rank].append((is_message, action))
        elif self._state[rank] == "live":
            try:
                action()
            except LocalProtocolError as error:
                self._wrongs.append(f"a step of rank {rank} refuses: {error}")
                self._end_rank(rank, "broken down", truncate=False)

    def _judge(self) -> list[str]:
        return judge(
            Aftermath(
                endings=self._endings,
                ballots=self._ballots,
                payloads=self.payloads,
                states=self._state,
                had_rank_fault=self._had_rank_fault,
                open_runs={process.rank: tuple(process.runs) for process in self._ranks},
                open_books=tuple(self._leader.open_keys()),
            )
        )

    # How the group's votes travel.

    def _link(self, rank: int) -> Link:
        return Link(self.clock, self._dice.latency_s, partial(self._at_rank, rank, is_message=True))

    def _announce(self, rank: int, message: object) -> None:
        self._messages += 1
        self._downs[rank].send(partial(self._followers[rank].hear, message))

    def _report(self, rank: int, message: object) -> None:
        self._messages += 1
        self._ups[rank].send(partial(self._leader.hear, rank, message))

    def _tell(self, rank: int, key: str, answer: Ruling | str) -> None:
        if isinstance(answer, str):
            self._note(f"rank {rank} is in doubt on {key}: {answer}")
        else:
            missing = ", ".join(f"rank {lacking} lacks {role}" for lacking, role in answer.missing)
            self._note(f"rank {rank} is told on {key}: round {answer.round}, {answer.kind} {missing}".rstrip())
        self.wake(rank, 0.0, partial(self._ranks[rank].told, key, answer))

    def _note(self, words: str) -> None:
        if self._tracing:
            self._lines.append(f"{self.clock.now_s:9.5f}  {words}")


def main(arguments: list[str] | None = None) -> int:
    """0 when every world ended well, 1 when one did not; prints what became of them."""
    options = _parser().parse_args(arguments)
    if options.scale:
        print_scale()
        return 0
    seats = SteppedSeats(MUTANTS[options.mutant]) if options.mutant else None
    seeds = [options.seed] if options.seed is not None else range(options.seeds)
    failed, endings = 0, {"keep": 0, "drop": 0, "doubt": 0}
    for seed in seeds:
        report = World(seed, ranks=options.ranks, requests=options.requests, seats=seats, trace=options.trace).run()
        failed += bool(report.wrongs)
        endings = {branch: count + report.endings.get(branch, 0) for branch, count in endings.items()}
        sys.stdout.writelines(f"{line}\n" for line in report.trace)
        if options.mutant:
            report = replace(report, replay=f"{report.replay} --mutant {options.mutant}")
        if report.wrongs or options.seed is not None:
            sys.stdout.write(f"{report}\n")
    told = ", ".join(f"{branch} {count}" for branch, count in endings.items())
    sys.stdout.write(f"{len(seeds)} worlds, {failed} of them wrong; endings at ranks: {told}\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m omnikv.testing.world", description="Runs simulated groups.")
    parser.add_argument("--seed", type=int, help="run this one world")
    parser.add_argument("--seeds", type=int, default=500, help="run the worlds of seeds 0 to this; %(default)s")
    parser.add_argument("--trace", action="store_true", help="tell everything that happens")
    parser.add_argument("--ranks", type=int, help="how many ranks; by default the seed's")
    parser.add_argument("--requests", type=int, help="how many requests; by default the seed's")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="run these broken steps instead of the shipped ones")
    parser.add_argument("--scale", action="store_true", help="print what votes cost in large groups, and nothing else")
    return parser


if __name__ == "__main__":
    sys.exit(main())
