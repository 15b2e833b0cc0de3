"""A named operation as one rank asks for it, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from overlap.comm.dtype import DType, Op

Shape: TypeAlias = tuple[int, ...]

# The group of all ranks of the job.
WORLD = 0


class Kind(Enum):
    ALLREDUCE = "allreduce"
    ADASUM = "Adasum allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_GROUP = "add_process_set"
    REMOVE_GROUP = "remove_process_set"
    DUPLICATE = "open a channel"  # a communicator of the group, for somebody's own use


@dataclass(frozen=True)
class Request:
    """What a rank asks for; compared between the ranks of the group that take part.

    Attributes:
        tensors: dtype and shape of each; several are done as one, and are all or none.
        op: of an allreduce or reducescatter; AVERAGE of integers is truncated towards zero.
        prescale, postscale: what tensors are multiplied by before and after the reduction.
        root: of a broadcast, as the job counts ranks; of REMOVE_GROUP, the group.
        splits: of an alltoall, how many rows go to each rank; of ADD_GROUP, its ranks.
        device: where the tensors are.
        group: a process set's number.
        joinable: whether ranks that have joined take part with nothing; otherwise the operation fails
            while there are any (allreduces never do).
    """

    kind: Kind
    tensors: tuple[tuple[DType, Shape], ...] = ()
    op: Op | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    group: int = WORLD
    joinable: bool = True


@dataclass(frozen=True)
class Outcome:
    """What an operation gave this rank.

    Attributes:
        arrays: one a tensor, in the storage type of its dtype. Of an allreduce, Adasum or broadcast those
            that were given, changed in place; otherwise new ones, shaped.
        splits: of an alltoall, how many rows came from each rank.
        number: of a join, the rank that joined last; of ADD_GROUP, the group's number.
        communicator: of DUPLICATE.
    """

    arrays: tuple[np.ndarray, ...] = ()
    splits: tuple[int, ...] = ()
    number: int = -1
    communicator: Any = field(default=None, repr=False)
