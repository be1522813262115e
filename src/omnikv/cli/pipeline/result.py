"""What a run of the pipeline came to, as figures; `as_json` is the published form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omnikv.cli.pipeline.plan import PipelineRequest, StageJob
from omnikv.cli.ranks.processes import RankProcess

# Latents are of size 1; the stages sum in other orders than one process does.
TOLERANCE = 1e-3
Rank = RankProcess[StageJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One receiving rank's part in one picture.

    `byte_exact` says whether every head of every cache that it holds has the bytes that the autoregressive stage has;
    None where it holds none that came from there. `max_difference` is that of its latents from the reference's.
    """

    rank: int
    replica: int
    place: dict[str, int]
    reader: bool
    verdict: str
    causes: list[str]
    rounds: int
    fetched_nbytes: int
    given_nbytes: int
    taken_nbytes: int
    receive_ms: float
    byte_exact: bool | None
    max_difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureResult:
    """One picture, as the ranks of `replica` received and drew it.

    `ending` is what became of it there: "kept", "fallback", or "torn down" when a rank was lost. `max_difference` is
    None where it was not drawn. `handoff_ms` is from the first send to the last rank that knows its verdict.
    """

    number: int
    replica: int
    ending: str
    ranks: list[RankRow]
    max_difference: float | None
    handoff_ms: float

    @property
    def matches(self) -> bool:
        drawn = self.ending == "torn down" or (self.max_difference is not None and self.max_difference <= TOLERANCE)
        return drawn and all(row.byte_exact is not False for row in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """The outcome of a run. `sent_nbytes` is what each autoregressive rank sent, headers included."""

    matches: bool
    max_difference: float
    tolerance: float
    mix: str
    fault: str
    pictures: list[PictureResult]
    sent_nbytes: list[int]
    unread: int
    request: dict[str, Any]
    total_s: float

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


def make_picture(number: int, replica: int, drawing: Sequence[Rank], understanding: Sequence[Rank]) -> PictureResult:
    """The picture `number`, of ranks that have told all they had to tell."""
    sent = _by_role_and_head([rank.events["ready"]["digests"][number] for rank in understanding])
    started_s = _told(f"sent {number}", "started_s", understanding)
    decided_s = _told(f"outcome {number}", "decided_s", drawing)
    rows = [_row(number, rank, sent) for rank in drawing if f"outcome {number}" in rank.events]
    drawn = [row.max_difference for row in rows if row.max_difference is not None]
    if len(drawn) < len(drawing):
        ending = "torn down"
    else:
        ending = "kept" if all(row.verdict == "keep" for row in rows) else "fallback"
    return PictureResult(
        number=number,
        replica=replica,
        ending=ending,
        ranks=rows,
        max_difference=max(drawn) if ending != "torn down" else None,
        handoff_ms=round((max(decided_s) - min(started_s, default=max(decided_s))) * 1000, 3),
    )


def make_result(
    request: PipelineRequest, pictures: list[PictureResult], understanding: Sequence[Rank], *, total_s: float
) -> PipelineResult:
    """The result of a run whose pictures are these."""
    drawn = {picture.number for picture in pictures if picture.max_difference is not None}
    differences = [picture.max_difference for picture in pictures if picture.max_difference is not None]
    return PipelineResult(
        matches=all(picture.matches for picture in pictures) and len(drawn) == request.replicas,
        max_difference=max(differences, default=float("inf")),
        tolerance=TOLERANCE,
        mix=request.mix,
        fault=request.fault,
        pictures=pictures,
        sent_nbytes=[
            sum(facts["nbytes"] for event, facts in rank.events.items() if event.startswith("sent"))
            for rank in understanding
        ],
        unread=sum(rank.events["left"]["unread"] for rank in understanding if "left" in rank.events),
        request=asdict(request),
        total_s=round(total_s, 1),
    )


def _told(event: str, fact: str, ranks: Sequence[Rank]) -> list[float]:
    return [rank.events[event][fact] for rank in ranks if event in rank.events]


def _by_role_and_head(digests: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (role, head): digest for rank in digests for role, by_head in rank.items() for head, digest in by_head.items()
    }


def _row(number: int, rank: Rank, sent: dict[tuple[str, str], str]) -> RankRow:
    ready, outcome = rank.events["ready"], rank.events[f"outcome {number}"]
    held = [((role, head), digest) for role, heads in outcome["digests"].items() for head, digest in heads.items()]
    finished = rank.events.get(f"finished {number}")
    return RankRow(
        rank=rank.job.rank,
        replica=ready["place"]["dp"],
        place=ready["place"],
        reader=ready["reader"],
        verdict=outcome["verdict"],
        causes=outcome["causes"],
        rounds=outcome["rounds"],
        receive_ms=round((outcome["decided_s"] - outcome["started_s"]) * 1000, 3),
        byte_exact=all(sent[place] == digest for place, digest in held) if held else None,
        max_difference=finished["max_difference"] if finished is not None else None,
        **outcome["traffic"],
    )
