"""Makes the ranks' models equal at attach: compares what they are, then copies rank 0's values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from overlap.comm.backends.base import Communicator
from overlap.comm.errors import MismatchError
from overlap.comm.objects import allgather_bytes, are_equal
from overlap.comm.span import Span

from .tensors import bytes_of, values_of


def check_same_model(model: torch.nn.Module, options: dict[str, Any], communicator: Communicator) -> None:
    """Collective: compare names, shapes, types and frozenness of all parameters and buffers, and options.

    Raises:
        MismatchError: on every rank, with the first difference, both values and the ranks.
    """
    description = [["option", name, repr(value)] for name, value in options.items()]
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            state = "trainable" if tensor.requires_grad else "frozen"
            shape = str(tuple(tensor.shape))
            description.append([kind, name, shape, str(tensor.dtype).removeprefix("torch."), state])
    data = json.dumps(description).encode()
    if are_equal(communicator, data):
        return
    descriptions = [json.loads(each) for each in allgather_bytes(communicator, data)]
    other = next(rank for rank, each in enumerate(descriptions) if each != descriptions[0])
    raise MismatchError(_first_difference(descriptions[0], descriptions[other], other))


def _first_difference(first: list[list[str]], second: list[list[str]], rank: int) -> str:
    for mine, theirs in zip(first, second, strict=False):
        if mine == theirs:
            continue
        if mine[:2] != theirs[:2]:
            fault = f"{mine[0]} {mine[1]!r} on rank 0 is where rank {rank} has {theirs[0]} {theirs[1]!r}"
        else:
            fields = ("value",) if mine[0] == "option" else ("shape", "dtype", "state")
            field, a, b = next(
                (field, a, b) for field, a, b in zip(fields, mine[2:], theirs[2:], strict=True) if a != b
            )
            fault = f"{mine[0]} {mine[1]!r} has {field} {a} on rank 0 but {b} on rank {rank}"
        return f"ranks attach different models: {fault}. Build the same model on every rank before attach"
    longer, shorter, extra = (0, rank, first) if len(first) > len(second) else (rank, 0, second)
    kind, name = extra[min(len(first), len(second))][:2]
    return (
        f"ranks attach different models: {kind} {name!r} is on rank {longer} but not on rank {shorter}. "
        "Build the same model on every rank before attach"
    )


def broadcast_state(model: torch.nn.Module, communicator: Communicator, root: int = 0) -> None:
    """Collective: rank `root`'s parameters and buffers, bit for bit, into every rank's tensors, in place."""
    broadcast_tensors([*model.parameters(), *model.buffers()], communicator, root)


def broadcast_tensors(tensors: Iterable[torch.Tensor], communicator: Communicator, root: int) -> None:
    """Collective: rank `root`'s values, bit for bit, into every rank's tensors, in place."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            values = values_of(tensor)
            memory = bytes_of(values)
            communicator.broadcast(Span.wrap(memory), root)
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)
