"""Channels: order, results, harmless and fatal errors, and the end."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from overlap.comm.backends.inproc import run_threads
from overlap.comm.engine import Channel, Engine
from overlap.comm.errors import CommError, PeerLost
from overlap.comm.shared_memory import Segment
from overlap.comm.span import Span
from overlap.comm.world import World

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_channel_runs_in_order_and_returns_results():
    def work(communicator):
        channel = Channel(communicator, "test")
        spans = [Span.wrap(np.array([float(n)])) for n in range(20)]
        handles = [
            channel.submit(lambda c, s=span: c.allreduce(s), f"number {n}") for n, span in enumerate(spans)
        ]
        for handle in handles:
            handle.wait(20)
            assert handle.done()
            assert handle.submitted_s <= handle.started_s <= handle.finished_s
        starts = [handle.started_s for handle in handles]
        assert starts == sorted(starts)
        last = channel.submit(lambda c: c.rank, "the rank").wait(20)
        channel.close()
        return [span.array[0] for span in spans], last

    assert run_threads(2, work) == [([2.0 * n for n in range(20)], rank) for rank in range(2)]


def test_harmless_error_goes_on():
    def work(communicator):
        channel = Channel(communicator, "test")
        with pytest.raises(ValueError, match="root"):
            channel.submit(lambda c: c.broadcast(Span.wrap(np.ones(1)), 9), "bad").wait(20)
        assert channel.submit(lambda c: c.barrier(), "good").wait(20) is None
        channel.close()

    run_threads(2, work)


def test_fatal_error_reaches_the_peer_and_what_follows():
    def work(communicator):
        channel = Channel(communicator, "test")

        def fail(_):
            raise KeyError("lost")

        first = channel.submit(fail if communicator.rank == 0 else lambda c: c.barrier(), "something")
        second = channel.submit(lambda c: c.barrier(), "more")
        errors = []
        for handle in (first, second):
            with pytest.raises((KeyError, PeerLost)) as caught:
                handle.wait(20)
            errors.append(type(caught.value).__name__)
        channel.close()
        return errors

    assert run_threads(2, work) == [["KeyError", "KeyError"], ["PeerLost", "PeerLost"]]


def test_wait_with_a_limit_and_submit_after_close():
    def work(communicator):
        channel, open_ = Channel(communicator, "test"), threading.Event()
        handle = channel.submit(lambda _: open_.wait(20), "a wait")
        assert not handle.done()
        with pytest.raises(TimeoutError, match=r"not finished after 0.01 s"):
            handle.wait(0.01)
        open_.set()
        assert handle.wait(20) is True
        channel.close()
        channel.close()
        with pytest.raises(CommError, match="overlap was shut down"):
            channel.submit(lambda _: None, "too late")

    run_threads(1, work)


def test_engine_closes_its_channels():
    def work(communicator):
        engine = Engine(World(), communicator)
        one, two = engine.open_channel("one"), engine.open_channel("two")
        assert one.run(lambda c: c.size) == two.run(lambda c: c.size) == 2
        communicator.barrier()
        engine.close_channel(one)
        engine.close()
        engine.close()
        with pytest.raises(CommError, match="shut down"):
            engine.open_channel("three")

    run_threads(2, work)


def test_forked_child_writes_to_memory_of_its_own():
    segment = Segment.create(8192)
    segment.bytes[:] = 1
    child = os.fork()
    if child == 0:
        segment.bytes[:] = 4
        os._exit(int(segment.bytes[5000]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert segment.bytes.max() == 1


def test_memory_lives_as_long_as_its_last_array():
    segment = Segment.create(8192)
    descriptor, part = segment.descriptor, segment.bytes[4096:]
    del segment
    part[:] = 7
    os.fstat(descriptor)
    del part
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
