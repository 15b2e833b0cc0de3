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

    Args:
        sizes: how many gradients each bucket takes, in plan order.

    >>> buckets = Buckets([2, 1])
    >>> [list(buckets.filled(bucket)) for bucket in (1, 0, 0)]
    [[], [], [0, 1]]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self.begin()

    def begin(self) -> None:
        """A new round: all buckets are empty."""
        self.states = [State.FILLING] * len(self._sizes)
        self._missing = list(self._sizes)
        self._next = 0

    def filled(self, bucket: int) -> Sequence[int]:
        """One more gradient of `bucket` is in its slice; returns the buckets that leave, in plan order."""
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return ()
        self.states[bucket] = State.READY
        leaving = []
        while self._next < len(self.states) and self.states[self._next] is State.READY:
            self.states[self._next] = State.IN_FLIGHT
            leaving.append(self._next)
            self._next += 1
        return leaving

    def reduced(self) -> None:
        """The round has waited for every bucket's allreduce."""
        self.states = [State.REDUCED] * len(self._sizes)
