"""What a vote costs in large groups, where all pass through rank 0: messages, bytes, and the time to the ruling.

The shipped steps run in virtual time without faults: a number of requests is ready on every rank at the same instant,
each rank's ballots reach rank 0 over links with one latency, and rank 0 spends a fixed time on each message that it
reads or sends, one after another, and on each ballot that it reads. Bytes are those of the channel's messages, with
their frames. Ranks other than 0 take no time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import msgspec

from omnikv.core.messages import Ballot, Kept, RoleBallot, Ruling, Rulings, Votes, spell_facts
from omnikv.testing.steps import Steps
from omnikv.testing.world_clock import VirtualClock
from omnikv.testing.world_seats import FollowerSeat, LeaderSeat

# How long the channel's frames say they are.
_FRAME_HEADER_NBYTES = 4
# As long as the digests and counts of a real ballot.
_FACTS = {
    "dtype": "bfloat16",
    "layer shapes": "0123456789abcdef",
    "layers": "28",
    "metadata": "0123456789abcdef",
    "tokens": "1024",
}
BALLOT = Ballot(0, True, (RoleBallot("primary", "have", True, facts=spell_facts(_FACTS)),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A group and its load: how many requests are ready at once, and how many ballots travel in one message."""

    ranks: int
    requests: int
    ballots_per_message: int = 1
    latency_s: float = 50e-6
    message_cost_s: float = 5e-6
    ballot_cost_s: float = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFigures:
    """Per verdict: messages and bytes in and out of rank 0, and when the last rank learns it, in seconds.

    `kept_nbytes` are the bytes out when all ranks cast the same, `ruled_nbytes` when the rulings are spelt out.
    """

    scale: Scale
    messages: float
    votes_nbytes: float
    kept_nbytes: float
    ruled_nbytes: float
    median_s: float
    p99_s: float
    verdicts_per_s: float


@dataclass(slots=True)
class _Counts:
    messages: int = 0
    votes_nbytes: int = 0
    kept_nbytes: int = 0
    ruled_nbytes: int = 0
    # When rank 0 has done all that it has begun.
    free_s: float = 0.0
    learnt: dict[str, list[float]] = field(default_factory=dict)


class _Star:
    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.clock = VirtualClock()
        self.counts = _Counts()
        self._rulings: dict[int, list[tuple[str, Ruling]]] = {}
        self._leader = LeaderSeat(scale.ranks, Steps(), send=self._announce, tell=self._learn)
        self._followers = {
            rank: FollowerSeat(rank, Steps(), send=lambda message: None, tell=self._learn)
            for rank in range(1, scale.ranks)
        }

    def run(self) -> _Counts:
        keys = [f"request-{index:06d}" for index in range(self.scale.requests)]
        step = self.scale.ballots_per_message
        for key in keys:
            self._leader.cast(key, BALLOT)
        for first in range(0, len(keys), step):
            batch = keys[first : first + step]
            nbytes = _nbytes(Votes(1e6, [(key, BALLOT) for key in batch]))
            for rank, follower in self._followers.items():
                for key in batch:
                    follower.cast(key, BALLOT)
                self.counts.votes_nbytes += nbytes
                self._deliver(rank, batch)
        self.clock.run()
        return self.counts

    def _deliver(self, rank: int, batch: list[str]) -> None:
        # Rank 0 takes one message after the other; what is decided by one goes out before the next is read.
        self.clock.at(self.scale.latency_s, lambda: self._read(rank, batch))

    def _read(self, rank: int, batch: list[str]) -> None:
        self._work(len(batch))
        for key in batch:
            self._leader.hear(rank, (key, BALLOT))
        rulings, self._rulings = self._rulings, {}
        for peer, news in rulings.items():
            self._work()
            self.counts.kept_nbytes += _nbytes(Kept(batch[0]))
            self.counts.ruled_nbytes += _nbytes(Rulings(tuple(news)))
            arrives_s = self.counts.free_s + self.scale.latency_s
            self.clock.at(arrives_s, lambda peer=peer, news=news: self._hear(peer, news))  # type: ignore[misc]

    def _work(self, ballots: int = 0) -> None:
        self.counts.messages += 1
        begins_s = max(self.counts.free_s, self.clock.now_s)
        self.counts.free_s = begins_s + self.scale.message_cost_s + self.scale.ballot_cost_s * ballots

    def _announce(self, rank: int, message: tuple[str, Ruling]) -> None:
        self._rulings.setdefault(rank, []).append(message)

    def _hear(self, rank: int, news: list[tuple[str, Ruling]]) -> None:
        for message in news:
            self._followers[rank].hear(message)

    def _learn(self, key: str, answer: Ruling | str) -> None:
        if isinstance(answer, str) or answer.kind != "keep":
            raise AssertionError(f"without faults {key!r} is kept, not {answer}")
        self.counts.learnt.setdefault(key, []).append(self.clock.now_s)


def measure(scale: Scale) -> ScaleFigures:
    """What a vote of that scale costs, from one run of the shipped steps in virtual time."""
    counts = _Star(scale).run()
    last_s = sorted(max(times) for times in counts.learnt.values())
    total = len(last_s)
    return ScaleFigures(
        scale=scale,
        messages=counts.messages / total,
        votes_nbytes=counts.votes_nbytes / total,
        kept_nbytes=counts.kept_nbytes / total,
        ruled_nbytes=counts.ruled_nbytes / total,
        median_s=last_s[total // 2],
        p99_s=last_s[min(total * 99 // 100, total - 1)],
        verdicts_per_s=total / counts.free_s,
    )


SCALES = tuple(
    Scale(ranks=ranks, requests=requests, ballots_per_message=batch)
    for ranks in (8, 64, 256)
    for requests, batch in ((1, 1), (1000, 1), (1000, 50), (1000, 1000))
)


_COLUMNS = (
    "ranks",
    "in flight",
    "ballots a message",
    "messages",
    "bytes in",
    "bytes out, all alike",
    "bytes out, spelt out",
    "median ms",
    "p99 ms",
    "verdicts/s",
)


def print_scale(scales: tuple[Scale, ...] | None = None) -> None:
    """Nothing; prints one line of a table for each scale, by default for `SCALES`."""
    scales = scales or SCALES
    one, write = scales[0], sys.stdout.write
    write(
        f"links of {one.latency_s * 1e6:.0f} us; at rank 0 {one.message_cost_s * 1e6:.0f} us a message and "
        f"{one.ballot_cost_s * 1e6:.1f} us a ballot;\nall requests ready at once; messages and bytes are those of "
        "rank 0 for one verdict\n\n"
    )
    write(f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n")
    for scale in scales:
        figures = measure(scale)
        write(
            f"| {scale.ranks} | {scale.requests} | {scale.ballots_per_message} | {figures.messages:.2f} "
            f"| {figures.votes_nbytes:.0f} | {figures.kept_nbytes:.1f} | {figures.ruled_nbytes:.0f} "
            f"| {figures.median_s * 1e3:.2f} | {figures.p99_s * 1e3:.2f} | {figures.verdicts_per_s:.0f} |\n"
        )
        sys.stdout.flush()


def _nbytes(message: Votes | Kept | Rulings) -> int:
    return len(msgspec.msgpack.encode(message)) + _FRAME_HEADER_NBYTES
