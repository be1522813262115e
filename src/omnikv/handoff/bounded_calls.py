"""Calls on an engine's group that have no deadline of their own, made so that the caller has one.

An engine's `recv_object` or `broadcast_object` waits for its peers for ever. The calls of one exchange therefore run,
in the caller's order, on a thread of their own, and the caller waits for that thread no longer than its deadline. A
thread that is given up, at the deadline or because its caller was interrupted, is still inside the group: it would take
the answer to the next exchange for its own. So nobody may use the group again, and every later exchange fails at once.
That is what `VerdictInDoubt` says: tear the group down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from omnikv.errors import OmniKVError, VerdictInDoubt
from omnikv.groups.blocking import UNENDED, run_until

_Answer = TypeVar("_Answer")


class BoundedCalls:
    """Makes the group calls of one rank, one exchange at a time; knows whether its groups can still be used."""

    def __init__(self) -> None:
        self._broken: str | None = None

    def make(self, what: str, calls: Callable[[], _Answer], *, deadline: float, request_id: str | None) -> _Answer:
        """What `calls` returns. `what` names the exchange in errors; `deadline` is on the monotonic clock, in seconds.

        Calls that end just when the deadline passes count.

        Raises:
            VerdictInDoubt: the group failed, did not answer by the deadline, or had failed before. The peers may go
                either way.
            OmniKVError: `calls` raised it.
        """
        if self._broken is not None:
            raise _doubt(what, f"the group failed before ({self._broken})", request_id)
        self._broken = UNENDED
        answer, failure = run_until(calls, deadline, name="omnikv-group-calls")
        if answer is not None:
            self._broken = None
            return answer[0]
        if failure is None:
            self._broken = f"its peers did not answer by the deadline of {what}"
            raise _doubt(what, "the deadline passed", request_id)
        if isinstance(failure, OmniKVError) and not isinstance(failure, VerdictInDoubt):
            self._broken = None
            raise failure
        self._broken = f"{what}: {failure}"
        raise _doubt(what, f"{type(failure).__name__}: {failure}", request_id) from failure


def _doubt(what: str, why: str, request_id: str | None) -> VerdictInDoubt:
    return VerdictInDoubt(
        f"the ranks voted on request {request_id!r} and {what} did not come through: {why}; its peers may go either "
        "way, so tear the group down",
        request_id=request_id,
    )
