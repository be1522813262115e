"""One rank of the agreement benchmark: a real process over gloo, started as `python -m omnikv.bench.agreement_rank`.

Every round measures, each right after a barrier, so that all see the same machine: the exchange of objects that engines
publish, one fixed-size all-reduce, one vote and a batch of votes over bare sockets, and the same over the channel. They
come in another order in each round, the same on all ranks: what a subject leaves behind, in caches and in where the
processes lie on the cores, falls on none of the others more than on the rest. What a subject needs is made before the
barrier, because a rank that makes it afterwards is waited for by its peers.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import random
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from omnikv.bench.agreement_star import BareStar
from omnikv.core.messages import Ballot, RoleBallot, Ruling, spell_facts
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
        star = BareStar(TorchDistGroup(), deadline=_deadline())
        rounds_us = _measure_rounds(channel, star, task.rounds)
        star.close()
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
    facts = {
        "dtype": "bfloat16",
        "layer shapes": f"{number:016x}",
        "layers": "32",
        "metadata": f"{number + 1:016x}",
        "tokens": str(512 + number),
    }
    return Ballot(0, True, (RoleBallot("primary", "have", True, facts=spell_facts(facts)),))


def _deadline() -> float:
    return time.monotonic() + _VOTE_S


def _measure_rounds(channel: Channel, star: BareStar, rounds: int) -> dict[str, list[float]]:
    signature = (True, ("kv_metadata", "past_key_values", "sp.kv_metadata", "sp.past_key_values"))
    digest = zlib.crc32(pickle.dumps(signature))
    # What is voted on is made shortly before the vote, as it is when a receive has just ended.
    prepare: dict[str, Callable[[int], Callable[[], bool | list[Ruling]]]] = {
        "objects": lambda _: partial(exchange_objects, channel.rank, channel.size, signature),
        "all_reduce": lambda _: partial(reduce_all, digest),
        "bare": lambda number: partial(star.agree, _votes(f"bare-{number}", 1)),
        "bare_batch": lambda number: partial(star.agree, _votes(f"bare-batch-{number}", BATCH)),
        "channel": lambda number: partial(channel.agree_many, _votes(f"one-{number}", 1), deadline=_deadline()),
        "batch": lambda number: partial(channel.agree_many, _votes(f"batch-{number}", BATCH), deadline=_deadline()),
    }
    times: dict[str, list[float]] = {}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name in random.Random(number).sample(list(prepare), len(prepare)):
            subject = prepare[name](number)
            dist.barrier()
            started = time.perf_counter()
            verdict = subject()
            times.setdefault(name, []).append((time.perf_counter() - started) * 1e6)
            if not _is_kept(verdict):
                raise AssertionError(f"{name} in round {number} found ranks that differ, and all are alike")
    return {name: values[WARM_UP_ROUNDS:] for name, values in times.items()}


def _votes(name: str, count: int) -> list[tuple[str, Ballot]]:
    return [(f"{name}-{at}", ballot_of(at)) for at in range(count)]


def _is_kept(verdict: bool | list[Ruling]) -> bool:
    return verdict if isinstance(verdict, bool) else all(ruling.kind == "keep" for ruling in verdict)


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
