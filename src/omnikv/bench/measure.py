"""Times and memory, measured so that they can be compared: spreads over rounds, and peaks that say what they count."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from omnikv.errors import ConfigError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of several rounds, with the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`, one or more."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """This process's resident memory now, in bytes, by what backs it, and the peak since `reset_peak`."""

    resident: int
    shared: int
    peak: int

    @classmethod
    def now(cls) -> MemoryUse:
        """What the kernel counts for this process."""
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        resident, shared, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem", "VmHWM"))
        return cls(resident=resident, shared=shared, peak=peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMemory:
    """What a process used above its base, in bytes.

    `private` is the peak of everything but shared memory: copies, buffers, libraries loaded on the way. `shared` is
    what it mapped of a transport's memory and touched; both peers count the same bytes there.
    """

    private: int
    shared: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.private + self.shared

    @classmethod
    def since(cls, base: MemoryUse) -> ExtraMemory:
        """The extra memory since `base` was read and `reset_peak` called, up to now.

        The peak counts both kinds together. Shared memory only grows while a transport is open, so its present size is
        taken off the peak, and what is left is private at least in that moment.
        """
        end = MemoryUse.now()
        shared = end.shared - base.shared
        return cls(private=max(0, end.peak - base.resident - shared), shared=shared)


def reset_peak() -> MemoryUse:
    """This process's memory now, after its peak was set back to it.

    Raises:
        ConfigError: the kernel does not offer that.
    """
    # Freed heap that stays resident would hide what is allocated next.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        raise ConfigError(f"peak memory cannot be measured here: {_CLEAR_REFS} refuses ({error.strerror})") from error
    return MemoryUse.now()


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of these do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def timed_ms(action: Callable[[], object]) -> float:
    """How long `action` took, in milliseconds."""
    started_ns = time.monotonic_ns()
    action()
    return (time.monotonic_ns() - started_ns) / 1e6


class WarmCopy:
    """A single-threaded memcpy between two buffers that were touched before: what everything else is compared with."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.source = torch.ones(nbytes, dtype=torch.uint8)
        self.target = torch.zeros(nbytes, dtype=torch.uint8)

    def time_ms(self) -> float:
        """The median of three copies, in milliseconds."""
        return statistics.median(timed_ms(self._copy) for _ in range(3))

    def _copy(self) -> None:
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.nbytes)
