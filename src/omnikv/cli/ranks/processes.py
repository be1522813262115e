"""Ranks as processes of their own: started, heard, and ended on every path.

Each rank runs in a session of its own, so Ctrl-C reaches the orchestrator only, which then ends every rank by its
process id. A rank is known to be gone when its end of the socket pair closes, which the system does even for a rank
that was killed.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from omnikv.cli.ranks.channel import LineReader, encode_line
from omnikv.cli.ranks.errors import RunFailed
from omnikv.cli.ranks.nursery import Nursery, NurseryChild

# One thread a process: ranks share the cores, and more threads than cores make each of them slower, not faster.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "GLOO_SOCKET_IFNAME": "lo",
}
LOG_TAIL_LINES = 6
EXIT_GRACE_S = 5.0


class Job(Protocol):
    """What one rank is to do. `program` is the module whose `work(channel)` does it."""

    @property
    def title(self) -> str: ...

    @property
    def program(self) -> str: ...

    @property
    def last_event(self) -> str:
        """What the rank tells when nothing is left for it to do."""

    def to_message(self) -> dict[str, Any]: ...


JobT = TypeVar("JobT", bound=Job)


class RankProcess(Generic[JobT]):
    """One rank's process, and the events heard from it, by name."""

    def __init__(self, job: JobT, log_path: Path, nursery: Nursery | None = None) -> None:
        self.job = job
        self.log_path = log_path
        self.events: dict[str, dict[str, Any]] = {}
        self.killed_at_s: float | None = None
        self.is_gone = False
        self._reader = LineReader()
        self.socket, rank_end = socket.socketpair()
        with rank_end, ExitStack() as unless_started:
            unless_started.enter_context(self.socket)
            self._process: subprocess.Popen[bytes] | NurseryChild = (
                _started_alone(job.program, rank_end.fileno(), log_path)
                if nursery is None
                else nursery.start(job.program, rank_end.fileno(), log_path)
            )
            unless_started.pop_all()
        self._send(job.to_message())

    @property
    def is_done(self) -> bool:
        return self.job.last_event in self.events

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, command: str, **details: Any) -> None:
        """Tell the rank to go on with `command`; details are JSON."""
        self._send({"command": command, **details})

    def kill(self) -> None:
        """End the rank as a crash would."""
        self.killed_at_s = time.monotonic()
        self._process.kill()

    def hear(self) -> None:
        """Take in what the rank has said; notices when it is gone."""
        try:
            data = self.socket.recv(65536)
        except ConnectionError:
            data = b""
        self.is_gone = not data
        for message in self._reader.feed(data):
            self.events[message.pop("event")] = message

    def exit_status(self, timeout_s: float) -> int | None:
        """The process's exit status, negative for a signal; None when it is still running after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> str:
        """The last lines that the rank wrote to its standard error or output, indented."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]) or "    (it wrote nothing)"

    def end(self) -> None:
        """The process is gone and its end of the channel closed."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self.socket.sendall(encode_line(dict(message)))
        except ConnectionError:
            # The rank is gone; hearing its channel says so with the reason from its log.
            return


def _started_alone(program: str, fd: int, log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", program, str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **RANK_ENVIRONMENT},
            pass_fds=(fd,),
            start_new_session=True,
        )


class RankProcesses:
    """All ranks of one run. Leaving the context ends every process that is still there."""

    def __init__(self, log_dir: Path, *, deadline: float, nursery: Nursery | None = None) -> None:
        """`deadline` (monotonic seconds) bounds every wait. Ranks are forked from `nursery`, or started alone."""
        self._log_dir = log_dir
        self._nursery = nursery
        self._deadline = deadline
        self._ranks: list[RankProcess[Any]] = []
        self._selector = selectors.DefaultSelector()

    def start(self, job: JobT) -> RankProcess[JobT]:
        """A process that works on `job`."""
        rank = RankProcess(job, self._log_dir / f"{job.title.replace(' ', '-')}.log", self._nursery)
        self._ranks.append(rank)
        self._selector.register(rank.socket, selectors.EVENT_READ, rank)
        return rank

    def wait_for(self, event: str, ranks: Iterable[RankProcess[Any]]) -> None:
        """Nothing, once each of `ranks` has told `event`.

        Raises:
            RunFailed: a rank is gone before its work is done, or the deadline passed; with the end of its log.
        """
        waited_for = list(ranks)
        while lagging := [rank for rank in waited_for if event not in rank.events]:
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                raise RunFailed(self._late_message(event, lagging))
            for key, _ in self._selector.select(remaining_s):
                self._hear(key.data)

    def _hear(self, rank: RankProcess[Any]) -> None:
        rank.hear()
        if rank.is_gone:
            self._selector.unregister(rank.socket)
            if not rank.is_done and rank.killed_at_s is None:
                raise RunFailed(self._death_message(rank))

    def _late_message(self, event: str, lagging: list[RankProcess[Any]]) -> str:
        tails = "\n".join(f"{rank.job.title}:\n{rank.log_tail()}" for rank in lagging)
        titles = ", ".join(rank.job.title for rank in lagging)
        return f"time ran out (--timeout-s) waiting for {titles} to be {event!r}; logs in {self._log_dir}\n{tails}"

    def _death_message(self, first: RankProcess[Any]) -> str:
        """Who died and what each wrote last: the first one noticed is often only the victim of another."""
        first.exit_status(EXIT_GRACE_S)
        parts = []
        for rank in self._ranks:
            status = rank.exit_status(0)
            if status and rank.killed_at_s is None:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                parts.append(f"{rank.job.title} ended early ({how}):\n{rank.log_tail()}")
        body = "\n".join(parts) or f"{first.job.title} closed its channel before its work was done"
        return f"{body}\nlogs in {self._log_dir}"

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        for rank in self._ranks:
            rank.end()
