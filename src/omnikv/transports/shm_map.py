"""How the memory of a shm pool is made, sealed and mapped: once to be written by its owner, else only to be read.

Nobody can shrink or grow a sealed segment, so no reader can be made to touch memory that is gone. Where the kernel
knows how (Linux 5.1), nobody but the owner can write to it either, who mapped it before it was sealed; elsewhere it is
readers' own mappings that keep them from writing. A mapping ends with its last view, never before.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import ExitStack, suppress

_F_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_WRITE = 23
# Memory is touched in pieces, so that other threads of the process get their turn in between.
_TOUCH_NBYTES = 8 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make_segment(nbytes: int) -> tuple[int, memoryview]:
    """The descriptor of `nbytes` (whole pages) of sealed memory, and its one writable view; every page is touched.

    Raises:
        OSError: the system has not that much memory.
    """
    fd = os.memfd_create("omnikv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with ExitStack() as on_failure:
        on_failure.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        mapping = mmap.mmap(fd, nbytes)
        _seal(fd)
        _touch(mapping)
        on_failure.pop_all()
    return fd, memoryview(mapping)


def make_private_segment(nbytes: int) -> tuple[int, memoryview]:
    """As `make_segment`, for a process that shares it with nobody: no descriptor (-1), and large pages where they are.

    Raises:
        OSError: the system has not that much memory.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # A kernel without them refuses; sockets copy a tenth faster from and to large ones.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    _touch(mapping)
    return -1, memoryview(mapping)


def map_for_reading(fd: int, nbytes: int) -> memoryview:
    """A view of a segment that can only be read: whoever writes to it, through a tensor for one, is stopped by SIGSEGV.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """
    return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))


def _seal(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel: no seal was added.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)


def _touch(mapping: mmap.mmap) -> None:
    for start in range(0, len(mapping), _TOUCH_NBYTES):
        nbytes = min(_TOUCH_NBYTES, len(mapping) - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A kernel before Linux 5.14: a byte a page does the same, in half as much time again.
            piece = memoryview(mapping)[start : start + nbytes : mmap.PAGESIZE]
            piece[:] = bytes(len(piece))
