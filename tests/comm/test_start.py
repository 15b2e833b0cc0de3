"""How ranks meet and part: strangers, missing ranks, platforms without a backend, and nothing left behind."""

from __future__ import annotations

import os
import socket
import threading
import uuid

import numpy as np
import pytest

from overlap.comm import futex
from overlap.comm.backends import connect
from overlap.comm.backends.shm import ShmCommunicator
from overlap.comm.errors import PeerLost, StartError
from overlap.comm.rendezvous import Links, meet
from overlap.comm.span import Span
from overlap.comm.world import World

pytestmark = pytest.mark.usefixtures("nothing_left")


def worlds(size):
    address = f"overlap-test-{uuid.uuid4().hex}"
    return [World(rank, size, rank, size, address=address, source="overlap") for rank in range(size)]


def in_threads(*works):
    """Run them at once; the results, or the errors, in order."""
    results = [None] * len(works)

    def run(number):
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def stranger(address):
    """A connection to rank 0's name, once there is one."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            link.connect(f"\0{address}-0")
            return link
        except ConnectionRefusedError:
            os.sched_yield()


def test_strangers_hold_nobody_up():
    """One says nothing, some talk nonsense, one claims to be rank 0: the ranks meet all the same."""
    zero, one = worlds(2)
    nonsense = [b"\xff\xfe", b"[]", b'{"rank": 0}', b'{"rank": true}', b'{"rank": 2}', b'{"rank": "1"}']

    def join_late():
        guests = [stranger(zero.address) for _ in range(len(nonsense) + 2)]
        for guest, message in zip(guests, nonsense, strict=False):
            guest.send(message)
        guests.pop().close()
        links = meet(one, 0, 10)
        for guest in guests:
            guest.close()
        return links

    first, second = in_threads(lambda: meet(zero, 0, 10), join_late)
    assert isinstance(first, Links), first
    assert isinstance(second, Links), second
    first.close()
    second.close()


def test_missing_rank_is_named():
    zero, one, _ = worlds(3)
    first, second = in_threads(lambda: meet(zero, 0, 0.5), lambda: meet(one, 0, 5))
    assert isinstance(first, StartError)
    assert "rank 2 of 3" in str(first)
    assert "overlap.init()" in str(first)
    assert isinstance(second, StartError)
    assert "rank 0 did not bring all 3 ranks together" in str(second)


def test_rank_0_never_comes():
    with pytest.raises(StartError, match=r"rank 1 waited 0\.2 s for rank 0"):
        meet(worlds(2)[1], 0, 0.2)


def test_a_name_that_is_taken():
    zero = worlds(2)[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(f"\0{zero.address}-0")
        with pytest.raises(StartError, match="is another job running"):
            meet(zero, 0, 1)


def test_without_a_backend_one_rank_works_and_two_are_told(monkeypatch):
    monkeypatch.setattr(futex, "AVAILABLE", False)
    alone = connect(World(), 0, 1, 0)
    span = alone.allocate(8).span(Span.wrap(np.ones(1)).dtype, 1)
    span.array[:] = 3
    alone.allreduce(span)
    assert span.array[0] == 3
    alone.close()
    with pytest.raises(StartError, match="2 ranks, but shared memory between them needs Linux"):
        connect(worlds(2)[0], 0, 1, 0)


def joined(world, work):
    communicator = ShmCommunicator.start(meet(world, 0, 10), world.rank, 0)
    try:
        return work(communicator)
    finally:
        communicator.close()


def all_joined(size, work):
    """Shared memory between threads of this process: what they leave behind can be counted."""
    return in_threads(*(lambda world=world: joined(world, work) for world in worlds(size)))


def test_memory_and_descriptors_go_with_their_last_user():
    def work(communicator):
        for _ in range(20):
            twin = communicator.split(0)
            buffer = twin.allocate(100_000)
            buffer.memory[:] = 1
            twin.close()
        return len(buffer.memory)

    assert all_joined(3, work) == [100_000] * 3


def test_memory_that_cannot_be_had_is_an_error_everywhere_and_harmless():
    def work(communicator):
        with pytest.raises(MemoryError, match=r"mapped on every rank: rank 0 could not\. Free memory"):
            communicator.allocate(1 << 47)
        communicator.barrier()
        return len(communicator.allocate(64).memory)

    assert all_joined(2, work) == [64, 64]


def test_the_culprit_is_passed_on():
    """Rank 1 hears only of rank 2, which heard only of rank 0."""

    def work(communicator):
        if communicator.rank == 0:
            communicator.abort("raised ValueError: bad\nsample")
            communicator.barrier()
        try:
            communicator.barrier()
        except PeerLost as lost:
            communicator.abort(lost.reason, lost.rank)
            return lost.rank, lost.reason
        return None

    results = all_joined(3, work)
    assert results[1:] == [(0, "raised ValueError: bad\nsample")] * 2


def test_a_thread_that_waits_is_woken_by_close():
    def work(communicator):
        if communicator.rank == 1:
            return "rank 1 ended after one step"
        with pytest.raises(PeerLost, match="rank 1 ended without an error, while this rank was in barrier"):
            communicator.barrier()
        return "told"

    assert all_joined(2, work)[0] == "told"


def cycles(times):
    import gc

    import overlap
    from overlap import runtime
    from overlap.comm.dtype import DType

    def held():
        gc.collect()
        with open("/proc/self/maps") as maps:
            shared = sum("memfd:overlap" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), shared

    for number in range(times):
        overlap.init()
        channel = runtime.engine().open_channel("cycle")
        buffer = channel.run(lambda communicator: communicator.allocate(4096))
        span = buffer.span(DType.FLOAT32, 4)
        span.array[:] = overlap.rank() + 1
        channel.submit(lambda communicator, span=span: communicator.allreduce(span), "x").wait()
        assert span.array.tolist() == [3.0] * 4
        del channel, buffer, span
        overlap.shutdown()
        if number == 4:
            before = held()
    return before, held()


def test_init_and_shutdown_a_hundred_times(start_ranks):
    for before, after in start_ranks(2).run(cycles, 100):
        assert after == before
        assert after[2] == 0
