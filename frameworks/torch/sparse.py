"""Sparse gradients (embeddings): the ranks' rows are gathered, and added where they meet."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from overlap.comm.backends.base import Communicator
from overlap.comm.dtype import Op
from overlap.comm.span import Span

from .tensors import dtype_of, no_rows, span_of


class _Kind(IntEnum):
    NONE = 0
    SPARSE = 1
    DENSE = 2


def average_sparse(
    communicator: Communicator,
    gradient: torch.Tensor | None,
    parameter: torch.Tensor,
    divisor: float | None,
) -> torch.Tensor:
    """Collective: the average of gradients that may be sparse, dense or missing on each rank.

    Args:
        gradient: this rank's; None counts as zeros. It is not changed.
        divisor: what the sum is divided by; the number of ranks unless given.

    Returns:
        A new tensor: sparse and coalesced, or dense where some rank's gradient is (a tied weight).
    """
    table = np.zeros((communicator.size, 3), np.int64)
    if gradient is not None:
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            table[communicator.rank] = _Kind.SPARSE, len(gradient.values()), gradient.sparse_dim()
        else:
            table[communicator.rank, 0] = _Kind.DENSE
    communicator.allgather(Span.wrap(table), [3] * communicator.size)
    kinds, counts, dimensions = table.T.tolist()
    if _Kind.DENSE in kinds:
        return _average_dense(communicator, gradient, parameter, divisor)
    if gradient is None:
        gradient = no_rows(parameter, max(dimensions))
    return _add_rows(communicator, gradient, counts, divisor or communicator.size)


def _average_dense(
    communicator: Communicator,
    gradient: torch.Tensor | None,
    parameter: torch.Tensor,
    divisor: float | None,
) -> torch.Tensor:
    dense = torch.zeros(parameter.shape, dtype=parameter.dtype)
    if gradient is not None:
        dense.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
    communicator.allreduce(span_of(dense, dtype_of("gradient", dense)), Op.AVERAGE, divisor)
    return dense


def _add_rows(
    communicator: Communicator, gradient: torch.Tensor, counts: list[int], divisor: float
) -> torch.Tensor:
    start, total = sum(counts[: communicator.rank]), sum(counts)
    mine = slice(start, start + counts[communicator.rank])
    values = torch.empty((total, *gradient.values().shape[1:]), dtype=gradient.dtype)
    values[mine] = gradient.values()
    indices = torch.empty((total, gradient.sparse_dim()), dtype=torch.int64)
    indices[mine] = gradient.indices().T
    for each in (indices, values):
        width = each[0].numel() if total else 0
        span = span_of(each, dtype_of("gradient", each))
        communicator.allgather(span, [count * width for count in counts])
    summed = torch.sparse_coo_tensor(indices.T, values, gradient.shape, check_invariants=False).coalesce()
    return (summed / divisor).coalesce()
