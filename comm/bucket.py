"""A bucket's life within one round: filling, ready, in flight, reduced."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class State(Enum):
    FILLING = "filling"  # a round began: gradients come in
    READY = "ready"  # the last gradient of the bucket is in its slice
    IN_FLIGHT = "in flight"  # it was its turn in plan order: its allreduce is on the channel
    REDUCED = "reduced"  # the round has waited for its allreduce


class Buckets:
    """Counts gradients into buckets and says which buckets may leave. Pure: events in, decisions out.

    >>> buckets = Buckets([0, 0, 1], 2)
    >>> buckets.filled(2), buckets.filled(0), buckets.filled(1)
    ([], [], [0, 1])
    """

    def __init__(self, bucket_of: Sequence[int], count: int) -> None:
        self.bucket_of = bucket_of
        self._sizes = [0] * count
        for bucket in bucket_of:
            self._sizes[bucket] += 1
        self.begin()

    def begin(self) -> None:
        """A new round: all buckets are empty."""
        self.states = [State.FILLING] * len(self._sizes)
        self._missing = list(self._sizes)
        self._next = 0

    def filled(self, parameter: int) -> list[int]:
        """A gradient is in its slice; returns the buckets that leave now, in plan order."""
        bucket = self.bucket_of[parameter]
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return []
        self.states[bucket] = State.READY
        leaving = []
        while self._next < len(self.states) and self.states[self._next] is State.READY:
            self.states[self._next] = State.IN_FLIGHT
            leaving.append(self._next)
            self._next += 1
        return leaving

    def reduced(self, bucket: int) -> None:
        """The round has waited for the bucket's allreduce."""
        self.states[bucket] = State.REDUCED
