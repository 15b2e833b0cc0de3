"""Runs decided operations on a group's communicator: numpy arrays in, outcomes out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from overlap.comm.algorithms.adasum import adasum
from overlap.comm.backends.base import Communicator
from overlap.comm.controller import Decision
from overlap.comm.dtype import DType, Op
from overlap.comm.reduce import from_float64, scale, to_float64
from overlap.comm.request import Kind, Outcome, Request
from overlap.comm.span import Buffer, Span

# Memory of every rank that small allreduces are gathered in; larger ones are reduced piece by piece.
FUSION_BYTES = 4 * 1024 * 1024


class Group:
    """The ranks of a process set, and what they have in common.

    Args:
        communicator: of these ranks alone.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._fusion: Buffer | None = None

    def run(self, decision: Decision, arrays: Sequence[Sequence[np.ndarray] | None]) -> list[Outcome]:
        """Collective among the group: do what was decided; returns one outcome an operation.

        Args:
            arrays: of each operation; None where this rank has joined and stands in with nothing.
        """
        self.communicator.doing = _doing(decision)
        given = [
            _stand_in(request) if mine is None else mine
            for request, mine in zip(decision.requests, arrays, strict=True)
        ]
        request = decision.requests[0]
        if request.kind is Kind.ALLREDUCE:
            self._allreduce(decision, given)
            return [Outcome(tuple(theirs)) for theirs in given]
        return [_RUNS[request.kind](self.communicator, request, decision, given[0])]

    def _allreduce(self, decision: Decision, given: Sequence[Sequence[np.ndarray]]) -> None:
        request = decision.requests[0]
        for dtype, arrays in _by_dtype(decision, given).items():
            for array in arrays:
                scale(array, dtype, request.prescale)
            if sum(array.nbytes for array in arrays) <= FUSION_BYTES and len(arrays) > 1:
                self._reduce_fused(request, dtype, arrays)
            else:
                for array in arrays:
                    self._reduce(request, Span.wrap(array, dtype))
            for array in arrays:
                scale(array, dtype, request.postscale)

    def _reduce_fused(self, request: Request, dtype: DType, arrays: Sequence[np.ndarray]) -> None:
        if self._fusion is None:
            self._fusion = self.communicator.allocate(FUSION_BYTES)
        count = sum(array.size for array in arrays)
        span = self._fusion.span(dtype, count)
        if count:
            np.concatenate([array.reshape(-1) for array in arrays], out=span.array)
        self._reduce(request, span)
        start = 0
        for array in arrays:
            end = start + array.size
            array.reshape(-1)[:] = span.array[start:end]
            start = end

    def _reduce(self, request: Request, span: Span) -> None:
        assert request.op is not None
        if request.op is Op.AVERAGE and not (span.dtype.is_floating or span.dtype.is_complex):
            self.communicator.allreduce(span, Op.SUM)
            _divide_truncating(span.array, self.communicator.size)
        else:
            self.communicator.allreduce(span, request.op)


def _by_dtype(decision: Decision, given: Sequence[Sequence[np.ndarray]]) -> dict[DType, list[np.ndarray]]:
    found: dict[DType, list[np.ndarray]] = {}
    for request, arrays in zip(decision.requests, given, strict=True):
        for (dtype, _), array in zip(request.tensors, arrays, strict=True):
            found.setdefault(dtype, []).append(array)
    return found


def _doing(decision: Decision) -> str:
    more = f" and {len(decision.names) - 1} more" if len(decision.names) > 1 else ""
    return f"{decision.requests[0].kind.value} {decision.names[0]!r}{more}"


def _stand_in(request: Request) -> list[np.ndarray]:
    """What a rank that has joined contributes: what changes nothing."""
    rows = request.kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    made = []
    for dtype, shape in request.tensors:
        array = np.zeros((0, *shape[1:]) if rows else shape, dtype.storage)
        neutral = _neutral(request.op, dtype)
        if neutral:
            array[...] = neutral
        made.append(array)
    return made


def _neutral(op: Op | None, dtype: DType) -> float | int | bool:
    """The reduction's neutral element, as `dtype.storage` holds it."""
    if op not in (Op.MIN, Op.MAX, Op.PRODUCT):
        return 0
    if dtype is DType.BFLOAT16:
        return {Op.MIN: 0x7F80, Op.MAX: 0xFF80, Op.PRODUCT: 0x3F80}[op]
    if op is Op.PRODUCT:
        return 1
    if dtype is DType.BOOL:
        return op is Op.MIN
    if dtype.is_floating:
        return math.inf if op is Op.MIN else -math.inf
    limits = np.iinfo(np.dtype(dtype.value))
    return int(limits.max if op is Op.MIN else limits.min)


def _divide_truncating(array: np.ndarray, divisor: int) -> None:
    """Integers, towards zero, as C divides them."""
    remainder = np.fmod(array, divisor)  # has the sign of what is divided
    np.floor_divide(array - remainder, divisor, out=array)


def _adasum(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    for (dtype, _), array in zip(request.tensors, given, strict=True):
        scale(array, dtype, request.prescale)
        from_float64(adasum(communicator, to_float64(array, dtype)), array, dtype)
        scale(array, dtype, request.postscale)
    return Outcome(tuple(given))


def _allgather(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    results = []
    for index, ((dtype, shape), array) in enumerate(zip(request.tensors, given, strict=True)):
        rows = [row[index] for row in decision.table]
        width = math.prod(shape[1:])
        result = np.empty((sum(rows), *shape[1:]), dtype.storage)
        start = sum(rows[: communicator.rank])
        result[start : start + rows[communicator.rank]] = array
        communicator.allgather(Span.wrap(result, dtype), [count * width for count in rows])
        results.append(result)
    return Outcome(tuple(results))


def _broadcast(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    root = decision.members.index(request.root)
    for (dtype, _), array in zip(request.tensors, given, strict=True):
        communicator.broadcast(Span.wrap(array, dtype), root)
    return Outcome(tuple(given))


def _alltoall(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    rank, table = communicator.rank, decision.table
    received = tuple(row[rank] for row in table)
    (dtype, shape), array = request.tensors[0], given[0]
    width = math.prod(shape[1:])
    result = np.empty((sum(received), *shape[1:]), dtype.storage)
    sent = array[: sum(table[rank])]
    communicator.alltoall(
        Span.wrap(sent, dtype),
        [count * width for count in table[rank]],
        Span.wrap(result, dtype),
        [count * width for count in received],
    )
    return Outcome((result,), splits=received)


def rows_of(count: int, size: int) -> list[int]:
    """How many of `count` rows each rank gets of a reducescatter: the first ones one more where uneven."""
    return [count // size + (rank < count % size) for rank in range(size)]


def _reducescatter(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    results = []
    for (dtype, shape), array in zip(request.tensors, given, strict=True):
        rows = rows_of(shape[0], communicator.size)
        width = math.prod(shape[1:])
        work = array.copy()
        scale(work, dtype, request.prescale)
        assert request.op is not None
        integers = request.op is Op.AVERAGE and not (dtype.is_floating or dtype.is_complex)
        communicator.reduce_scatter(
            Span.wrap(work, dtype), [count * width for count in rows], Op.SUM if integers else request.op
        )
        start = sum(rows[: communicator.rank])
        result = work[start : start + rows[communicator.rank]].copy()
        if integers:
            _divide_truncating(result, communicator.size)
        scale(result, dtype, request.postscale)
        results.append(result)
    return Outcome(tuple(results))


def _barrier(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    communicator.barrier()
    return Outcome()


def _duplicate(
    communicator: Communicator, request: Request, decision: Decision, given: Sequence[np.ndarray]
) -> Outcome:
    return Outcome(communicator=communicator.split(0))


_RUNS = {
    Kind.ADASUM: _adasum,
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
    Kind.BARRIER: _barrier,
    Kind.DUPLICATE: _duplicate,
}
