"""Torch tensors as the engine's memory: element types, bytes, and slices of a bucket."""

from __future__ import annotations

import numpy as np
import torch

from overlap.comm.dtype import DType
from overlap.comm.span import Buffer, Span

_DTYPES = {getattr(torch, dtype.value): dtype for dtype in DType if hasattr(torch, dtype.value)}


def dtype_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> DType:
    """The engine's name of a tensor's element type, or of `dtype`, which it is sent in.

    Raises:
        TypeError: no operation knows it; the message has the tensor's name.
    """
    try:
        return _DTYPES[dtype or tensor.dtype]
    except KeyError:
        allowed = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise TypeError(f"{name} is of {tensor.dtype}, which can't be averaged; allowed: {allowed}") from None


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's memory as bytes; aliases it."""
    # Not reshape: one element is contiguous whatever its stride, and then can't be viewed as bytes.
    view: np.ndarray = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return view


def span_of(tensor: torch.Tensor, dtype: DType) -> Span:
    """A contiguous CPU tensor's memory as the engine's; aliases it."""
    return Span.wrap(bytes_of(tensor).view(dtype.storage), dtype)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values, contiguous, on the CPU, and without lazy conjugation or negation; may alias it."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def make_slice(buffer: Buffer, offset: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over `buffer`'s memory, shaped and laid out as torch would make `like`'s gradient.

    It has a storage of its own, not a view of the bucket's: saving or copying it takes its elements only.
    """
    count = like.numel()
    if count == 0:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    flat = torch.frombuffer(buffer.memory, dtype=dtype, count=count, offset=offset)
    if _is_dense(like):
        return flat.as_strided(like.size(), like.stride())
    return flat.view(like.shape)


def no_rows(parameter: torch.Tensor, dimensions: int) -> torch.Tensor:
    """A sparse gradient of `parameter` without rows, which `dimensions` indices would address."""
    indices = torch.empty((dimensions, 0), dtype=torch.int64)
    values = torch.empty((0, *parameter.shape[dimensions:]), dtype=parameter.dtype)
    empty = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return empty.coalesce()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether strides are those of some order of dimensions without gaps or overlaps (torch's own rule)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
