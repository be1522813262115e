"""A pool's memory is its owner's to write and its readers' to read, and nobody can make it vanish under them."""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys

import pytest
import torch

from omnikv.tensors.borrow import address_of, borrowed
from omnikv.transports import shm_map
from omnikv.transports.shm_map import make_segment, map_for_reading

NBYTES = 4 * mmap.PAGESIZE


@pytest.fixture
def segment():
    fd, view = make_segment(NBYTES)
    yield fd, view
    os.close(fd)


def test_readers_see_what_the_owner_writes_and_cannot_write_themselves(segment):
    fd, view = segment
    seen = map_for_reading(fd, NBYTES)
    view[:6] = b"before"
    assert bytes(seen[:6]) == b"before"
    with pytest.raises(TypeError, match="read-only"):
        seen[0] = 1


def test_nobody_can_map_a_segment_to_write_it_or_change_its_size(segment):
    fd, view = segment
    for change in (
        lambda: mmap.mmap(fd, NBYTES),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, NBYTES - 1),
        lambda: os.ftruncate(fd, NBYTES + 1),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    view[:1] = b"y"


def test_an_older_kernel_seals_the_size_alone(monkeypatch):
    def refuse_new_seals(fd, command, value):
        if value & shm_map._F_SEAL_FUTURE_WRITE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl_of_the_system(fd, command, value)

    fcntl_of_the_system = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse_new_seals)
    fd, _ = make_segment(NBYTES)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert map_for_reading(fd, NBYTES).readonly
    finally:
        os.close(fd)


def test_an_older_kernel_touches_pages_one_by_one(monkeypatch):
    monkeypatch.setattr(shm_map, "_MADV_POPULATE_WRITE", 12345)
    fd, view = make_segment(NBYTES)
    os.close(fd)
    assert bytes(view) == bytes(NBYTES)


def test_a_segment_that_cannot_be_made_leaves_no_descriptor(monkeypatch):
    def refuse(fd, start, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        make_segment(NBYTES)
    assert os.listdir("/proc/self/fd") == before


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:omnikv")


def test_a_borrowed_tensor_is_in_place_and_keeps_its_memory_until_its_last_view_is_gone(segment):
    fd, view = segment
    before = mappings()
    seen = map_for_reading(fd, NBYTES)
    tensor = borrowed(seen[64:72])
    assert tensor.data_ptr() == address_of(seen) + 64
    part = tensor.view(torch.int32)[1:]
    del seen, tensor
    view[68:72] = (7).to_bytes(4, sys.byteorder)
    assert part.tolist() == [7]
    assert mappings() == before + 1
    del part
    assert mappings() == before


@pytest.mark.parametrize("make", [bytes, bytearray])
def test_any_memory_can_be_borrowed(make):
    assert borrowed(memoryview(make(b"abc"))).tolist() == [97, 98, 99]
    assert borrowed(memoryview(make())).tolist() == []


WRITING = """
import torch
from omnikv.tensors.borrow import borrowed
from omnikv.transports.shm_map import make_segment, map_for_reading
fd, _ = make_segment(4096)
borrowed(map_for_reading(fd, 4096)).fill_(1)
"""


def test_a_program_that_writes_to_a_received_tensor_is_stopped():
    done = subprocess.run([sys.executable, "-c", WRITING], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr
