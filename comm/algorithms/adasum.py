"""Adasum: a sum of gradients that is a mean where they are parallel (Maleki et al. 2021, arXiv:2006.02924).

Two vectors become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their
mean where they are equal. More are combined pairwise, by recursive doubling: in step k with the rank whose
number differs in bit k.
"""

from __future__ import annotations

import sys

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.span import Span

# A squared norm below it counts as zero: the quotient would overflow.
_TINY = sys.float_info.min**0.5


def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The Adasum of two vectors of float64.

    >>> combine(np.array([1.0, 0.0]), np.array([0.0, 1.0])).tolist()
    [1.0, 1.0]
    >>> combine(np.array([1.0, 2.0]), np.array([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    dot, a_squared, b_squared = float(a @ b), float(a @ a), float(b @ b)
    # Not `<`: NaN spreads to the result, as in a sum.
    a_share = 1.0 if a_squared < _TINY else 1.0 - dot / a_squared / 2
    b_share = 1.0 if b_squared < _TINY else 1.0 - dot / b_squared / 2
    return a_share * a + b_share * b


def adasum(communicator: Communicator, vector: np.ndarray) -> np.ndarray:
    """Collective: the Adasum of every rank's `vector` (1-D float64), the same bits on every rank.

    Where the number of ranks is no power of two, the ranks beyond the largest one first combine theirs with
    those of the ranks that lie as far below.
    """
    rank, size = communicator.rank, communicator.size
    half = 1 << (size.bit_length() - 1)
    value, theirs = vector.copy(), np.empty_like(vector)
    if rank >= half:
        communicator.send(Span.wrap(value), rank - half)
        communicator.recv(Span.wrap(value), rank - half)
        return value
    if rank + half < size:
        communicator.recv(Span.wrap(theirs), rank + half)
        value = combine(value, theirs)
    distance = 1
    while distance < half:
        peer = rank ^ distance
        communicator.sendrecv(Span.wrap(value), peer, Span.wrap(theirs), peer)
        value = combine(value, theirs) if rank < peer else combine(theirs, value)
        distance *= 2
    if rank + half < size:
        communicator.send(Span.wrap(value), rank + half)
    return value
