"""Misuse of `overlap.attach` is caught at the call, by name, on every rank."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import overlap


def error_of(build, **options):
    """The text of the error that attaching `build(rank)` raises on this rank; then overlap still works."""
    overlap.init()
    try:
        overlap.attach(build(overlap.rank()), **options)
    except (ValueError, TypeError, overlap.MismatchError) as error:
        layer = nn.Linear(1, 1)
        overlap.attach(layer)
        layer(torch.ones(1)).sum().backward()
        return f"{type(error).__name__}: {error}"
    return "no error"


class Two(nn.Module):
    def __init__(self, p, q):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.zeros(p)), nn.Parameter(torch.zeros(q))


def c037(rank):
    model = nn.Linear(2, 2)
    return model.requires_grad_(rank == 0)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (c037, "parameter 'weight' has state trainable on rank 0 but frozen on rank 1"),
        (
            lambda rank: Two(*[(2, 3), (3, 2)][:: 1 - 2 * rank]),
            r"parameter 'p' has shape \(2, 3\) on rank 0 but \(3, 2\) on rank 1",
        ),
        (
            lambda rank: nn.Linear(1, 1, dtype=[torch.float32, torch.float64][rank]),
            "'weight' has dtype float32 on rank 0 but float64 on rank 1",
        ),
        (lambda rank: nn.Linear(1, 1, bias=rank == 0), "parameter 'bias' is on rank 0 but not on rank 1"),
        (lambda rank: nn.Linear(1, 1, bias=rank == 1), "parameter 'bias' is on rank 1 but not on rank 0"),
        (
            lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(1, 1)}),
            "parameter 'a.weight' on rank 0 is where rank 1 has parameter 'b.weight'",
        ),
        (
            lambda rank: nn.BatchNorm1d(2, track_running_stats=rank == 0),
            "buffer 'running_mean' is on rank 0 but not on rank 1",
        ),
    ],
)
def test_models_that_differ(ranks, build, text):
    first, second = ranks(2).run(error_of, build)
    assert first == second
    assert first.startswith("MismatchError: ranks attach different models: ")
    assert re.search(text, first)


def test_options_that_differ(ranks):
    def work():
        overlap.init()
        with pytest.raises(overlap.MismatchError) as caught:
            overlap.attach(nn.Linear(1, 1), bucket_mb=[1, 2][overlap.rank()])
        return str(caught.value)

    first, second = ranks(2).run(work)
    assert first == second
    assert "option 'bucket_mb' has value 1 on rank 0 but 2 on rank 1" in first


def foreign_hook():
    layer = nn.Linear(1, 1)
    layer.bias.register_post_accumulate_grad_hook(lambda p: None)
    return layer


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: 3, "TypeError: model must be a torch.nn.Module, not int"),
        (lambda: nn.Linear(1, 1).requires_grad_(False), "ValueError: model has no parameter that requires"),
        (lambda: nn.ReLU(), "ValueError: model has no parameter that requires"),
        (lambda: nn.LazyLinear(3), "ValueError: 'weight' has no shape yet: run one batch"),
        (lambda: nn.Linear(1, 1, device="meta"), "ValueError: 'weight' is on meta"),
        (foreign_hook, "ValueError: parameter 'bias' has a post-accumulate hook already"),
    ],
)
def test_models_that_cannot_be_attached(ranks, model, text):
    for message in ranks(2).run(error_of, lambda rank: model()):
        assert message.startswith(text)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "4", True])
def test_bad_bucket_mb(value):
    with pytest.raises(ValueError, match="bucket_mb must be a positive number of megabytes"):
        overlap.attach(nn.Linear(1, 1), bucket_mb=value)
    assert not overlap.is_initialized()


def test_backward_after_shutdown(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(1, 1)
        overlap.attach(layer)
        overlap.shutdown()
        with pytest.raises(overlap.CommError, match="overlap was shut down"):
            layer(torch.ones(1)).sum().backward()

    ranks(2).run(work)


def test_peer_that_raises_is_named(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(1, 1)
        overlap.attach(layer)
        for step in range(10):
            if step == 3 and overlap.rank() == 1:
                raise ValueError("bad sample")
            layer(torch.ones(1)).sum().backward()

    with pytest.raises(overlap.RankFailed, match="bad sample") as caught:
        ranks(2).run(work)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
