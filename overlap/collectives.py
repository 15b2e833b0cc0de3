"""Collectives on a numpy array, a torch tensor or a number; the same kind comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlap.comm.dtype import DType, Op, check_reducible
from overlap.comm.request import WORLD, Kind, Outcome, Request

from . import runtime
from .process_sets import ProcessSet

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = {Average: Op.AVERAGE, Sum: Op.SUM, Min: Op.MIN, Max: Op.MAX, Product: Op.PRODUCT}


def allreduce(
    x: Any,
    op: int = Average,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce `x` over all ranks: Average, Sum, Min, Max, Product or Adasum. Collective.

    Args:
        x: a numpy array, a torch tensor on the CPU, or a number; the same shape and dtype on every rank. It
            is not changed; gradients don't flow through (those of `overlap.torch` do).
        name: the same on all ranks; operations with names may be started in any order.
        process_set: the ranks that take part; all, unless given.

    Returns:
        of the kind of `x`: `postscale_factor` x the reduction of `prescale_factor` x `x`.

    Raises:
        ValueError: `op` has no meaning for this dtype (an average of integers: use Sum).
        TypeError: `x` is none of these.
        MismatchError: ranks differ in what they ask for; the same on all.
        PeerLost, StallError: a rank is missing.
    """
    if op not in range(6):
        raise ValueError(f"op must be one of overlap.Average, Sum, Adasum, Min, Max, Product, not {op!r}")
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    if op == Adasum:
        return _run(Kind.ADASUM, x, name, process_set, **scales)
    return _run(Kind.ALLREDUCE, x, name, process_set, op=_OPS[op], **scales)


def allgather(x: Any, *, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """All ranks' `x`, one after the other along the first dimension, which may differ. Collective.

    A number counts as an array of one, so that the result is an array of one a rank. Else as `allreduce`.
    """
    return _run(Kind.ALLGATHER, _with_rows(x), name, process_set)


def broadcast(
    x: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Rank `root_rank`'s `x` (as the job counts ranks), of the same shape and dtype on all. Collective."""
    members = runtime.engine().named.groups.get(_group_of(process_set), ())
    if root_rank not in members:
        raise ValueError(f"root_rank must be one of the ranks {list(members)}, not {root_rank!r}")
    return _run(Kind.BROADCAST, x, name, process_set, root=int(root_rank))


def alltoall(
    x: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send `splits[r]` rows of `x` to each rank r (equally many unless given), and get theirs. Collective."""
    x = _with_rows(x)
    size = len(runtime.engine().named.groups.get(_group_of(process_set), ()))
    rows = len(x)
    counts = tuple(int(count) for count in splits) if splits is not None else (rows // max(size, 1),) * size
    if (
        len(counts) != size
        or min(counts, default=0) < 0
        or sum(counts) > rows
        or (splits is None and rows % size)
    ):
        raise ValueError(f"splits must be {size} numbers of rows, at most {rows} in all, not {splits!r}")
    return _run(Kind.ALLTOALL, x, name, process_set, splits=counts)


def reducescatter(
    x: Any, op: int = Average, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Reduce `x`, and keep this rank's share of its rows: uneven, the first get one more. Collective."""
    if op not in _OPS:
        raise ValueError(f"op must be one of overlap.Average, Sum, Min, Max, Product, not {op!r}")
    return _run(Kind.REDUCESCATTER, _with_rows(x), name, process_set, op=_OPS[op])


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called it."""
    named = runtime.engine().named
    request = Request(Kind.BARRIER, group=_group_of(process_set))
    named.names.give("overlap.barrier", lambda full: named.submit(full, request), request.group).wait()


def join() -> int:
    """Take part in the others' collectives, with nothing, until all have joined; returns the last rank."""
    named = runtime.engine().named
    last = named.submit("join", Request(Kind.JOIN)).wait().number
    named.names.meet()
    return last


def _group_of(process_set: ProcessSet | None) -> int:
    return WORLD if process_set is None else process_set.number()


def _with_rows(x: Any) -> Any:
    if isinstance(x, (bool, int, float, complex, np.generic)):
        return np.array([x])
    if getattr(x, "ndim", 1) == 0:
        raise ValueError("x needs at least one dimension: use x.reshape(1)")
    return x


def _run(kind: Kind, x: Any, name: str | None, process_set: ProcessSet | None, **request: Any) -> Any:
    named = runtime.engine().named
    request["group"] = _group_of(process_set)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from overlap.frameworks.torch.started import start

        _check_average(x.dtype.is_floating_point or x.dtype.is_complex, request, x.dtype)

        def start_one(full: str) -> Any:
            return start(named, kind, full, [x], **request)
    else:
        array = _array_of(x)
        dtype = DType.of(array)
        _check_average(dtype.is_floating or dtype.is_complex, request, dtype.value)
        if request.get("op") is not None:
            check_reducible(request["op"], dtype, None)
        asked = Request(kind, ((dtype, array.shape),), **request)

        def start_one(full: str) -> Any:
            return _Array(named.submit(full, asked, [array]))

    prefix = f"overlap.{kind.value}"
    if name is None:
        started = named.names.give(prefix, start_one, request["group"])
    else:
        started = start_one(f"{prefix}.{name}")
    (result,) = started.wait()
    return result if isinstance(x, np.ndarray) or not isinstance(result, np.ndarray) else _like(x, result)


class _Array:
    """An operation on an array that was started."""

    def __init__(self, handle: Any) -> None:
        self.wait: Callable[[], Sequence[np.ndarray]] = lambda: _arrays(handle.wait())


def _arrays(outcome: Outcome) -> Sequence[np.ndarray]:
    return outcome.arrays


def _array_of(x: Any) -> np.ndarray:
    """A contiguous copy that the operation may overwrite."""
    if not isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)):
        raise TypeError(f"x must be a numpy array, a torch tensor or a number, not {type(x).__name__}")
    array = np.array(x, order="C")
    if array.dtype.byteorder not in "=|":
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _check_average(fine: bool, request: dict[str, Any], dtype: Any) -> None:
    if request.get("op") is Op.AVERAGE and not fine:
        raise ValueError(
            f"op=overlap.Average is not defined for {dtype}: use op=overlap.Sum and divide as you want"
        )


def _like(x: Any, result: np.ndarray) -> Any:
    """A number where a number was given."""
    return result.item() if isinstance(x, (bool, int, float, complex)) else result[()]
