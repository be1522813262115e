"""A process that has imported everything a rank needs, and forks one for each request: `python -m ... FD PROGRAM...`.

Importing torch takes seconds of processor time; a dozen ranks on two cores would spend more on that than on their work.
The nursery stays single-threaded, so that forking it is safe. It collects the exit status of a child only when asked,
so a child's process id is its own until then, and killing it can hit nobody else. It ends with the socket that it hears
its orders on, and so does each rank with its own.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from omnikv.cli.ranks.channel import RankChannel
from omnikv.cli.ranks.errors import RunFailed

_ORDER_NBYTES = 65536


class NurseryChild:
    """A forked rank, as far as its orchestrator needs to know it: what `subprocess.Popen` offers of the same name."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._status: int | None = None
        self._ending = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it as a crash would; nothing when it has ended."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._status is None and select.select([self._ending], [], [], 0)[0]:
            self._status = self._nursery.status_of(self.pid)
            os.close(self._ending)
        return self._status

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status, once it has ended.

        Raises:
            TimeoutExpired: it still runs after `timeout_s`.
        """
        if self._status is None:
            select.select([self._ending], [], [], timeout_s)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout_s or 0.0)
        return status


class Nursery:
    """The orchestrator's end. Leaving the context ends the nursery; end its children before."""

    def __init__(self, programs: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        """`programs` are the modules that ranks will be asked to run, and others that these will import."""
        self._log_path = log_path
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *programs],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def start(self, program: str, fd: int, log_path: Path) -> NurseryChild:
        """A new process in which `program` works with the descriptor `fd`, which stays the caller's too.

        Raises:
            RunFailed: the nursery has ended.
        """
        return NurseryChild(self, self._ask({"start": program, "log": str(log_path)}, [fd]))

    def status_of(self, pid: int) -> int:
        """The exit status of a child that has ended, negative for a signal.

        Raises:
            RunFailed: the nursery has ended.
        """
        return self._ask({"collect": pid}, [])

    def _ask(self, order: dict[str, Any], fds: list[int]) -> int:
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            answer = self._socket.recv(_ORDER_NBYTES)
        except ConnectionError:
            answer = b""
        if not answer:
            said = self._log_path.read_text(encoding="utf-8", errors="replace").strip()
            raise RunFailed(f"no rank could be started, their nursery has ended:\n{said or '(it wrote nothing)'}")
        return int(answer)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def serve(fd: int, programs: Sequence[str]) -> None:
    """Nothing, once whoever gives the orders is gone."""
    for program in programs:
        importlib.import_module(program)
    with socket.socket(fileno=fd) as orders:
        while True:
            data, fds, _, _ = socket.recv_fds(orders, _ORDER_NBYTES, 1)
            if not data:
                return
            order = json.loads(data)
            if "collect" in order:
                _, status = os.waitpid(order["collect"], 0)
                orders.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            pid = os.fork()
            if pid == 0:
                orders.close()
                _become_rank(order["start"], fds[0], order["log"])
            os.close(fds[0])
            orders.send(str(pid).encode())


def _become_rank(program: str, fd: int, log_path: str) -> None:
    """Never returns: what the nursery would do at its end is not this process's to do."""
    status = 1
    try:
        os.setsid()
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        importlib.import_module(program).work(RankChannel(fd))
        status = 0
    # edge: top of a process; its log says why, and its closed channel that.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
