"""How much memory this process may still take: of the machine's, of its control groups', of its own address space.

A process that goes over a control group's limit is killed, whatever it could have handled, and one limit up the tree
counts as much as its own group's. So whoever is about to take much asks here first, for limit and present use alike.
Page cache counts as free: the kernel takes it back before it kills.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Kernels spell "no limit" in version 1 as the largest multiple of a page.
_UNLIMITED_NBYTES = 1 << 60
# Left alone: page tables of what is taken, and what else the process needs before it takes again.
_SPARED_NBYTES = 8 << 20
_SPARED_PART = 256


class MemoryBound(NamedTuple):
    """One thing that bounds memory: its name for a message, what it allows in all, and what is left of that now."""

    name: str
    limit_nbytes: int
    left_nbytes: int

    def __str__(self) -> str:
        return f"{self.left_nbytes} of {self.limit_nbytes} bytes are left of {self.name}"


def tightest_bound(root: Path = Path("/")) -> MemoryBound:
    """The bound of which the least is left. `root` is where `proc` and the control groups are found."""
    return min(memory_bounds(root), key=lambda bound: bound.left_nbytes)


def memory_bounds(root: Path = Path("/")) -> list[MemoryBound]:
    """Everything that bounds this process's memory; at least the machine itself."""
    bounds = [_machine(root), *_control_groups(root)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        mapped = int(_read(root / "proc/self/statm").split()[0]) * resource.getpagesize()
        bounds.append(_bound("the address space limit (ulimit -v)", limit, mapped))
    return bounds


def _bound(name: str, limit_nbytes: int, used_nbytes: int) -> MemoryBound:
    left = limit_nbytes - used_nbytes
    return MemoryBound(name, limit_nbytes, max(0, left - left // _SPARED_PART - _SPARED_NBYTES))


def _machine(root: Path) -> MemoryBound:
    total = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    fields = _fields(root / "proc/meminfo")
    available = fields.get("MemAvailable:")
    return _bound("the machine's memory", total, 0 if available is None else max(0, total - available * 1024))


def _control_groups(root: Path) -> Iterator[MemoryBound]:
    """The bounds of this process's control groups and of all groups above them."""
    for mount, group, is_unified in _memberships(root):
        for directory in (group, *group.parents):
            bound = _control_group(directory, is_unified)
            if bound is not None:
                yield bound
            if directory == mount:
                break


def _control_group(directory: Path, is_unified: bool) -> MemoryBound | None:
    limit_name, use_name, prefix = (
        ("memory.max", "memory.current", "")
        if is_unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    limit, used = _read(directory / limit_name).strip(), _read(directory / use_name).strip()
    if not limit.isdigit() or not used.isdigit() or int(limit) >= _UNLIMITED_NBYTES:
        return None
    stat = _fields(directory / "memory.stat")
    cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return _bound(f"the control group {directory} ({limit_name})", int(limit), max(0, int(used) - cached))


def _memberships(root: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Where memory controllers are mounted, this process's group in each, and whether it is the unified hierarchy."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths[number == "0"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        system, _, options = kind.split(" ", 2)
        is_unified = system == "cgroup2"
        if is_unified in paths and (is_unified or (system == "cgroup" and "memory" in options.split(","))):
            top, point = (_unescaped(field) for field in place.split(" ")[3:5])
            mount = root / point.lstrip("/")
            yield mount, _group_directory(mount, top, paths[is_unified]), is_unified


def _group_directory(mount: Path, top: str, path: str) -> Path:
    """The group's directory; the mount itself where the mount shows only a part of the tree, and not this one."""
    relative = os.path.relpath(path, top)
    return mount if relative.startswith("..") else Path(os.path.normpath(mount / relative))


def _unescaped(field: str) -> str:
    return field.encode().decode("unicode_escape") if "\\" in field else field


def _fields(path: Path) -> dict[str, int]:
    """The numbers in a file of lines that begin with a name and a number."""
    pairs = (line.split()[:2] for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
