"""Random programs: whatever model and loop hypothesis draws, ranks are equal in bits and as one process is.

A program is data: each rank runs it twice, attached on its part of every batch, and plain on all of them.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn
from torch.utils.checkpoint import checkpoint

import overlap

WIDTH, BATCH = 4, 2
PROGRAMS = 100  # on 2 ranks, and as many on 3


@dataclass(frozen=True)
class Layer:
    """One layer of a drawn model.

    Attributes:
        module: which of the model's modules it applies; two layers with one number share it.
        dtype: of that module, which the first layer that names it decides.
        kept: "store", or which kind of checkpoint recomputes it.
        only: the rank that uses it; the others skip it. None: all do.
    """

    module: int
    dtype: str
    kept: str
    only: int | None


@dataclass(frozen=True)
class Step:
    """One step of a drawn loop.

    Attributes:
        backwards: of each, whether it averages (the last one before the step always does).
        frozen: modules that are frozen in it.
        in_place: gradients are zeroed instead of dropped before it.
        idle: the rank that runs no backward at all; None for none.
        weights: of each rank, or none; a rank whose backward reaches no parameter has none.
    """

    backwards: tuple[bool, ...]
    frozen: frozenset[int]
    in_place: bool
    idle: int | None
    weights: tuple[int, ...] | None


def programs(size: int) -> st.SearchStrategy[tuple[tuple[Layer, ...], tuple[Step, ...], float]]:
    one_rank = st.one_of(st.none(), st.none(), st.integers(0, size - 1))
    layers = st.builds(
        Layer,
        st.integers(0, 3),
        st.sampled_from(["float64", "float64", "float32"]),
        st.sampled_from(["store", "store", "reentrant", "non-reentrant"]),
        one_rank,
    )
    steps = st.builds(
        Step,
        st.lists(st.booleans(), max_size=2).map(tuple),
        st.frozensets(st.integers(0, 3), max_size=2),
        st.booleans(),
        one_rank,
        st.one_of(st.none(), st.none(), st.tuples(*[st.integers(0, 3)] * size)),
    )
    return st.tuples(
        st.lists(layers, min_size=1, max_size=5).map(tuple),
        st.lists(steps, min_size=2, max_size=4).map(tuple),
        st.sampled_from([4.0, 1e-4, 1e-5]),  # bucket_mb: all in one, several, one each
    )


class Drawn(nn.Module):
    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.inner = nn.ModuleDict()
        for layer in layers:
            if str(layer.module) not in self.inner:
                module = nn.Linear(WIDTH, WIDTH, dtype=getattr(torch, layer.dtype))
                self.inner[str(layer.module)] = module

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for layer in self.layers:
            if layer.only not in (None, rank):
                continue
            module = self.inner[str(layer.module)]

            def apply(y: torch.Tensor, module: Any = module) -> torch.Tensor:
                return module(y.to(module.weight.dtype)).tanh()

            x = (
                apply(x)
                if layer.kept == "store"
                else checkpoint(apply, x, use_reentrant=layer.kept == "reentrant")
            )
        return x.double().square().sum()


def run_program(layers: tuple[Layer, ...], steps: tuple[Step, ...], bucket_mb: float) -> str:
    """In each rank; returns a digest of what it ends with."""
    overlap.init()
    rank, size = overlap.rank(), overlap.size()
    torch.manual_seed(rank)
    model = Drawn(layers)
    attached = overlap.attach(model, bucket_mb=bucket_mb)
    one = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.5) for each in (model, one)]
    exact = all(layer.dtype == "float64" for layer in layers)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if exact else {"rtol": 1e-3, "atol": 1e-5}
    for number, step in enumerate(steps):
        for each, optimizer in zip((model, one), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=not step.in_place)
            for name, module in each.inner.items():
                module.requires_grad_(int(name) not in step.frozen)
        if step.weights is not None:
            reaching = [_reaches_a_parameter(layers, step, each) for each in range(size)]
            weights = tuple(w * reaches for w, reaches in zip(step.weights, reaching, strict=True))
            step = replace(step, weights=weights)
        _backwards(step, number, attached, model, one, rank, size)
        # The optimizer closes the step: before it an idle rank has nothing.
        for optimizer in optimizers:
            optimizer.step()
        for (name, mine), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), (number, name)
            if mine.grad is not None:
                torch.testing.assert_close(
                    mine.grad, theirs.grad, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
            torch.testing.assert_close(mine, theirs, **tolerance)
    attached.detach()
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def _reaches_a_parameter(layers: tuple[Layer, ...], step: Step, rank: int) -> bool:
    return any(layer.only in (None, rank) and layer.module not in step.frozen for layer in layers)


def _backwards(
    step: Step, number: int, attached: Any, model: Drawn, one: Drawn, rank: int, size: int
) -> None:
    averaging = [*step.backwards, True]
    attached.weight = None if step.weights is None else step.weights[rank]
    pending: list[list[torch.Tensor]] = [[]]  # losses of the plain run, a list for each average
    for turn, averages in enumerate(averaging):
        inputs = []
        for each in range(size):
            torch.manual_seed(10_000 * number + 100 * turn + each)
            inputs.append(torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True))
        if rank != step.idle:
            loss = model(inputs[rank], rank)
            if averages:
                loss.backward()
            else:
                with attached.no_sync():
                    loss.backward()
        for each in range(size):
            if each != step.idle:
                weight = 1 if step.weights is None else step.weights[each]
                pending[-1].append((one(inputs[each], each), weight, each))
        if averages:
            _plain_average(pending[-1], step, size)
            pending.append([])


def _plain_average(losses: list[Any], step: Step, size: int) -> None:
    total = size if step.weights is None else sum(weight for _, weight, _ in losses)
    summed = sum(loss * weight for loss, weight, _ in losses)
    if losses:
        (summed / (total or 1)).backward()


@pytest.mark.parametrize("size", [2, 3])
def test_any_program_equals_one_process(ranks, size):
    @settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(programs(size))
    def check(program):
        results = ranks(size).run(run_program, *program, timeout_s=30)
        assert len(set(results)) == 1

    check()
