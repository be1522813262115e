"""Tensors on memory that is only lent: a transport's, which must not be written and may be mapped to be read only.

torch has no read-only tensors and warns of memory that cannot be written, so it is shown the address alone. What keeps
the memory alive is held by the tensor all the same, until its last view is gone. A write to such a tensor is a fault of
the program, and ends it where the memory is mapped to be read only.
"""

from __future__ import annotations

import ctypes

import torch

_PyBUF_SIMPLE = 0


class _Buffer(ctypes.Structure):
    """The interpreter's `Py_buffer`, whose layout is part of its stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def borrowed(view: memoryview) -> torch.Tensor:
    """The bytes of `view`, contiguous, as a 1-D uint8 tensor in place, which must not be written; it holds `view`."""
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    room = (ctypes.c_ubyte * view.nbytes).from_address(address_of(view))
    room.lender = view  # type: ignore[attr-defined]
    return torch.frombuffer(room, dtype=torch.uint8)


def address_of(view: memoryview) -> int:
    """Where the contiguous bytes of `view` begin; valid while `view` is."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), _PyBUF_SIMPLE)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(buffer.buf)
