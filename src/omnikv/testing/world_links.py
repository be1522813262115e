"""The links of a simulated group: reliable and in order between two ranks, each message late by its own measure."""

from __future__ import annotations

from collections.abc import Callable

from omnikv.testing.world_clock import Action, VirtualClock


class Link:
    """One direction between two ranks, until it breaks. `wake(action)` runs something at the receiving rank."""

    def __init__(self, clock: VirtualClock, latency_s: Callable[[], float], wake: Callable[[Action], None]) -> None:
        self._clock = clock
        self._latency_s = latency_s
        self._wake = wake
        self._last_due_s = 0.0
        self._under_way: list[Action] = []
        self._is_broken = False

    def send(self, action: Action) -> None:
        """Nothing; `action` happens at the receiver after all that was sent before. A broken link carries nothing."""
        if self._is_broken:
            return
        self._under_way.append(action)
        self._schedule(lambda: self._arrive(action))

    def sever(self, keep: int, lost: Action) -> None:
        """Nothing; the sender is gone. The first `keep` messages under way still arrive, then the receiver is told."""
        if self._is_broken:
            return
        self._is_broken = True
        del self._under_way[keep:]
        self._schedule(lambda: self._wake(lost))

    @property
    def under_way(self) -> int:
        """How many messages have not arrived yet."""
        return len(self._under_way)

    def _schedule(self, action: Action) -> None:
        self._last_due_s = max(self._last_due_s, self._clock.now_s + self._latency_s())
        self._clock.at(self._last_due_s, action)

    def _arrive(self, action: Action) -> None:
        if action in self._under_way:
            self._under_way.remove(action)
            self._wake(action)
