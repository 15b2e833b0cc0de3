"""Horovod's operations on torch tensors: names, arguments and defaults are its own.

Every operation has a form that waits and one that returns a number, for `poll` and `synchronize`. The forms
that wait, and don't write in place, can be differentiated.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from overlap.comm.dtype import Op
from overlap.comm.named import NamedOperations
from overlap.comm.request import WORLD, Kind

from .compression import Compression
from .started import Started, start

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = {Average: Op.AVERAGE, Sum: Op.SUM, Min: Op.MIN, Max: Op.MAX, Product: Op.PRODUCT}


def _no_engine() -> NamedOperations:
    raise ValueError("overlap is not initialized: call init() first")


# Handed in by the face: imports go one way, and which engine there is this room can't know.
named: Callable[[], NamedOperations] = _no_engine

_handles = itertools.count()
_started: dict[int, Started] = {}


def reset() -> None:
    """After a shutdown: numbers begin anew, and what was not waited for is forgotten."""
    global _handles
    _handles = itertools.count()
    _started.clear()


def _group_of(process_set: Any) -> int:
    """The number of a process set; None is the world."""
    return WORLD if process_set is None else process_set.number()


def _op_of(op: int | None, average: bool | None) -> int:
    if average is not None:
        if op is not None:
            raise ValueError(
                "give either op or average, not both: average is the older name of the same choice"
            )
        warnings.warn("Parameter `average` is deprecated: use `op`", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in range(6):
        raise ValueError(f"op must be one of Average, Sum, Adasum, Min, Max, Product, not {op!r}")
    return op


def _begin(
    kind: Kind, name: str | None, prefix: str, tensors: Sequence[torch.Tensor], in_place: bool, **request: Any
) -> int:
    number = next(_handles)
    _started[number] = _start(kind, name, prefix, tensors, in_place, **request)
    return number


def _start(
    kind: Kind,
    name: str | None,
    prefix: str,
    tensors: Sequence[torch.Tensor] = (),
    in_place: bool = False,
    **request: Any,
) -> Started:
    engine = named()
    if name is not None:
        return start(engine, kind, f"{prefix}.{name}", tensors, in_place, **request)
    group = request.get("group", 0)
    return engine.names.give(
        prefix, lambda full: start(engine, kind, full, tensors, in_place, **request), group
    )


def _begin_reduction(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    in_place: bool,
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: Any,
) -> int:
    scaled = {"prescale": float(scales[0]), "postscale": float(scales[1])}
    if op == Adasum:
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"op=Adasum is not defined for {tensor.dtype}: it needs floating point")
        return _begin(Kind.ADASUM, name, prefix, tensors, in_place, group=_group_of(process_set), **scaled)
    return _begin(
        Kind.ALLREDUCE, name, prefix, tensors, in_place, op=_OPS[op], group=_group_of(process_set), **scaled
    )


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once.

    Raises:
        ValueError: there is no such operation.
    """
    if handle not in _started:
        raise ValueError(f"handle {handle!r} is not in use: it was synchronized, or never given out")
    return _started[handle].done()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None where it was waited for before."""
    started = _started.pop(handle, None)
    return None if started is None else started.wait()


def _single(number: int) -> int:
    """The operation's result is its only tensor."""
    started = _started[number]
    _started[number] = Started(started.handle, lambda outcome: started.take(outcome)[0])
    return number


def _several(number: int) -> int:
    started = _started[number]
    _started[number] = Started(started.handle, lambda outcome: tuple(started.take(outcome)))
    return number


# -- allreduce -------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """Start `allreduce`; returns a number for `synchronize`."""
    scales = prescale_factor, postscale_factor
    return _single(
        _begin_reduction("allreduce", [tensor], False, name, _op_of(op, average), scales, process_set)
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """Start `allreduce_`; returns a number for `synchronize`."""
    scales = prescale_factor, postscale_factor
    return _single(
        _begin_reduction("allreduce", [tensor], True, name, _op_of(op, average), scales, process_set)
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.options = options
        op, scales, process_set = options
        prefix = "allreduce" if len(tensors) == 1 else "grouped_allreduce"
        return tuple(synchronize(_begin_reduction(prefix, tensors, False, name, op, scales, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, scales, process_set = ctx.options
        if op in (Min, Max, Product):
            raise RuntimeError("allreduce has a gradient for Average, Sum and Adasum only: detach its result")
        number = _begin_reduction("allreduce", gradients, False, None, op, scales, process_set)
        return None, None, *synchronize(number)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks of the process set; a new tensor of the same shape and dtype.

    The result is `postscale_factor` x reduction of (`prescale_factor` x tensor). An average of integers is
    truncated towards zero.

    Raises:
        ValueError: this rank's own arguments; nothing was sent.
        HorovodInternalError: ranks differ in what they ask for, or one was lost; the same on all.
    """
    options = _op_of(op, average), (prescale_factor, postscale_factor), process_set
    sent, context = compression.compress(tensor)
    (result,) = _Allreduce.apply(options, name, sent)
    decompressed: torch.Tensor = compression.decompress(result, context)
    return decompressed


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """`allreduce` that overwrites `tensor`, and returns it."""
    result: torch.Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """Start `grouped_allreduce`; `synchronize` gives a tuple."""
    scales = prescale_factor, postscale_factor
    return _several(
        _begin_reduction("grouped_allreduce", tensors, False, name, _op_of(op, average), scales, process_set)
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """Start `grouped_allreduce_`; `synchronize` gives a tuple of `tensors`."""
    scales = prescale_factor, postscale_factor
    return _several(
        _begin_reduction("grouped_allreduce", tensors, True, name, _op_of(op, average), scales, process_set)
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors, of any dtypes, all or none."""
    options = _op_of(op, average), (prescale_factor, postscale_factor), process_set
    sent = [compression.compress(tensor) for tensor in tensors]
    if not sent:
        return []
    results = _Allreduce.apply(options, name, *(tensor for tensor, _ in sent))
    return [compression.decompress(each, context) for each, (_, context) in zip(results, sent, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> tuple[torch.Tensor, ...]:
    """`grouped_allreduce` that overwrites `tensors`, and returns them."""
    result: tuple[torch.Tensor, ...] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: Any = None
) -> Callable[[], torch.Tensor]:
    """Gather the rows of a sparse tensor; call what it returns to wait for the sum, or average, of all.

    Raises:
        ValueError: `op` is neither Average nor Sum, or `tensor` is not sparse.
    """
    if op not in (Average, Sum) or not tensor.is_sparse:
        raise ValueError("sparse_allreduce_async takes a sparse tensor, and Average or Sum")
    rows = tensor.detach().coalesce()
    group = _group_of(process_set)
    pieces = [rows.indices().t().contiguous(), rows.values()]
    started = start(named(), Kind.ALLGATHER, f"sparse.{name}", pieces, group=group, joinable=True)

    def finish() -> torch.Tensor:
        indices, values = started.wait()
        summed = torch.sparse_coo_tensor(indices.t(), values, rows.shape, check_invariants=False).coalesce()
        return summed / len(named().groups[group]) if op == Average else summed

    return finish


# -- allgather -------------------------------------------------------------------------------------------


def _check_rows(tensors: Sequence[torch.Tensor], what: str) -> None:
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(f"{what} needs tensors of at least one dimension: use tensor.reshape(1)")


def _begin_allgather(prefix: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: Any) -> int:
    _check_rows(tensors, "allgather")
    group = _group_of(process_set)
    return _begin(Kind.ALLGATHER, name, prefix, tensors, False, group=group, joinable=False)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> int:
    """Start `allgather`; returns a number for `synchronize`."""
    return _single(_begin_allgather("allgather", [tensor], name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> int:
    """Start `grouped_allgather`; `synchronize` gives a tuple."""
    return _several(_begin_allgather("grouped_allgather", tensors, name, process_set))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: Any, *tensors: torch.Tensor) -> Any:
        _check_rows(tensors, "allgather")
        ctx.process_set, ctx.rows = process_set, [len(tensor) for tensor in tensors]
        prefix = "allgather" if len(tensors) == 1 else "grouped_allgather"
        return tuple(synchronize(_begin_allgather(prefix, tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        counts = torch.tensor([ctx.rows], dtype=torch.int64)
        rows = synchronize(allgather_async(counts, process_set=ctx.process_set))
        averaged = synchronize(grouped_allreduce_async(list(gradients), process_set=ctx.process_set))
        place = _place(ctx.process_set)
        mine = [
            gradient.narrow(0, int(rows[:place, index].sum()), ctx.rows[index])
            for index, gradient in enumerate(averaged)
        ]
        return None, None, *mine


def _place(process_set: Any) -> int:
    """This rank's number within a process set."""
    engine = named()
    return engine.groups[_group_of(process_set)].index(engine.rank)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """All ranks' tensors one after the other along the first dimension, which may differ between ranks."""
    (result,) = _Allgather.apply(name, process_set, tensor)
    gathered: torch.Tensor = result
    return gathered


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> tuple[torch.Tensor, ...]:
    """`allgather` of several tensors, all or none."""
    if not tensors:
        return ()
    gathered: tuple[torch.Tensor, ...] = _Allgather.apply(name, process_set, *tensors)
    return gathered


# -- broadcast -------------------------------------------------------------------------------------------


def _begin_broadcast(
    tensor: torch.Tensor, root_rank: int, in_place: bool, name: str | None, process_set: Any
) -> int:
    group = _group_of(process_set)
    members = named().groups.get(group, ())
    if root_rank not in members:
        raise ValueError(
            f"root_rank must be one of the process set's ranks {list(members)}, not {root_rank!r}"
        )
    return _single(
        _begin(
            Kind.BROADCAST, name, "broadcast", [tensor], in_place, root=root_rank, group=group, joinable=False
        )
    )


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> int:
    """Start `broadcast`; returns a number for `synchronize`."""
    return _begin_broadcast(tensor, root_rank, False, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> int:
    """Start `broadcast_`; returns a number for `synchronize`."""
    return _begin_broadcast(tensor, root_rank, True, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        averaged = synchronize(allreduce_async(gradients[0], process_set=ctx.process_set))
        if named().rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Rank `root_rank`'s tensor (as the job counts ranks), on every rank; a new tensor."""
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """`broadcast` that overwrites `tensor`, and returns it."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


# -- alltoall --------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> int:
    """Start `alltoall`; `synchronize` gives the rows received, and how many came from each rank."""
    _check_rows([tensor], "alltoall")
    group = _group_of(process_set)
    counts = _splits_of(splits, len(tensor), len(named().groups.get(group, ())))
    number = _begin(
        Kind.ALLTOALL, name, "alltoall", [tensor], False, splits=counts, group=group, joinable=False
    )
    started = _started[number]
    _started[number] = Started(
        started.handle,
        lambda outcome: (started.take(outcome)[0], torch.tensor(outcome.splits, dtype=torch.int32)),
    )
    return number


def _splits_of(splits: Any, rows: int, size: int) -> tuple[int, ...]:
    if splits is None:
        if size and rows % size:
            raise ValueError(f"splits must be given where {rows} rows can't be cut into {size} equal parts")
        return (rows // max(size, 1),) * size
    given = torch.as_tensor(splits)
    if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        raise ValueError(f"splits must be one-dimensional, of integers, not {splits!r}")
    counts = tuple(given.tolist())
    if len(counts) != size or min(counts, default=0) < 0 or sum(counts) > rows:
        raise ValueError(
            f"splits must be {size} numbers of at least 0, one a rank, whose sum is at most the tensor's "
            f"{rows} rows, not {list(counts)}"
        )
    return counts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.rows = process_set, len(tensor)
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back, _ = synchronize(alltoall_async(gradients[0], ctx.received, process_set=ctx.process_set))
        if len(back) < ctx.rows:  # rows that were not sent
            rest = torch.zeros((ctx.rows - len(back), *back.shape[1:]), dtype=back.dtype)
            back = torch.cat([back, rest])
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Send `splits[r]` rows to each rank r (equally many, unless given), and get theirs, in rank order.

    Returns the rows received; with `splits`, also how many came from each rank, int32.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


# -- reducescatter ---------------------------------------------------------------------------------------


def _begin_reducescatter(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: Any,
    scales: tuple[float, float],
) -> int:
    if op not in (Average, Sum, Min, Max, Product):
        raise ValueError(f"op of reducescatter must be Average, Sum, Min, Max or Product, not {op!r}")
    _check_rows(tensors, "reducescatter")
    return _begin(
        Kind.REDUCESCATTER,
        name,
        prefix,
        tensors,
        False,
        op=_OPS[op],
        prescale=float(scales[0]),
        postscale=float(scales[1]),
        group=_group_of(process_set),
        joinable=False,
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`; returns a number for `synchronize`."""
    scales = prescale_factor, postscale_factor
    return _single(_begin_reducescatter("reducescatter", [tensor], name, op, process_set, scales))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`; `synchronize` gives a tuple."""
    scales = prescale_factor, postscale_factor
    return _several(_begin_reducescatter("grouped_reducescatter", tensors, name, op, process_set, scales))


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.options = options
        op, process_set, scales = options
        prefix = "reducescatter" if len(tensors) == 1 else "grouped_reducescatter"
        return tuple(synchronize(_begin_reducescatter(prefix, tensors, name, op, process_set, scales)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, process_set, (before, after) = ctx.options
        if op not in (Average, Sum):
            raise RuntimeError("reducescatter has a gradient for Average and Sum only: detach its result")
        size = len(named().groups[_group_of(process_set)])
        factor = before * after * (size if op == Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *synchronize(grouped_allgather_async(scaled, process_set=process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over all ranks, and keep this rank's share of the rows: uneven, the first get one more."""
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors, all or none."""
    sent = [compression.compress(tensor) for tensor in tensors]
    if not sent:
        return []
    options = op, process_set, (prescale_factor, postscale_factor)
    results = _Reducescatter.apply(options, name, *(tensor for tensor, _ in sent))
    return [compression.decompress(each, context) for each, (_, context) in zip(results, sent, strict=True)]


# -- without tensors -------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """This rank has no more batches: it takes part in the others' allreduces, with nothing, until all join.

    Returns the rank that joined last.
    """
    last = _start(Kind.JOIN, "join", "join").handle.wait().number
    named().names.meet()
    return last


def barrier(process_set: Any = None) -> None:
    """Return when every rank of the process set has called it."""
    _start(Kind.BARRIER, None, "barrier", group=_group_of(process_set)).wait()
