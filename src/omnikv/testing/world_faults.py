"""What a seed brings upon a world: how large it is, what becomes of each payload, and which ranks fail when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """One payload's name: request key, receiving rank, role, and source rank. Another try asks for the same ones."""

    key: str
    rank: int
    role: str
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a payload: when it arrives (twice if duplicated), or when its sender says that it will not.

    Times are seconds after the request's start. Ranks that get different contents hold different things.
    """

    arrivals_s: tuple[float, ...] = ()
    fails_s: float | None = None
    is_damaged: bool = False
    content: str = "A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: its key, when it starts, its roles and which are required, and how often it is tried anew."""

    key: str
    start_s: float
    timeout_s: float
    roles: tuple[tuple[str, bool], ...]
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """A rank crashes at a moment, or stops; a stopped one goes on after `lasts_s`, if that is not None."""

    rank: int
    at_s: float
    kind: Literal["crash", "hang"]
    lasts_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The durations of a world: a round's slice, the vote after a deadline, a follower's grace beyond it."""

    slice_s: float = 0.25
    vote_timeout_s: float = 1.0
    grace_s: float = 0.25
    start_skew_s: float = 0.05
    longest_latency_s: float = 0.02


class Dice:
    """All of a world's chances, drawn from one seed in one order."""

    def __init__(self, seed: int, ranks: int | None, requests: int | None) -> None:
        self._random = random.Random(seed)
        self.times = Times()
        self.ranks = ranks or self._random.choice((2, 3, 3, 4, 5))
        self.sources = self._random.randint(1, 3)
        # Some worlds are calm, so that what must hold without faults is seen as well.
        self._trouble = self._random.choice((0.0, 0.05, 0.15, 0.4))
        self.requests = tuple(self._request(index) for index in range(requests or self._random.randint(4, 10)))
        self.rank_faults = tuple(self._rank_fault() for _ in range(self._random.choice((0, 0, 1, 1, 2))))
        self._notices_death = self._random.random() < 0.5
        self._source_deaths_s = {
            source: self._random.uniform(0.0, 3.0)
            for source in range(self.sources)
            if self._random.random() < self._trouble / 2
        }

    def latency_s(self) -> float:
        """How long a message takes: mostly little, sometimes long."""
        quick = self._random.random() < 0.8
        return self._random.uniform(5e-5, 5e-4) if quick else self._random.uniform(5e-4, self.times.longest_latency_s)

    def skew_s(self) -> float:
        """How much later than others a rank begins a request."""
        return self._random.uniform(0.0, self.times.start_skew_s)

    def waking_order(self) -> Literal["as it came", "messages first", "deadlines first"]:
        """In which order a rank that was stopped takes what happened meanwhile."""
        return self._random.choice(("as it came", "messages first", "deadlines first"))

    def up_to(self, count: int) -> int:
        """A number from 0 to `count`."""
        return self._random.randint(0, count)

    def fate(self, part: Part, request: Request) -> Fate:
        """What becomes of a payload."""
        timeout_s = request.timeout_s
        roll, delay_s = self._random.random(), self._random.expovariate(20.0)
        late_s, content = self._random.uniform(0.0, 1.3 * timeout_s), "A"
        kinds = ("late", "late", "never", "damaged", "twice", "failed", "other content")
        kind = self._random.choice(kinds) if roll < self._trouble else "on time"
        dies_s = self._source_deaths_s.get(part.source)
        arrives_s = late_s if kind == "late" else delay_s
        if dies_s is not None and request.start_s + arrives_s > dies_s:
            # Some transports notice a dead sender, with others nothing more comes.
            told_s = max(dies_s - request.start_s, 0.0) + 0.001
            return Fate(fails_s=told_s) if self._notices_death else Fate()
        if kind == "never":
            return Fate()
        if kind == "failed":
            return Fate(fails_s=late_s)
        arrivals = (delay_s, late_s) if kind == "twice" else (arrives_s,)
        content = f"B{part.rank}" if kind == "other content" else "A"
        return Fate(arrivals_s=arrivals, is_damaged=kind == "damaged", content=content)

    def _request(self, index: int) -> Request:
        companions = (("cfg_img", False), ("cfg_text", self._random.random() < 0.5))
        roles = (*companions[: self._random.randint(0, 2)], ("primary", True))
        return Request(
            key=f"request-{index}",
            start_s=self._random.uniform(0.0, 2.0),
            timeout_s=self._random.choice((0.3, 0.6, 1.0, 2.0)),
            roles=roles,
            tries=self._random.choice((1, 2, 3)),
        )

    def _rank_fault(self) -> RankFault:
        is_crash = self._random.random() < 0.5
        return RankFault(
            rank=self._random.randrange(self.ranks),
            at_s=self._random.uniform(0.0, 4.0),
            kind="crash" if is_crash else "hang",
            lasts_s=None if is_crash or self._random.random() < 0.4 else self._random.uniform(0.05, 4.0),
        )
