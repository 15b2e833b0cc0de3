"""Python objects sent between ranks, as Horovod's faces have it."""

from __future__ import annotations

from typing import Any

from overlap.comm import exchange

from . import runtime
from .process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`root_rank`'s object, on every rank of the set: there itself, elsewhere a copy made by cloudpickle.

    Raises:
        ValueError: `root_rank`, as the job counts ranks, is not in the set.
        TypeError: it can't be pickled (on all ranks).
    """
    return exchange.broadcast_object(runtime.engine().named, obj, root_rank, name, process_set.number())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the set, in their order; copies made by cloudpickle.

    Raises:
        TypeError: one can't be pickled (on all ranks).
    """
    return exchange.allgather_object(runtime.engine().named, obj, name, process_set.number())
