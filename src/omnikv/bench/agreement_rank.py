"""One rank of the agreement benchmark: a real process over gloo, started as `python -m omnikv.bench.agreement_rank`.

Every round measures, in turn and each after a barrier, so that all see the same machine: the exchange of objects that
engines publish, one fixed-size all-reduce, one vote over the channel, and a batch of votes over the channel.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from omnikv.core.messages import Ballot, RoleBallot
from omnikv.groups.channel import Channel
from omnikv.groups.torch_dist import TorchDistGroup

BATCH = 64
WARM_UP_ROUNDS = 20
# In the test of requests in flight: the last rank casts this one of BATCH so much later.
LATE_REQUEST = BATCH // 2
LATE_BY_S = 0.2
_VOTE_S = 60.0


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does and where it writes its times."""

    rank: int
    size: int
    store: str
    output: str
    rounds: int
    flights: int
    give_up_after_s: float


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's times: microseconds a round by subject; milliseconds until all requests in flight but one were ruled.

    `late_ms` has one request that a rank casts late, `even_ms` has none; `late_one_ms` is when that request was ruled.
    """

    rounds_us: dict[str, list[float]]
    even_ms: list[float]
    late_ms: list[float]
    late_one_ms: list[float]


def main(task: RankTask) -> None:
    """Nothing; joins the group, measures, and writes `RankTimes` as JSON."""
    # A rank that hangs says where and ends, so that the benchmark ends too.
    faulthandler.dump_traceback_later(task.give_up_after_s, exit=True)
    torch.set_num_threads(1)
    limit = timedelta(seconds=task.give_up_after_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{task.store}", rank=task.rank, world_size=task.size, timeout=limit
    )
    with Channel.form(TorchDistGroup(), deadline=_deadline()) as channel:
        rounds_us = _measure_rounds(channel, task.rounds)
        even = [_measure_flight(channel, f"even-{at}", late=False) for at in range(task.flights)]
        late = [_measure_flight(channel, f"late-{at}", late=True) for at in range(task.flights)]
        times = RankTimes(
            rounds_us=rounds_us,
            even_ms=[others for others, _ in even],
            late_ms=[others for others, _ in late],
            late_one_ms=[one for _, one in late],
        )
        dist.barrier()
    dist.destroy_process_group()
    Path(task.output).write_text(json.dumps(msgspec.to_builtins(times)))


def ballot_of(number: int) -> Ballot:
    """A ballot such as a receive of one payload casts: its role arrived, with the facts that must agree."""
    facts = (
        ("dtype", "bfloat16"),
        ("layer shapes", f"{number:016x}"),
        ("layers", "32"),
        ("metadata", f"{number + 1:016x}"),
        ("tokens", str(512 + number)),
    )
    return Ballot(0, True, (RoleBallot("primary", "have", True, "", facts),))


def _deadline() -> float:
    return time.monotonic() + _VOTE_S


def _measure_rounds(channel: Channel, rounds: int) -> dict[str, list[float]]:
    signature = (True, ("kv_metadata", "past_key_values", "sp.kv_metadata", "sp.past_key_values"))
    digest = zlib.crc32(pickle.dumps(signature))
    times: dict[str, list[float]] = {}
    for number in range(WARM_UP_ROUNDS + rounds):
        # What is voted on is made right before the vote, as it is when a receive has just ended, and not timed.
        subjects: dict[str, Callable[[], Callable[[], bool]]] = {
            "objects": lambda: partial(exchange_objects, channel.rank, channel.size, signature),
            "all_reduce": lambda: partial(reduce_all, digest),
            "channel": partial(_prepare_votes, channel, f"request-{number}", 1),
            "batch": partial(_prepare_votes, channel, f"batch-{number}", BATCH),
        }
        for name, prepare in subjects.items():
            dist.barrier()
            subject = prepare()
            started = time.perf_counter()
            agreed = subject()
            times.setdefault(name, []).append((time.perf_counter() - started) * 1e6)
            if not agreed:
                raise AssertionError(f"{name} in round {number} found ranks that differ, and all are alike")
    return {name: values[WARM_UP_ROUNDS:] for name, values in times.items()}


def _prepare_votes(channel: Channel, name: str, count: int) -> Callable[[], bool]:
    return partial(_vote, channel, [(f"{name}-{at}", ballot_of(at)) for at in range(count)])


def _vote(channel: Channel, votes: Sequence[tuple[str, Ballot]]) -> bool:
    return all(ruling.kind == "keep" for ruling in channel.agree_many(votes, deadline=_deadline()))


def exchange_objects(rank: int, size: int, signature: object) -> bool:
    """Whether all ranks hold `signature`, found as the specification does: objects to rank 0, its verdict to all."""
    if rank:
        _send_object(signature, to=0)
        said: list[object] = [None]
    else:
        signatures = [signature, *(_receive_object(source) for source in range(1, size))]
        said = [all(other == signature for other in signatures)]
    dist.broadcast_object_list(said, src=0)
    return bool(said[0])


def _send_object(value: object, to: int) -> None:
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    dist.send(torch.tensor([content.numel()], dtype=torch.int64), to)
    dist.send(content, to)


def _receive_object(source: int) -> object:
    nbytes = torch.empty(1, dtype=torch.int64)
    dist.recv(nbytes, source)
    content = torch.empty(int(nbytes), dtype=torch.uint8)
    dist.recv(content, source)
    # What is measured pickles its objects; nothing but this benchmark's own ranks can write here.
    return pickle.loads(content.numpy().tobytes())


def reduce_all(digest: int) -> bool:
    """Whether all ranks hold `digest`, by one all-reduce of its least and its greatest value."""
    values = torch.tensor([digest, -digest], dtype=torch.int64)
    dist.all_reduce(values, op=dist.ReduceOp.MIN)
    return int(values[0]) == -int(values[1])


def _measure_flight(channel: Channel, name: str, *, late: bool) -> tuple[float, float]:
    """Milliseconds until all requests in flight but one were ruled, and until that one was."""
    ballots = [ballot_of(number) for number in range(BATCH)]
    is_late_here = late and channel.rank == channel.size - 1
    dist.barrier()
    started = time.perf_counter()
    pending = {
        at: channel.submit(f"{name}-{at}", ballot, deadline=_deadline())
        for at, ballot in enumerate(ballots)
        if at != LATE_REQUEST or not is_late_here
    }
    kinds = [ruling.result().kind for at, ruling in pending.items() if at != LATE_REQUEST]
    others_ms = (time.perf_counter() - started) * 1e3
    if is_late_here:
        time.sleep(max(started + LATE_BY_S - time.perf_counter(), 0))
        pending[LATE_REQUEST] = channel.submit(f"{name}-{LATE_REQUEST}", ballots[LATE_REQUEST], deadline=_deadline())
    kinds.append(pending[LATE_REQUEST].result().kind)
    if set(kinds) != {"keep"}:
        raise AssertionError(f"requests in flight were ruled {sorted(set(kinds))}, and all ranks voted alike")
    return others_ms, (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(msgspec.json.decode(sys.argv[1], type=RankTask))
