"""Time in a simulated world: a queue of what is still to happen. It jumps from one event to the next, never waiting."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """The time in seconds since the world began, and everything that will happen later."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, due_s: float, action: Action) -> None:
        """Nothing; `action` runs at `due_s`, or next if that has passed. At one time, first come is first served."""
        self._count += 1
        heapq.heappush(self._queue, (max(due_s, self.now_s), self._count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Nothing; `action` runs `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def run(self) -> None:
        """Nothing; runs until nothing is left to happen."""
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
