"""When to try again, as values: each failure waits longer than the last, by chance a little more or less."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omnikv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long to wait after each failure in a row: `first_s`, doubled each time, at most `longest_s`.

    Of each wait a part of up to `jitter` is left off by chance, so that many who failed together do not come back
    together.

    Raises:
        ConfigError: a wait is not positive, or `jitter` is not from 0 to 1.
    """

    first_s: float = 0.02
    longest_s: float = 0.5
    jitter: float = 0.5
    failures: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s or not 0 <= self.jitter <= 1:
            raise ConfigError(
                f"a back-off needs 0 < first_s <= longest_s and a jitter from 0 to 1, got first_s={self.first_s}, "
                f"longest_s={self.longest_s}, jitter={self.jitter}"
            )

    def failed(self, chance: float) -> tuple[BackOff, float]:
        """The state after one more failure, and how many seconds to wait; `chance` is a random number in [0, 1)."""
        # The exponent is cut, since a float has no room for a failure that goes on for days.
        wait_s = min(self.first_s * 2.0 ** min(self.failures, 64), self.longest_s)
        return replace(self, failures=self.failures + 1), wait_s * (1.0 - self.jitter * chance)

    def succeeded(self) -> BackOff:
        """The state after a success: the next failure waits `first_s` again."""
        return self if self.failures == 0 else replace(self, failures=0)
