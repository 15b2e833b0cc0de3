"""Torch tensors in named operations: what was started, and the tensors that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from overlap.comm.dtype import DType, Op, check_reducible
from overlap.comm.handle import Handle
from overlap.comm.named import NamedOperations
from overlap.comm.request import Kind, Outcome, Request

from .tensors import bytes_of, dtype_of, values_of


@dataclass(frozen=True)
class Started:
    """An operation that was asked for.

    Attributes:
        take: makes the result of its outcome.
    """

    handle: Handle[Outcome]
    take: Callable[[Outcome], Any]

    def done(self) -> bool:
        return self.handle.done()

    def wait(self) -> Any:
        return self.take(self.handle.wait())


def start(
    named: NamedOperations,
    kind: Kind,
    name: str,
    tensors: Sequence[torch.Tensor],
    in_place: bool = False,
    **request: Any,
) -> Started:
    """Ask for an operation on `tensors`, of any strides; the result is a list of tensors, one each.

    Args:
        in_place: an allreduce or broadcast gives back `tensors` themselves, overwritten.
        request: see `Request`.

    Raises:
        ValueError: a tensor that can't take part, or that `op` has no meaning for.
    """
    dtypes = [_dtype_of(tensor, name, request.get("op")) for tensor in tensors]
    overwrites = kind in (Kind.ALLREDUCE, Kind.ADASUM, Kind.BROADCAST)
    used = [_memory_of(tensor, in_place) if overwrites else values_of(tensor) for tensor in tensors]
    arrays = [_array_of(tensor, dtype) for tensor, dtype in zip(used, dtypes, strict=True)]
    shapes = tuple((dtype, tuple(tensor.shape)) for dtype, tensor in zip(dtypes, used, strict=True))
    handle = named.submit(name, Request(kind, shapes, **request), arrays)

    def take(outcome: Outcome) -> list[torch.Tensor]:
        if not overwrites:
            return [
                _tensor_of(array, like.dtype) for array, like in zip(outcome.arrays, tensors, strict=True)
            ]
        if not in_place:
            return used
        with torch.no_grad():
            for tensor, result in zip(tensors, used, strict=True):
                if not _aliases(tensor, result):
                    tensor.copy_(result)
                elif not tensor.is_inference():
                    # Written without autograd's knowledge: a backward that needs the old values must fail.
                    torch.autograd.graph.increment_version(tensor)
        return list(tensors)

    return Started(handle, take)


def _dtype_of(tensor: torch.Tensor, name: str, op: Op | None) -> DType:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} needs torch tensors, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name!r} needs dense tensors, not {tensor.layout}: use sparse_allreduce_async")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name!r}: a tensor is on {tensor.device}, but only CPU tensors can be sent yet")
    try:
        dtype = dtype_of(f"{name!r}", tensor)
    except TypeError as error:
        raise ValueError(f"Tensor type {tensor.type()} is not supported: {error}") from None
    # An average of integers is truncated, as Horovod's is.
    whole = op is Op.AVERAGE and not (dtype.is_floating or dtype.is_complex) and dtype is not DType.BOOL
    if op is not None and not whole:
        check_reducible(op, dtype, None)
    return dtype


def _memory_of(tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Contiguous memory that the operation may overwrite."""
    plain = tensor.detach()
    if in_place and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain
    return plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _aliases(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr()


def _array_of(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    return bytes_of(tensor).view(dtype.storage).reshape(tuple(tensor.shape))


def _tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
