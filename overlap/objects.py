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
    return exchange.broadcast_object(runtime.engine().named, obj, root_rank, name, _number_of(process_set))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the set, in their order; copies made by cloudpickle.

    Raises:
        TypeError: one can't be pickled (on all ranks).
    """
    return exchange.allgather_object(runtime.engine().named, obj, name, _number_of(process_set))


def _number_of(process_set: ProcessSet) -> int:
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered: pass it to init() or add_process_set() before")
    return process_set.process_set_id
