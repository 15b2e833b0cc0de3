"""Memory that the processes of one host share, without a name to leave behind or for others to open."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_int = ctypes.c_int
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, _int, _int, _int, ctypes.c_long]
_MAP_FIXED = 0x10

# Every mapping that is alive, by descriptor: (address, bytes), for `_make_private` in forked children.
_mapped: dict[int, tuple[int, int]] = {}


class Segment:
    """A mapping of an anonymous file; the memory lives as long as an array over it does, in any process.

    Args:
        descriptor: of the file; it is this object's from now on, and closed if the mapping fails.

    Attributes:
        bytes: the whole mapping; arrays cut from it keep it mapped.
        descriptor: to pass to other processes; closed with the mapping.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        # A mapping of no bytes is an error; one page costs nothing until it is touched.
        length = max(nbytes, mmap.PAGESIZE)
        try:
            mapping = mmap.mmap(descriptor, length)
        except BaseException:
            os.close(descriptor)
            raise
        whole = np.frombuffer(mapping, np.uint8)
        self.bytes = whole[:nbytes]
        _mapped[descriptor] = (whole.ctypes.data, length)
        # Arrays outlive this object; the descriptor stays open for forked children to map the file anew.
        weakref.finalize(mapping, _forget, descriptor).atexit = False

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New zeroed memory; pages are taken when they are first touched."""
        return cls(create_file(nbytes), nbytes)


def create_file(nbytes: int) -> int:
    """The descriptor of a new anonymous file, for a Segment of `nbytes` in this process or another."""
    descriptor = os.memfd_create("overlap", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(nbytes, mmap.PAGESIZE))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _forget(descriptor: int) -> None:
    del _mapped[descriptor]
    os.close(descriptor)


def _make_private() -> None:
    """In a forked child: what it writes from now on is its own (copy on write), never the parent's bucket."""
    for descriptor, (address, length) in _mapped.items():
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        _libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)


os.register_at_fork(after_in_child=_make_private)
