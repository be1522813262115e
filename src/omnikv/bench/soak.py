"""A soak of one host: requests of mixed sizes for minutes, while either end is killed, requests fail and are aborted.

Two processes hand over one batch of requests after another. With some batches one of them is killed (SIGKILL) at a
random moment and started again under the same addresses; what is left of the batch is then freed. Everything that is
received is compared byte by byte, every outcome with what the seed says it must be, and what a survivor holds after
the next batch with what it held after its first.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from omnikv.bench.soak_end import (
    NUM_HEADS,
    TIMEOUT_S,
    Batch,
    BatchEnd,
    EndName,
    Forget,
    Held,
    Holdings,
    fate_of,
    serve,
)
from omnikv.bench.workload import bench_route
from omnikv.errors import TransportError
from omnikv.transports.base import Side
from omnikv.transports.shm_address import rank_address

BATCH = 12
KILL_SHARE = 0.3
# A kill comes at most this long after its batch has begun.
KILL_WITHIN_S = 0.06
# How long a survivor may take to notice that its peer is gone and to tidy up.
SETTLE_S = 10.0
_SIDES: dict[EndName, Side] = {"sender": "source", "receiver": "target"}
# What a receiver must say of a request, by what its sender did; an abort may come before or after it was read.
_ALLOWED = {"sent": {"received"}, "failed": {"told"}, "aborted": {"received", "told"}}


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """What a soak did and found. `unexpected` names outcomes that the seed does not allow, `leaks` what was left."""

    seconds: float
    seed: int
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    checked_nbytes: int = 0
    wrong: int = 0
    unexpected: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.unexpected and not self.leaks


class _End:
    """A process at one end, and what it held after its first batch."""

    def __init__(self, name: EndName, namespace: str, seed: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["omnikv.bench.soak_end"])
        self.name = name
        self.baseline: Held | None = None
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, namespace, seed), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: object) -> None:
        """Nothing; it answers in time."""
        self._pipe.send(order)

    def hear(self) -> Any:
        """Its next answer.

        Raises:
            TransportError: it hangs, or ended by itself.
        """
        try:
            if self._pipe.poll(2 * TIMEOUT_S):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise TransportError(f"the soak's {self.name} ended by itself; its own error output says why") from error
        raise TransportError(f"the soak's {self.name} has said nothing for {2 * TIMEOUT_S} s: it hangs")

    def ask(self, order: object) -> Any:
        """Its answer to `order`; raises as `hear` does."""
        self.tell(order)
        return self.hear()

    def kill(self) -> None:
        """Nothing; the process is gone."""
        self._process.kill()
        self._close()

    def end(self) -> None:
        """Nothing; the process has closed what it held, and is gone."""
        self.tell(None)
        self._close()

    def _close(self) -> None:
        self._process.join(TIMEOUT_S)
        self._pipe.close()


class _Soak:
    """A soak under way."""

    def __init__(self, ends: dict[EndName, _End], namespace: str, result: SoakResult) -> None:
        self._ends = ends
        self._namespace = namespace
        self._result = result

    def run_batch(self) -> None:
        """Nothing; one batch went through with both ends alive, and neither holds more than before."""
        batch = self._begin()
        for name, end in self._ends.items():
            self._note(batch, name, end.hear(), is_whole=True)
        for end in self._ends.values():
            held = self._settled(end)
            if end.baseline is None:
                end.baseline = held
            elif held != end.baseline:
                self._result.leaks.append(f"the {end.name} holds {held} after batch {batch.first}, not {end.baseline}")

    def run_kill(self, victim: EndName, after_s: float) -> None:
        """Nothing; one end was killed during a batch, and lives again."""
        batch = self._begin()
        time.sleep(after_s)
        self._ends[victim].kill()
        self._result.faults[f"{victim} killed"] += 1
        self._ends[victim] = _End(victim, self._namespace, self._result.seed)
        forget = Forget(first=batch.first, count=batch.count)
        if victim == "sender":
            # Whoever still waits is told by the sender's next life.
            self._ends["sender"].ask(forget)
            self._note(batch, "receiver", self._ends["receiver"].hear(), is_whole=False)
        else:
            self._note(batch, "sender", self._ends["sender"].hear(), is_whole=False)
            self._ends["sender"].ask(forget)
            self._result.outcomes["lost with a killed receiver"] += batch.count

    def _begin(self) -> Batch:
        batch = Batch(first=self._result.requests, count=BATCH)
        self._result.requests += batch.count
        for end in self._ends.values():
            end.tell(batch)
        return batch

    def _note(self, batch: Batch, name: EndName, done: BatchEnd, *, is_whole: bool) -> None:
        result = self._result
        result.checked_nbytes += done.checked_nbytes
        result.wrong += done.wrong
        result.faults["given back and asked for again"] += done.given_back
        for number in range(batch.first, batch.first + batch.count):
            fate, outcome = fate_of(result.seed, number), done.outcomes[number]
            if name == "sender":
                if fate != "sent":
                    result.faults[fate] += 1
            else:
                result.outcomes[outcome.split(":")[0]] += 1
                if outcome not in (_ALLOWED[fate] if is_whole else {"received", "told"}):
                    result.unexpected.append(f"request {number}, {fate}: {outcome}")

    def _settled(self, end: _End) -> Held:
        """What the end holds, once that is what it held before or `SETTLE_S` have passed."""
        until = time.monotonic() + SETTLE_S
        while True:
            held: Held = end.ask(Holdings())
            if end.baseline in (None, held) or time.monotonic() >= until:
                return held
            time.sleep(0.05)


def run_soak(seconds: float, seed: int) -> SoakResult:
    """What a soak of `seconds` found.

    Raises:
        TransportError: an end hangs, or ended by itself.
    """
    result = SoakResult(seconds=seconds, seed=seed)
    namespace = f"soak-{os.getpid()}-{seed}"
    chance = random.Random(f"kills-{seed}")
    until = time.monotonic() + seconds
    with _both_ends(namespace, seed) as ends:
        soak = _Soak(ends, namespace, result)
        soak.run_batch()
        while time.monotonic() < until:
            if chance.random() < KILL_SHARE:
                victim: Literal["sender", "receiver"] = chance.choice(("sender", "receiver"))
                soak.run_kill(victim, chance.uniform(0, KILL_WITHIN_S))
            soak.run_batch()
        for end in ends.values():
            end.end()
        ends.clear()
    result.leaks += _left_on_host(namespace)
    return result


@contextmanager
def _both_ends(namespace: str, seed: int) -> Iterator[dict[EndName, _End]]:
    ends: dict[EndName, _End] = {}
    try:
        for name in _SIDES:
            ends[name] = _End(name, namespace, seed)
        yield ends
    finally:
        for end in ends.values():
            end.kill()


def _left_on_host(namespace: str) -> list[str]:
    """Addresses and shared memory that outlived both ends."""
    edge = bench_route(namespace, NUM_HEADS).edge
    bound = Path("/proc/net/unix").read_text()
    left = []
    for name, side in _SIDES.items():
        address = rank_address(edge, side, 0)[1:].decode()
        if address in bound:
            left.append(f"the {name}'s address {address} is still bound")
    return left + [f"/dev/shm/{file}" for file in os.listdir("/dev/shm") if "omnikv" in file]


def soak_to_json(result: SoakResult, command: str) -> dict[str, Any]:
    """What a soak did and found, as JSON values."""
    found = {**asdict(result), "outcomes": dict(result.outcomes), "faults": dict(result.faults)}
    return {"command": command, **found, "passed": result.passed}


def soak_to_text(result: SoakResult, command: str) -> str:
    """What a soak did and found, in words."""
    lines = [
        f"{command}   (seed {result.seed}, {result.seconds:.0f} s)",
        "",
        f"requests                {result.requests}: {_spell(result.outcomes)}",
        f"faults injected         {sum(result.faults.values())}: {_spell(result.faults)}",
        f"payload bytes checked   {result.checked_nbytes}, wrong payloads {result.wrong}",
        f"unexpected outcomes     {len(result.unexpected)}",
        f"leaks                   {len(result.leaks)}",
        *(f"  {found}" for found in [*result.unexpected, *result.leaks]),
    ]
    return "\n".join(lines) + "\n"


def _spell(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
