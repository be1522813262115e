"""What a demo came to, as figures; `as_json` is the published form.

All times of day are of the monotonic clock, which the processes of one host share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnikv.cli.demo.plan import DemoRequest, RankJob
from omnikv.cli.ranks.processes import RankProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank's part. A figure that the rank has none of is None.

    `wake_up_ms` is how late a waiting decode rank noticed a payload that had been published, the worst of its
    payloads; `receive_ms` is from noticing the last one to holding the KV with the verdict "keep".
    """

    role: str
    rank: int
    heads: tuple[int, ...]
    nbytes: int
    send_ms: float | None = None
    wake_up_ms: float | None = None
    receive_ms: float | None = None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The outcome of a demo. `tokens` and `text` are of the first decode rank, or of the first that differs.

    `payload_bytes` is what the prefill ranks sent, headers included. `handoff_ms` is from the first send to the last
    decode rank holding its KV, or knowing that it is dropped; `noticed_ms` from the kill of a rank to the last decode
    rank knowing of it.
    """

    identical: bool
    tokens: list[int]
    reference_tokens: list[int]
    verdict: str
    fallback: str | None
    causes: dict[str, str]
    payload_bytes: int
    handoff_ms: float | None
    noticed_ms: float | None
    ranks: list[RankRow]
    prompt: str
    text: str
    reference_text: str
    num_prompt_tokens: int
    prefill_tp: int
    decode_tp: int
    killed_rank: int | None
    model: str
    total_s: float

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


def make_result(
    request: DemoRequest,
    model_dir: Path,
    prefill: list[RankProcess[RankJob]],
    decode: list[RankProcess[RankJob]],
    reference: RankProcess[RankJob],
    *,
    total_s: float,
) -> DemoResult:
    """The result of ranks that have told all they had to tell."""
    outcomes = [rank.events["outcome"] for rank in decode]
    dropped = any(outcome["verdict"] == "drop" for outcome in outcomes)
    expected = reference.events["finished"]
    continued = [rank.events["finished"] for rank in decode]
    different = [finished for finished in continued if finished["tokens"] != expected["tokens"]]
    shown = (different or continued)[0]
    sent = {rank.job.rank: rank.events["sent"] for rank in prefill if "sent" in rank.events}
    decided_s = max(outcome["decided_s"] for outcome in outcomes)
    killed_s = [rank.killed_at_s for rank in prefill if rank.killed_at_s is not None]
    return DemoResult(
        identical=not different,
        tokens=shown["tokens"],
        reference_tokens=expected["tokens"],
        verdict="drop" if dropped else "keep",
        fallback="recompute" if dropped else None,
        causes=outcomes[0]["causes"],
        payload_bytes=sum(facts["nbytes"] for facts in sent.values()),
        handoff_ms=_ms(decided_s - min(facts["started_s"] for facts in sent.values())) if sent else None,
        noticed_ms=_ms(decided_s - min(killed_s)) if killed_s else None,
        ranks=[*map(_prefill_row, prefill), *(_decode_row(rank, sent) for rank in decode)],
        prompt=request.prompt,
        text=shown["text"],
        reference_text=expected["text"],
        num_prompt_tokens=prefill[0].events["ready"]["num_tokens"],
        prefill_tp=request.prefill_tp,
        decode_tp=request.decode_tp,
        killed_rank=request.kill_rank,
        model=model_dir.name,
        total_s=round(total_s, 1),
    )


def _prefill_row(rank: RankProcess[RankJob]) -> RankRow:
    facts = rank.events.get("sent")
    if facts is None:
        return RankRow(
            role="prefill", rank=rank.job.rank, heads=rank.job.heads(), nbytes=0, state="killed before it sent"
        )
    return RankRow(
        role="prefill",
        rank=rank.job.rank,
        heads=rank.job.heads(),
        nbytes=facts["nbytes"],
        send_ms=_ms(facts["sent_s"] - facts["started_s"]),
        state="sent",
    )


def _decode_row(rank: RankProcess[RankJob], sent: dict[int, dict[str, Any]]) -> RankRow:
    outcome = rank.events["outcome"]
    if outcome["verdict"] == "drop":
        return RankRow(
            role="decode", rank=rank.job.rank, heads=rank.job.heads(), nbytes=0, state="dropped, recomputed the prompt"
        )
    late_s, noticed_s = _wake_up(outcome["started_s"], outcome["sources"], sent)
    return RankRow(
        role="decode",
        rank=rank.job.rank,
        heads=rank.job.heads(),
        nbytes=outcome["nbytes"],
        wake_up_ms=_ms(late_s),
        receive_ms=_ms(outcome["decided_s"] - noticed_s),
        state="kept",
    )


def _wake_up(
    started_s: float, sources: Iterable[tuple[int, float]], sent: dict[int, dict[str, Any]]
) -> tuple[float, float]:
    """How late the worst payload was noticed, and when the last one was.

    A payload can only be late from when it was both published and waited for, and it may be here before its sender has
    returned from publishing it.
    """
    arrived = [(started_s + waited_s, max(started_s, sent[source_rank]["sent_s"])) for source_rank, waited_s in sources]
    return max(0.0, *(here_s - due_s for here_s, due_s in arrived)), max(here_s for here_s, _ in arrived)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
