"""Buckets: their states through a round, and that they leave in plan order whatever order they fill in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.comm.bucket import Buckets, State


def test_states_of_a_round():
    buckets = Buckets([2, 1])
    assert buckets.states == [State.FILLING, State.FILLING]
    assert list(buckets.filled(1)) == []
    assert buckets.states == [State.FILLING, State.READY]
    assert list(buckets.filled(0)) == []
    assert buckets.states == [State.FILLING, State.READY]
    assert list(buckets.filled(0)) == [0, 1]
    assert buckets.states == [State.IN_FLIGHT, State.IN_FLIGHT]
    buckets.reduced()
    assert buckets.states == [State.REDUCED, State.REDUCED]


def test_one_leaves_while_another_fills():
    buckets = Buckets([1, 2])
    assert list(buckets.filled(0)) == [0]
    assert buckets.states == [State.IN_FLIGHT, State.FILLING]


def test_a_round_that_was_broken_off_leaves_nothing_behind():
    buckets = Buckets([1, 2])
    buckets.filled(0)
    buckets.filled(1)
    buckets.begin()
    assert buckets.states == [State.FILLING, State.FILLING]
    assert [list(buckets.filled(bucket)) for bucket in (1, 0, 1)] == [[], [0], [1]]


def test_no_buckets():
    buckets = Buckets([])
    buckets.reduced()
    assert buckets.states == []


@given(st.lists(st.integers(1, 4), max_size=10), st.integers(1, 3), st.randoms())
@settings(deadline=None)
def test_leaving_in_plan_order_as_soon_as_can_be(sizes, rounds, random):
    buckets = Buckets(sizes)
    for _ in range(rounds):
        buckets.begin()
        events = [bucket for bucket, size in enumerate(sizes) for _ in range(size)]
        random.shuffle(events)
        missing, left = list(sizes), []
        for bucket in events:
            missing[bucket] -= 1
            left += buckets.filled(bucket)
            full = next((number for number, count in enumerate(missing) if count), len(sizes))
            assert left == list(range(full))
            for number, state in enumerate(buckets.states):
                waiting = State.FILLING if missing[number] else State.READY
                assert state is (State.IN_FLIGHT if number < full else waiting)
        assert left == list(range(len(sizes)))
        buckets.reduced()
        assert buckets.states == [State.REDUCED] * len(sizes)
