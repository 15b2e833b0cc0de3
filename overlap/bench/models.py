"""The models whose steps are timed: many small layers, few wide ones, and a convolutional net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model and a batch for it."""

    model: nn.Module
    batch: torch.Tensor

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Of a forward pass of `model` (this one, a copy or a wrapped one) over the batch."""
        output: torch.Tensor = model(self.batch)
        return output.square().mean()


def small() -> Workload:
    """200 linear layers of 91x91 with ReLU, batch 64: the cost of hooks and hand-overs."""
    layers: list[nn.Module] = []
    for _ in range(200):
        linear = nn.Linear(91, 91)
        # Torch's own initialization lets signals fade to denormal numbers, which are slow, over 200 layers.
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return Workload(nn.Sequential(*layers), torch.randn(64, 91))


def wide() -> Workload:
    """6 linear layers of 2048x2048, batch 64: 100 MB of gradients for little computation."""
    return Workload(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), torch.randn(64, 2048))


def conv() -> Workload:
    """4 stages of 2 convolutions with batch norm, 64 to 512 channels, batch 8 of 3x64x64."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512):
        for stride in (2, 1):
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return Workload(nn.Sequential(*layers), torch.randn(8, 3, 64, 64))


class Scalars(nn.Module):
    """Parameters of one element each: nearly all that a backward does is to call hooks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scalars = nn.ParameterList(torch.zeros(1) for _ in range(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.scalars)) * batch


WORKLOADS: dict[str, Callable[[], Workload]] = {"small": small, "wide": wide, "conv": conv}
