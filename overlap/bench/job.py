"""Starts the ranks of a benchmark, one thread each, and sums up what they have timed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap.launch import Ranks

# They choose a BLAS kernel by hand: a benchmark measures what users get without them.
_BLAS_OVERRIDES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
# One thread a rank; gloo, as overlap, needs no more than the loopback of this host.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Timing:
    """The median and the minimum of some samples, in the unit of the samples."""

    median: float
    min: float

    @classmethod
    def of(cls, samples: Iterable[float], scale: float = 1) -> Timing:
        """Sum up `samples`, each multiplied by `scale`.

        >>> Timing.of([3.0, 1.0, 2.0], 10)
        Timing(median=20.0, min=10.0)
        """
        scaled = [sample * scale for sample in samples]
        return cls(median(scaled), min(scaled))


@contextmanager
def new_ranks(num_proc: int) -> Iterator[Ranks]:
    """The ranks of a new job, as every benchmark has them."""
    from overlap.launch import Ranks

    taken = {name: os.environ.pop(name) for name in _BLAS_OVERRIDES if name in os.environ}
    try:
        with Ranks(num_proc, env=_ENVIRONMENT) as ranks:
            yield ranks
    finally:
        os.environ.update(taken)


def pooled(results: Sequence[dict[str, list[float]]], key: str) -> list[float]:
    """The samples of all ranks under one key.

    >>> pooled([{"plain": [1.0]}, {"plain": [2.0, 3.0]}], "plain")
    [1.0, 2.0, 3.0]
    """
    return [sample for result in results for sample in result[key]]
