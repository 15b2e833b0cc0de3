"""Channels: order, results, harmless and fatal errors, and the end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from overlap.comm.backends.inproc import alone, run_threads
from overlap.comm.control import Control
from overlap.comm.engine import Channel, Engine
from overlap.comm.errors import CommError, PeerLost
from overlap.comm.named import NamedOperations
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
        named = NamedOperations(alone(), Control(0, None), warn_s=0, abort_s=0)
        engine = Engine(World(), communicator, named)
        one, two = engine.open_channel("one"), engine.open_channel("two")
        assert one.run(lambda c: c.size) == two.run(lambda c: c.size) == 2
        communicator.barrier()
        engine.close_channel(one)
        engine.close()
        engine.close()
        with pytest.raises(CommError, match="shut down"):
            engine.open_channel("three")

    run_threads(2, work)


def test_what_follows_a_fatal_error_is_not_run_and_has_the_same_error():
    def work(communicator):
        channel, ran = Channel(communicator, "test"), []

        def fail(_):
            raise RuntimeError("broken")

        handles = [channel.submit(fail, "one"), channel.submit(ran.append, "two")]
        errors = []
        for handle in handles:
            with pytest.raises(RuntimeError, match="broken") as caught:
                handle.wait(20)
            errors.append(caught.value)
            assert handle.done()
        assert errors[0] is errors[1]
        channel.close()
        return ran

    assert run_threads(1, work) == [[]]


def test_peer_names_who_was_lost():
    def work(communicator):
        channel = Channel(communicator, "test")

        def fail(_):
            raise RuntimeError("broken")

        handle = channel.submit(fail if communicator.rank else lambda c: c.barrier(), "a step")
        with pytest.raises(RuntimeError) as caught:
            handle.wait(20)
        channel.close()
        return caught.value.rank if isinstance(caught.value, PeerLost) else None

    assert run_threads(2, work) == [1, None]
