"""What every command does alike: its console, its errors, its files, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from omnikv.cli.ranks.errors import RunFailed
from omnikv.errors import ConfigError, OmniKVError

WIDTH = 100
EXIT_FAILED = 1
EXIT_MISUSED = 2


def console(*, stderr: bool) -> Console:
    """A console on standard output or error, whose lines read well on any terminal and without one."""
    found = Console(stderr=stderr, highlight=False)
    # Without a terminal there is no width to ask for; on a wide one, long lines are hard to read.
    found.width = min(found.width, WIDTH) if found.is_terminal else WIDTH
    return found


def exit_status_of(notes: Console, error: OmniKVError) -> int:
    """The exit status for `error`, which `notes` then shows."""
    # Lines stay whole, for the terminal to wrap or a log to keep.
    notes.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return EXIT_MISUSED if isinstance(error, ConfigError) else EXIT_FAILED


@contextmanager
def steps_shown(notes: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows each step in words while the block runs: a spinner on a terminal, lines elsewhere."""
    with notes.status("Starting", refresh_per_second=4) as status:

        def say(step: str) -> None:
            status.update(Text(step))
            if not notes.is_terminal:
                notes.print(Text(step))

        yield say


def require_writable(option: str, path: Path | None) -> None:
    """Nothing, when the file that `option` names can be written, or it names none.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: it is a directory; name a file")
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        what = f"{path} is read-only" if path.exists() else f"{folder} is no writable directory"
        raise ConfigError(f"{option} {path} cannot be written: {what}")


def write_json(outcome: Mapping[str, Any], path: Path) -> None:
    """Nothing; the outcome is in the file.

    Raises:
        RunFailed: it could not be written.
    """
    try:
        path.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"the outcome cannot be written to {path}: {error}") from error


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that it too leaves no process and no file behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
