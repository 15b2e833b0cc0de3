"""Shared memory: a forked child's writes stay its own, and nothing is left once the last array is gone."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from overlap.comm.shared_memory import Segment

pytestmark = pytest.mark.usefixtures("nothing_left")


def mapped(address):
    """Whether a mapping of ours lies at this address."""
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") and "memfd:overlap" in line for line in maps)


def exit_code(work):
    """Of a forked child that calls `work`; 99 where it raises."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_reads_what_was_there_and_writes_for_itself():
    segments = [Segment.create(3 * mmap.PAGESIZE), Segment.create(100)]
    for number, segment in enumerate(segments):
        segment.bytes[:] = number + 1

    def work():
        seen = [int(segment.bytes.min()) for segment in segments]
        for segment in segments:
            segment.bytes[:] = 9
        return int(seen == [1, 2] and all(segment.bytes.min() == 9 for segment in segments))

    assert exit_code(work) == 1
    assert [set(segment.bytes.tolist()) for segment in segments] == [{1}, {2}]


def test_forked_child_of_a_forked_child_writes_for_itself():
    segment = Segment.create(mmap.PAGESIZE)

    def work():
        segment.bytes[0] = 1
        inner = exit_code(lambda: segment.bytes.fill(2) or 7)
        return 5 if inner == 7 and segment.bytes[0] == 1 else 1

    assert exit_code(work) == 5
    assert not segment.bytes.any()


def test_another_mapping_of_the_descriptor_is_shared():
    segment = Segment.create(100)
    other = Segment(os.dup(segment.descriptor), 100)
    other.bytes[:] = 3
    assert set(segment.bytes.tolist()) == {3}


def test_mapping_and_descriptor_end_with_the_last_array():
    segment = Segment.create(2 * mmap.PAGESIZE)
    descriptor, address = segment.descriptor, segment.bytes.ctypes.data
    part = segment.bytes[mmap.PAGESIZE :].view(np.float32)
    assert mapped(address)
    del segment
    part[:] = 1.5
    assert mapped(address)
    os.fstat(descriptor)
    del part
    assert not mapped(address)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE + 1])
def test_any_length_and_zeros(nbytes):
    segment = Segment.create(nbytes)
    assert len(segment.bytes) == nbytes
    assert not segment.bytes.any()


def test_descriptor_is_closed_where_mapping_fails():
    read, write = os.pipe()
    os.close(write)
    with pytest.raises((OSError, ValueError)):
        Segment(read, 100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
