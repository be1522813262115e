"""Calls that block without a deadline of their own, made so that their caller has one.

They run on a thread of their own, which is given up, not stopped, when the deadline passes: it may still be inside the
group, so whoever gives it up must not use the group again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_Answer = TypeVar("_Answer")

# Why a group is broken from the beginning of an exchange to its end: only an exchange that ended leaves nothing in it.
UNENDED = "an exchange in it was interrupted, or has not ended"


def run_until(
    calls: Callable[[], _Answer], deadline: float, *, name: str
) -> tuple[tuple[_Answer] | None, BaseException | None]:
    """What `calls` came to by `deadline` (monotonic seconds): `((answer,), None)`, `(None, error)`, or neither.

    Calls that end just when the deadline passes count.
    """
    answers: list[_Answer] = []
    failures: list[BaseException] = []
    # Which device is current is a thread's own, and an engine's group may look at it.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            answers.append(calls())
        # edge: top of a background thread; the waiting caller says what came of it.
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    # A daemon, so that calls that never return cannot keep the interpreter from ending.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
    if answers:
        return (answers[0],), None
    return None, failures[0] if failures else None
