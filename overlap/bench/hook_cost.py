"""What a hook costs, the copy of its gradient included: 10,000 parameters of one element, hooked and not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import overlap

if TYPE_CHECKING:
    from overlap.launch import Ranks

PARAMETERS = 10_000
TARGET_US = 2.0


def report(ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Run the benchmark; a record that JSON can hold."""
    results = ranks.run(_measure, rounds)
    plain, attach = (min(result[name] for result in results) for name in (0, 1))
    return {
        "parameters": PARAMETERS,
        "plain_ms": plain * 1e3,
        "attach_ms": attach * 1e3,
        "hook_us": (attach - plain) / PARAMETERS * 1e6,
        "target_us": TARGET_US,
    }


def _measure(rounds: int) -> tuple[float, float]:
    """In each rank: the shortest backward without hooks and with them, which alternate; in seconds."""
    import torch

    from .models import Scalars

    overlap.init()
    from overlap import runtime

    plain, hooked = Scalars(PARAMETERS), Scalars(PARAMETERS)
    attached = overlap.attach(hooked)
    shortest = {plain: float("inf"), hooked: float("inf")}
    batch = torch.ones(PARAMETERS)
    for number in range(3 + 5 * rounds):
        for model in shortest:
            model.zero_grad()
            loss = model(batch).sum()
            runtime.engine().communicator.barrier()
            start_s = time.perf_counter()
            loss.backward()
            if number >= 3:
                shortest[model] = min(shortest[model], time.perf_counter() - start_s)
    attached.detach()
    overlap.shutdown()
    return shortest[plain], shortest[hooked]
