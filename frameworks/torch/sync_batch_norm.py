"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from . import collectives
from .collectives import Sum, allreduce_async_, synchronize


def _sum(tensor: torch.Tensor, process_set: Any) -> torch.Tensor:
    result: torch.Tensor = synchronize(allreduce_async_(tensor, op=Sum, process_set=process_set))
    return result


def _members(process_set: Any) -> tuple[int, ...]:
    named = collectives.named()
    return named.groups[0 if process_set is None else process_set.process_set_id]


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` whose mean and variance, in training, are those of all ranks' batches together.

    Ranks may have batches of different sizes, or none: each row counts the same. The gradients of weight and
    bias are of this rank's batch, to be averaged with all others.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of `torch.nn.BatchNorm2d`.
        process_set: the ranks that train together; all, unless given.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        tracked = self.training and self.track_running_stats
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not self.training or len(_members(self.process_set)) == 1:
            momentum = self._momentum() if tracked else 0.0
            means, variances = self.running_mean, self.running_var
            if by_batch and not tracked:
                means = variances = None
            return functional.batch_norm(
                input, means, variances, self.weight, self.bias, by_batch, momentum, self.eps
            )
        output, mean, variance = _Normalize.apply(input, self.weight, self.bias, self.eps, self.process_set)
        if tracked and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self._momentum())
                self.running_var.lerp_(variance.to(self.running_var.dtype), self._momentum())
        result: torch.Tensor = output
        return result

    def _momentum(self) -> float:
        if self.momentum is None:
            return 1.0 / float(self.num_batches_tracked or 1)
        return self.momentum


class _Normalize(torch.autograd.Function):
    """Gives the normalized input, the mean, and the unbiased variance of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float, process_set: Any) -> Any:
        channels = input.shape[1]
        wide = torch.float64 if input.dtype is torch.float64 else torch.float32
        rows = input.detach().to(wide).movedim(1, -1).reshape(-1, channels)
        total, mean, squares = _moments(rows, process_set)
        if total <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)} "
                "and none on other ranks"
            )
        inverse = (squares / total + eps).rsqrt()
        shape = [1, channels] + [1] * (input.dim() - 2)
        normal = (input.to(wide) - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.arguments = total, shape, process_set
        output = normal if weight is None else normal * weight.to(wide).view(shape)
        output = output if bias is None else output + bias.to(wide).view(shape)
        variance = squares / (total - 1)
        ctx.mark_non_differentiable(mean, variance)
        # A copy where it would be the saved tensor itself.
        return output.to(input.dtype, copy=output is normal), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, inverse, weight = ctx.saved_tensors
        total, shape, process_set = ctx.arguments
        wide = grad.to(normal.dtype)
        others = [dim for dim in range(grad.dim()) if dim != 1]
        own = torch.stack([wide.sum(others), (wide * normal).sum(others)])
        of_all = _sum(own.clone(), process_set)
        mean_grad, mean_product = (of_all / total).unbind()
        factor = inverse if weight is None else inverse * weight.to(inverse.dtype)
        result = (wide - mean_grad.view(shape) - normal * mean_product.view(shape)) * factor.view(shape)
        of_bias, of_weight = own.unbind() if weight is None else own.to(weight.dtype).unbind()
        grads = result.to(grad.dtype), of_weight, of_bias, None, None
        return tuple(
            each if needed else None for each, needed in zip(grads, ctx.needs_input_grad, strict=True)
        )


def _moments(rows: torch.Tensor, process_set: Any) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Count, mean, and sum of squared distances from the mean, of the rows of all ranks.

    Combined from each rank's own (Chan, Golub and LeVeque, 1979): a sum of squares would lose a variance that
    is small beside the mean. An allreduce of a table, of which each rank fills one row, and not an allgather:
    ranks that have joined take part in it.
    """
    count, channels = rows.shape
    table = rows.new_zeros((len(_members(process_set)), 2 * channels))
    counts = torch.zeros(len(table), dtype=torch.float64)
    place = _members(process_set).index(collectives.named().rank)
    if count:
        mean = rows.mean(0)
        table[place] = torch.cat([mean, (rows - mean).square().sum(0)])
        counts[place] = count
    handles = [allreduce_async_(each, op=Sum, process_set=process_set) for each in (table, counts)]
    for handle in handles:
        synchronize(handle)
    total = float(counts.sum())
    means, squares = table.split(channels, 1)
    weights = counts.to(rows.dtype).view(-1, 1)
    mean = (means * weights).sum(0) / max(total, 1.0)
    return total, mean, squares.sum(0) + ((means - mean).square() * weights).sum(0)
