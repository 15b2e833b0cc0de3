"""`overlap bench step`: a training step alone, attached, and in DistributedDataParallel, side by side."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import overlap
from overlap.comm.backends.base import Communicator
from overlap.comm.stats import Stats

from .gloo import process_group
from .job import Timing

if TYPE_CHECKING:
    from overlap.launch import Ranks

    from .models import Workload

# Model -> (steps a round unless given, target: times the step without communication).
MODELS = {"small": (25, 1.12), "wide": (5, 1.20), "conv": (5, 1.08)}
VARIANTS = ("plain", "attach", "ddp")
_WARM_UP = 3


@dataclass
class Samples:
    """What one rank measured of one model, by variant, in seconds a step.

    Attributes:
        wall_s: of each step.
        cpu_s: of all threads, a round's mean each.
    """

    wall_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    stats: Stats = field(default_factory=Stats)


def report(ranks: Ranks, models: Sequence[str], steps: int | None, rounds: int) -> list[dict[str, Any]]:
    """Run the benchmark, all models in one job; a record a model that JSON can hold, in milliseconds."""
    lengths = [steps or MODELS[name][0] for name in models]
    results = ranks.run(_measure, list(models), lengths, rounds)
    return [_row(name, [result[number] for result in results]) for number, name in enumerate(models)]


def _row(model: str, results: Sequence[Samples]) -> dict[str, Any]:
    wall = {
        name: Timing.of((sample for rank in results for sample in rank.wall_s[name]), 1e3)
        for name in VARIANTS
    }
    cpu = {name: median(sample for rank in results for sample in rank.cpu_s[name]) for name in VARIANTS}
    plain, attach, ddp = (wall[name].median for name in VARIANTS)
    row: dict[str, Any] = {f"{name}_ms": asdict(timing) for name, timing in wall.items()}
    row |= {f"{name}_cpu_ms": seconds * 1e3 for name, seconds in cpu.items()}
    stats = [rank.stats for rank in results]
    return {
        "model": model,
        **row,
        "attach_to_plain": attach / plain,
        "ddp_to_plain": ddp / plain,
        "attach_to_ddp": attach / ddp,
        "attach_cpu_to_plain": cpu["attach"] / cpu["plain"],
        "target": MODELS[model][1],
        "buckets": stats[0].buckets,
        **{name: median(getattr(each, name) for each in stats) for name in ("hidden_ms", "exposed_ms")},
    }


def _measure(models: Sequence[str], lengths: Sequence[int], rounds: int) -> list[Samples]:
    """In each rank: time each model's three variants."""
    overlap.init()
    from overlap import runtime

    communicator = runtime.engine().communicator
    with process_group(communicator):
        samples = [
            _model(communicator, name, length, rounds) for name, length in zip(models, lengths, strict=True)
        ]
    overlap.shutdown()
    return samples


def _model(communicator: Communicator, name: str, length: int, rounds: int) -> Samples:
    import torch

    from .models import WORKLOADS

    torch.manual_seed(1)
    workload = WORKLOADS[name]()
    attached_model, ddp_model = copy.deepcopy(workload.model), copy.deepcopy(workload.model)
    attached = overlap.attach(attached_model)
    steps = {
        "plain": _step(workload, workload.model),
        "attach": _step(workload, attached_model),
        "ddp": _step(workload, torch.nn.parallel.DistributedDataParallel(ddp_model)),
    }
    samples = Samples()
    for step in steps.values():
        _round(communicator, step, _WARM_UP)
    for number in range(rounds):
        for place in range(len(VARIANTS)):
            # A round starts with another variant each time, so that none always follows the same one.
            variant = VARIANTS[(number + place) % len(VARIANTS)]
            wall_s, cpu_s = _round(communicator, steps[variant], length)
            samples.wall_s[variant] += wall_s
            samples.cpu_s[variant].append(cpu_s)
    samples.stats = attached.stats()
    attached.detach()
    return samples


def _step(workload: Workload, model: Any) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _round(communicator: Communicator, step: Callable[[], None], length: int) -> tuple[list[float], float]:
    """Seconds of each step, and the mean CPU seconds of a step."""
    communicator.barrier()
    wall_s, cpu_start_s = [], time.process_time()
    for _ in range(length):
        start_s = time.perf_counter()
        step()
        wall_s.append(time.perf_counter() - start_s)
    return wall_s, (time.process_time() - cpu_start_s) / length
