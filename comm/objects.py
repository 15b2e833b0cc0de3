"""Bytes of any length between ranks: for set-up, where ranks compare and agree."""

from __future__ import annotations

import hashlib

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.span import Span


def are_equal(communicator: Communicator, data: bytes) -> bool:
    """Whether every rank has the same `data`, of which a hash is sent."""
    return len(set(allgather_bytes(communicator, hashlib.sha256(data).digest()))) == 1


def allgather_bytes(communicator: Communicator, data: bytes) -> list[bytes]:
    """Every rank's `data`, in rank order; lengths may differ."""
    size, rank = communicator.size, communicator.rank
    lengths = np.zeros(size, np.int64)
    lengths[rank] = len(data)
    communicator.allgather(Span.wrap(lengths), [1] * size)
    counts = lengths.tolist()
    everything = np.empty(sum(counts), np.uint8)
    start = sum(counts[:rank])
    everything[start : start + len(data)] = np.frombuffer(data, np.uint8)
    communicator.allgather(Span.wrap(everything), counts)
    ends = np.cumsum(lengths)
    return [everything[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]
