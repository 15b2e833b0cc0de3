"""Models and measures that several test files use."""

from __future__ import annotations

from torch import nn


def linear(inputs: int = 1, value: float = 1.0) -> nn.Linear:
    """A layer with one output and no bias."""
    layer = nn.Linear(inputs, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def usage() -> tuple[int, int, int]:
    """This rank's resident bytes, descriptors and threads."""
    import gc

    import psutil

    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), process.num_threads()
