"""Thousands of steps whose used parameters change all the time: same bits on all ranks, and nothing grows."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.frameworks.torch.models import usage

STEPS = 20_000

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def train(steps: int) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Returns this rank's parameters at the end, and (resident bytes, descriptors, threads) on the way."""
    import random

    import torch

    import overlap

    overlap.init()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))
    attached = overlap.attach(layers, bucket_mb=0.03)
    optimizer = torch.optim.SGD(layers.parameters(), 1e-3)
    ours = random.Random(overlap.rank())
    marks = []
    for step in range(steps):
        used = ours.sample(range(8), ours.randint(1, 8))
        x = torch.randn(8, 64)
        for index in used:
            x = torch.tanh(layers[index](x))
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        if step % 7 == 0:
            with attached.no_sync():
                x.mean().backward(retain_graph=True)
        x.square().mean().backward()
        optimizer.step()
        if step % (steps // 10) == 0:
            marks.append(usage())
    attached.detach()
    return b"".join(p.detach().numpy().tobytes() for p in layers.parameters()), marks


def test_long_training_stays_equal_and_small(pools):
    (first, marks), (second, _) = pools(2).run(train, STEPS, timeout_s=1700)
    assert first == second
    # The first mark precedes all warm-up.
    settled, last = marks[2], marks[-1]
    assert last[0] <= settled[0] + 20e6
    assert last[1:] == settled[1:]
