"""Sleeping until another process changes a word of shared memory (Linux futex), without holding the GIL."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)
# A cast function pointer with fixed argument types: converts arguments faster than varargs `syscall`.
_syscall = _libc.syscall
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]
_syscall.restype = ctypes.c_long
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _NUMBERS.get(platform.machine(), 0)
_WAIT, _WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF

AVAILABLE = bool(_FUTEX) and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")

# Gives the core to any other thread that wants it, and lets go of the GIL meanwhile.
yield_core = _libc.sched_yield


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def timespec(seconds: float) -> ctypes.Structure:
    """A duration as `wait` takes it."""
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def wait(address: int, value: int, timeout: ctypes.Structure) -> None:
    """Sleep while the 32-bit word at `address` is `value`, at most `timeout`; may return early."""
    _syscall(_FUTEX, address, _WAIT, value, ctypes.addressof(timeout), None, 0)


def wake(address: int) -> None:
    """Wake every process that waits on the word at `address`."""
    _syscall(_FUTEX, address, _WAKE, _EVERYONE, None, None, 0)
