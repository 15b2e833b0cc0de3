"""Which parameter goes in which bucket, and why in that order. Pure: no clocks, threads or memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from overlap.comm.dtype import DType

# Slices of a bucket are packed without gaps (so that small ones can be copied by one call); buckets start on
# pages of their own, so that no two ranks and no two buckets share a cache line.
_BUCKET_ALIGN = 4096


@dataclass(frozen=True)
class Parameter:
    """What a plan needs to know of a parameter."""

    name: str
    count: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: parameters of one dtype, side by side in the buffer.

    Attributes:
        parameters: indices of its parameters, in the order in which they are expected to be ready.
        starts: of each, the first element within the bucket.
        offset: the bucket's first byte in the buffer.
        count: its elements.
    """

    dtype: DType
    parameters: tuple[int, ...]
    starts: tuple[int, ...]
    offset: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which every rank sends them.

    Attributes:
        nbytes: of the buffer that holds them all.
    """

    buckets: tuple[BucketPlan, ...]
    nbytes: int

    def digest(self) -> int:
        """63 bits that differ where plans differ."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "little") >> 1


def make_plan(
    parameters: Sequence[Parameter],
    order: Sequence[int],
    bucket_bytes: int = 4_000_000,
    edge_bytes: int = 1_000_000,
) -> Plan:
    """Cut parameters into buckets, in the order in which their gradients become ready.

    The first bucket is small, so that communication starts early; the last one too, since nothing of it can
    be hidden; between, buckets are large enough that their number costs little. A bucket closes with the
    parameter that reaches its limit. Types are not mixed: each has an open bucket, and buckets leave in the
    order in which they close. Parameters that are not in `order` are in no bucket.

    >>> three = [Parameter(name, 10, DType.FLOAT32) for name in "abc"]
    >>> [bucket.parameters for bucket in make_plan(three, [2, 1, 0], bucket_bytes=80, edge_bytes=40).buckets]
    [(2,), (1,), (0,)]
    """
    tail = _tail(parameters, order, edge_bytes)
    groups: list[list[int]] = []
    open_groups: dict[DType, list[int]] = {}
    sizes: dict[DType, int] = {}

    def close(dtype: DType) -> None:
        groups.append(open_groups.pop(dtype))

    for place, index in enumerate(order):
        parameter = parameters[index]
        dtype = parameter.dtype
        if place == tail and dtype in open_groups:
            close(dtype)
        if dtype not in open_groups:
            open_groups[dtype], sizes[dtype] = [], 0
        open_groups[dtype].append(index)
        sizes[dtype] += parameter.nbytes
        if sizes[dtype] >= (bucket_bytes if groups else edge_bytes):
            close(dtype)
    groups += open_groups.values()
    return _lay_out(parameters, groups)


def _tail(parameters: Sequence[Parameter], order: Sequence[int], edge_bytes: int) -> int:
    """The place in `order` from where on all parameters fit in a small last bucket."""
    size, place = 0, len(order)
    while place > 0 and size + parameters[order[place - 1]].nbytes <= edge_bytes:
        place -= 1
        size += parameters[order[place]].nbytes
    return place


def _lay_out(parameters: Sequence[Parameter], groups: Sequence[Sequence[int]]) -> Plan:
    buckets, offset = [], 0
    for group in groups:
        starts, count = [], 0
        for index in group:
            starts.append(count)
            count += parameters[index].count
        dtype = parameters[group[0]].dtype
        buckets.append(BucketPlan(dtype, tuple(group), tuple(starts), offset, count))
        offset += -(-count * dtype.itemsize // _BUCKET_ALIGN) * _BUCKET_ALIGN
    return Plan(tuple(buckets), offset)
