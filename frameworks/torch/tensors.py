"""Torch tensors as the engine's memory: element types, bytes, and slices of a bucket."""

from __future__ import annotations

import numpy as np
import torch

from overlap.comm.dtype import DType
from overlap.comm.span import Buffer, Span

_DTYPES = {getattr(torch, dtype.value): dtype for dtype in DType if hasattr(torch, dtype.value)}


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """The engine's name of a tensor's element type.

    Raises:
        TypeError: no operation knows it; the message has the tensor's name.
    """
    try:
        return _DTYPES[tensor.dtype]
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


def make_slice(buffer: Buffer, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor over `buffer`'s memory, shaped and laid out as torch would make `like`'s gradient.

    It has a storage of its own, not a view of the bucket's: saving or copying it takes its elements only.
    """
    count = like.numel()
    if count == 0:
        return torch.empty_like(like, requires_grad=False)
    flat = torch.frombuffer(buffer.memory, dtype=like.dtype, count=count, offset=offset)
    if _is_dense(like):
        return flat.as_strided(like.size(), like.stride())
    return flat.view(like.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether strides are those of some order of dimensions without gaps or overlaps (torch's own rule)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
