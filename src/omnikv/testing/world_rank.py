"""One rank of a simulated world: it fetches in rounds, votes, and keeps, falls back or stops as it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from omnikv.core.messages import Ballot, RoleBallot, Ruling, spell_facts
from omnikv.core.rounds import round_end
from omnikv.errors import LocalProtocolError
from omnikv.testing.world_clock import Action, VirtualClock
from omnikv.testing.world_faults import Fate, Part, Request, Times
from omnikv.testing.world_payloads import Payloads
from omnikv.testing.world_seats import Seat


class Surroundings(Protocol):
    """What a rank sees of its world."""

    clock: VirtualClock
    payloads: Payloads
    times: Times
    sources: int

    def wake(self, rank: int, delay_s: float, action: Action) -> None: ...
    def cast(self, rank: int, use: int, key: str, ballot: Ballot) -> None: ...
    def ended(self, rank: int, run: Run, branch: str, usable: tuple[str, ...]) -> None: ...
    def leave(self, rank: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Run:
    """One try of one request at one rank. `use` counts the tries; `held` are the leased payloads."""

    request: Request
    use: int
    started_s: float
    round: int = 0
    phase: Literal["fetching", "voting", "over"] = "fetching"
    held: dict[Part, Fate] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class RankProcess:
    """A rank that works through its requests. `runs` are those that it has begun and not ended, by key."""

    def __init__(self, rank: int, world: Surroundings, seat: Seat) -> None:
        self.rank = rank
        self.runs: dict[str, Run] = {}
        self._world = world
        self._seat = seat

    def begin(self, request: Request, use: int = 0) -> None:
        """Nothing; this rank starts on a request, for the first time or anew."""
        run = Run(request=request, use=use, started_s=self._world.clock.now_s)
        self.runs[request.key] = run
        self._begin_round(run)

    def notice(self, key: str) -> None:
        """Nothing; something about a request's payloads has changed."""
        run = self.runs.get(key)
        if run is not None and run.phase == "fetching":
            self._fetch(run)

    def told(self, key: str, answer: Ruling | str) -> None:
        """Nothing; the group has ruled, or this rank cannot learn how (a text)."""
        run = self.runs.get(key)
        if run is None or run.phase != "voting":
            raise LocalProtocolError(f"rank {self.rank} is told of {key!r}, on which it has not voted: {answer}")
        if isinstance(answer, str):
            self._leave_in_doubt()
        elif answer.kind == "refetch":
            run.round, run.phase = answer.round + 1, "fetching"
            self._begin_round(run)
        else:
            self._end(run, answer.kind, answer.usable)
            if answer.kind == "drop" and run.use + 1 < run.request.tries:
                self._world.wake(self.rank, 0.001, lambda: self.begin(run.request, run.use + 1))

    def give_back_all(self) -> None:
        """Nothing; no lease of this rank is left: it is gone, and senders take back what it had."""
        for run in self.runs.values():
            self._give_back(run, run.held)

    def _leave_in_doubt(self) -> None:
        for run in list(self.runs.values()):
            self._end(run, "doubt", ())
        self._world.leave(self.rank)

    def _end(self, run: Run, branch: str, usable: tuple[str, ...]) -> None:
        used = [part for part in run.held if branch == "keep" and part.role in usable]
        for part in used:
            self._world.payloads.acknowledge(part)
            del run.held[part]
        self._give_back(run, run.held)
        run.phase = "over"
        del self.runs[run.request.key]
        self._world.ended(self.rank, run, branch, usable)

    def _give_back(self, run: Run, parts: dict[Part, Fate]) -> None:
        for part in list(parts):
            self._world.payloads.give_back(part)
            del run.held[part]

    def _begin_round(self, run: Run) -> None:
        number, use = run.round, run.use
        end_s, _ = self._slice_end(run)

        def end_slice() -> None:
            if self.runs.get(run.request.key) is run and (run.use, run.round, run.phase) == (use, number, "fetching"):
                self._vote(run)

        self._world.wake(self.rank, max(end_s - self._world.clock.now_s, 0.0), end_slice)
        self._fetch(run)

    def _slice_end(self, run: Run) -> tuple[float, bool]:
        return round_end(run.started_s, run.started_s + run.request.timeout_s, self._world.times.slice_s, run.round)

    def _fetch(self, run: Run) -> None:
        for role, _ in run.request.roles:
            for part in self._parts(run, role):
                if role not in run.failed:
                    self._take(run, part)
        required_failed = any(required and role in run.failed for role, required in run.request.roles)
        if required_failed or all(role in run.failed or self._has(run, role) for role, _ in run.request.roles):
            self._vote(run)

    def _take(self, run: Run, part: Part) -> None:
        payloads = self._world.payloads
        if part not in run.held and payloads.has_failed(part):
            run.failed[part.role] = f"source {part.source} failed"
            return
        fate = payloads.lease(part)
        if fate is None:
            return
        if part in run.held:
            # It came twice; one of the two is enough.
            payloads.give_back(part)
        elif fate.is_damaged:
            payloads.give_back(part)
            run.failed[part.role] = f"what source {part.source} sent is damaged"
        else:
            run.held[part] = fate

    def _vote(self, run: Run) -> None:
        run.phase = "voting"
        _, can_refetch = self._slice_end(run)
        ballot = Ballot(run.round, can_refetch, tuple(self._entry(run, *role) for role in run.request.roles))
        self._world.cast(self.rank, run.use, run.request.key, ballot)
        due_s = run.started_s + run.request.timeout_s + self._world.times.vote_timeout_s
        due_s += self._world.times.grace_s if self.rank else 0.0
        number = run.round

        def expire() -> None:
            if self.runs.get(run.request.key) is run and (run.round, run.phase) == (number, "voting"):
                self._seat.expire(run.request.key)

        self._world.wake(self.rank, max(due_s - self._world.clock.now_s, 0.0), expire)
        self._seat.cast(run.request.key, ballot)

    def _entry(self, run: Run, role: str, required: bool) -> RoleBallot:
        if role in run.failed:
            return RoleBallot(role, "failed", required, cause=run.failed[role])
        if not self._has(run, role):
            return RoleBallot(role, "missing", required, cause="nothing yet")
        contents = {run.held[part].content for part in self._parts(run, role)}
        return RoleBallot(role, "have", required, facts=spell_facts({"content": "+".join(sorted(contents))}))

    def _has(self, run: Run, role: str) -> bool:
        return all(part in run.held for part in self._parts(run, role))

    def _parts(self, run: Run, role: str) -> list[Part]:
        return [Part(run.request.key, self.rank, role, source) for source in range(self._world.sources)]
