"""Python objects sent between ranks by named operations."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from overlap.comm.dtype import DType
from overlap.comm.named import NamedOperations
from overlap.comm.request import WORLD, Kind, Outcome, Request


def broadcast_object(
    named: NamedOperations, obj: Any, root: int, name: str | None = None, group: int = WORLD
) -> Any:
    """`root`'s object, on every rank of the group: there itself, elsewhere a copy made by cloudpickle.

    Raises:
        ValueError: `root`, as the job counts ranks, is not in the group.
        TypeError: it can't be pickled (on all ranks).
    """
    members = named.groups.get(group, ())
    if root not in members:
        raise ValueError(f"root_rank must be one of {list(members)}, not {root!r}")
    mine, data, cause = named.rank == root, b"", None
    if mine:
        try:
            data = cloudpickle.dumps(obj)
        except Exception as error:
            cause = error
            data = f"{type(obj).__name__} can't be pickled: {error}".encode()
    head = np.array([len(data), cause is not None], np.int64)
    _run(named, name, "broadcast_object", "sz", Kind.BROADCAST, head, group, root)
    content = np.frombuffer(data, np.uint8).copy() if mine else np.empty(int(head[0]), np.uint8)
    _run(named, name, "broadcast_object", "t", Kind.BROADCAST, content, group, root)
    if head[1]:
        raise TypeError(f"rank {root}'s {content.tobytes().decode(errors='replace')}") from cause
    return obj if mine else cloudpickle.loads(content.tobytes())


def allgather_object(
    named: NamedOperations, obj: Any, name: str | None = None, group: int = WORLD
) -> list[Any]:
    """The objects of all ranks of the group, in their order; copies made by cloudpickle.

    Raises:
        TypeError: one can't be pickled (on all ranks).
    """
    fine, cause = True, None
    try:
        data = cloudpickle.dumps(obj)
    except Exception as error:
        fine, cause = False, error
        data = f"{type(obj).__name__} can't be pickled: {error}".encode()
    heads = np.array([[len(data), not fine]], np.int64)
    bytes_ = np.frombuffer(data, np.uint8).copy()
    table = _run(named, name, "allgather_object", "sz", Kind.ALLGATHER, heads, group).arrays[0]
    content = _run(named, name, "allgather_object", "t", Kind.ALLGATHER, bytes_, group).arrays[0]
    ends = np.cumsum(table[:, 0])
    pieces = [
        content[end - count : end].tobytes() for count, end in zip(table[:, 0].tolist(), ends, strict=True)
    ]
    for place, failed in enumerate(table[:, 1]):
        if failed:
            rank = named.groups[group][place]
            raise TypeError(f"rank {rank}'s {pieces[place].decode(errors='replace')}") from cause
    return [cloudpickle.loads(piece) for piece in pieces]


def _run(
    named: NamedOperations,
    name: str | None,
    prefix: str,
    part: str,
    kind: Kind,
    array: np.ndarray,
    group: int,
    root: int = -1,
) -> Outcome:
    request = Request(kind, ((DType.of(array), array.shape),), root=root, group=group, joinable=False)
    if name is not None:
        return named.submit(f"{name}.{part}", request, [array]).wait()
    submit = named.submit
    return named.names.give(f"{prefix}.{part}", lambda full: submit(full, request, [array]), group).wait()
