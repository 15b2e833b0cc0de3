"""Ranks that differ in how often they run backwards, how much they weigh, and how many batches they have."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import overlap
from tests.frameworks.torch.models import linear


def test_c002_no_backward_at_all_on_one_rank(ranks):
    def work():
        overlap.init()
        layer = linear(2)
        overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        ends = []
        for _ in range(3):
            optimizer.zero_grad()
            if overlap.rank() == 0:
                layer(torch.ones(2)).sum().backward()
            optimizer.step()
            ends.append((layer.weight.grad.tolist(), layer.weight.tolist()))
        return ends

    expected = [([[0.5, 0.5]], [[1 - 0.5 * step] * 2]) for step in (1, 2, 3)]
    assert ranks(2).run(work) == [expected] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_other_numbers_of_backwards_in_a_step(ranks, size):
    def work():
        overlap.init()
        rank = overlap.rank()
        layer = nn.Sequential(linear(), linear())
        overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        gradients = []
        for step in range(4):
            optimizer.zero_grad()
            for _ in range((rank + step) % size):
                layer(torch.ones(1)).sum().backward()
            optimizer.step()
            gradients.append(layer[0].weight.grad.item())
        return gradients

    mean = sum(range(size)) / size
    assert ranks(size).run(work) == [[pytest.approx(mean)] * 4] * size


def test_no_rank_has_a_backward(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
        return layer.weight.grad, layer.weight.item()

    assert ranks(2).run(work) == [(None, 1.0)] * 2


def test_two_optimizers_of_one_model_and_a_stranger(ranks):
    def work():
        overlap.init()
        a, b, stranger = linear(), linear(), linear()
        overlap.attach(nn.ModuleList([a, b]))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (a, b, stranger)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if overlap.rank() != step % 2:
                (a if step else b)(torch.ones(1)).sum().backward()
            optimizers[0].step()
            if overlap.rank() == 0:
                stranger(torch.ones(1)).sum().backward()
                optimizers[2].step()
            optimizers[1].step()
        return a.weight.item(), b.weight.item(), stranger.weight.item()

    assert ranks(2).run(work) == [(0.0, 0.5, -2.0), (0.0, 0.5, 1.0)]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_equals_one_process(ranks, line_search):
    def work():
        overlap.init()
        rank, size = overlap.rank(), overlap.size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        one = copy.deepcopy(model)
        x = torch.randn(8 * size, 4, dtype=torch.float64)
        y = torch.sin(x.sum(1, keepdim=True))
        overlap.attach(model)
        mine = slice(8 * rank, 8 * (rank + 1))
        losses = []
        for each, inputs, targets in ((model, x[mine], y[mine]), (one, x, y)):
            optimizer = torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)

            def closure(each=each, inputs=inputs, targets=targets, optimizer=optimizer):
                optimizer.zero_grad()
                loss = (each(inputs) - targets).square().mean()
                loss.backward()
                return loss

            losses.append([float(optimizer.step(closure)) for _ in range(3)])
        torch.testing.assert_close(losses[0], losses[1])
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
        return [p.tolist() for p in model.parameters()]

    results = ranks(2).run(work)
    assert results[0] == results[1]


def test_closure_that_is_a_keyword_and_returns_nothing_or_a_number(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

        def closure(loss):
            layer(torch.ones(1)).sum().backward()
            return loss

        number = optimizer.step(closure=lambda: closure(float(overlap.rank())))
        return number, optimizer.step(lambda: closure(None))

    assert ranks(2).run(work) == [(0.5, None)] * 2


def test_c017_step_on_gradients_that_were_never_averaged(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        x = torch.tensor([overlap.rank() + 1.0])
        gradients = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                optimizer.zero_grad()
                layer(x).sum().backward()
                with attached.no_sync():
                    layer(x).sum().backward()
                gradients.append(layer.weight.grad.item())
                optimizer.step()
        return gradients[0], [str(each.message) for each in caught]

    results = ranks(2).run(work)
    assert [gradient for gradient, _ in results] == [2.5, 3.5]
    for _, messages in results:
        assert len(messages) == 1 and "never averaged ('weight'" in messages[0]


def test_c055_join_of_uneven_loops(ranks):
    def work():
        overlap.init()
        layer = linear(value=0.0)
        attached = overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        with attached.join():
            for _ in range((3, 5)[overlap.rank()]):
                optimizer.zero_grad()
                layer(torch.ones(1)).sum().backward()
                optimizer.step()
        after = layer.weight.item()
        optimizer.zero_grad()
        layer(torch.tensor([overlap.rank() + 1.0])).sum().backward()
        return after, layer.weight.grad.item()

    assert ranks(2).run(work) == [(-4.0, 1.5)] * 2


def test_join_with_accumulation_batch_norm_and_a_rank_without_any_batch(ranks):
    def work():
        overlap.init()
        rank = overlap.rank()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        attached = overlap.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached.join():
            for _ in range((2, 0, 4)[rank]):
                optimizer.zero_grad()
                with attached.no_sync():
                    model(torch.randn(4, 3)).square().mean().backward()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
        return [value.tolist() for value in model.state_dict().values()]

    results = ranks(3).run(work)
    assert results[0] == results[1] == results[2]


def test_join_where_nobody_uses_an_optimizer(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer)
        seen = []
        with attached.join():
            for _ in range(1 + overlap.rank()):
                layer.zero_grad()
                layer(torch.ones(1)).sum().backward()
                seen.append(layer.weight.grad.item())
        return seen

    assert ranks(2).run(work) == [[1.0], [1.0, 0.5]]


def test_c056_rank_that_ends_early_is_named_with_its_steps(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for _ in range((3, 5)[overlap.rank()]):
            optimizer.zero_grad()
            layer(torch.ones(1)).sum().backward()
            optimizer.step()

    with pytest.raises(overlap.RankFailed, match="rank 0 ended after 3 steps"):
        ranks(2).run(work)


def test_c061_weights_of_zero(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer)
        rank = overlap.rank()
        ends = []
        for weights in ((0, 2), (0, 0), (1, 3)):
            layer.zero_grad()
            attached.weight = weights[rank]
            factor = (float("nan"), 3.0)[rank] if weights == (0, 2) else rank + 1.0
            layer(torch.tensor([factor])).sum().backward()
            ends.append(layer.weight.grad.item())
        attached.weight = None
        layer.zero_grad()
        layer(torch.tensor([rank + 1.0])).sum().backward()
        return [*ends, layer.weight.grad.item()]

    assert ranks(2).run(work) == [[3.0, 0.0, 1.75, 1.5]] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_c062_weighted_micro_batches_equal_one_process(ranks, size):
    def work():
        overlap.init()
        rank = overlap.rank()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        one = copy.deepcopy(model)
        attached = overlap.attach(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, one)]
        for step in range(4):
            batches = [torch.randn(2 + (k + step) % 4, 3, dtype=torch.float64) for k in range(2 * size)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = batches[2 * rank : 2 * rank + 2]
            attached.weight = len(first)
            with attached.no_sync():
                model(first).square().mean().backward()
            attached.weight = len(second)
            model(second).square().mean().backward()
            one(torch.cat(batches)).square().mean().backward()
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
            for optimizer in optimizers:
                optimizer.step()
        return [p.tolist() for p in model.parameters()]

    results = ranks(size).run(work)
    assert all(result == results[0] for result in results)


def test_weights_of_unused_kept_and_twice_averaged_gradients(ranks):
    def work():
        overlap.init()
        rank = overlap.rank()
        model = nn.ModuleDict({"a": linear(), "b": linear()})
        attached = overlap.attach(model)
        x = torch.tensor([rank + 1.0])
        attached.weight = 1 + 2 * rank  # 1 and 3: the weighted mean of 1 and 2 is 1.75
        (model["a"](x) + (model["b"](x) if rank else 0)).sum().backward()
        first = [model[name].weight.grad.item() for name in "ab"]
        model["a"](x).sum().backward()  # on top of an average
        return first, [model[name].weight.grad.item() for name in "ab"]

    assert ranks(2).run(work) == [([1.75, 1.5], [3.5, 1.5])] * 2


def test_weight_is_not_seen_by_autograd_grad(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer).weight = 5.0
        (gradient,) = torch.autograd.grad(layer(torch.ones(1)).sum(), layer.weight)
        return gradient.item()

    assert ranks(2).run(work) == [1.0, 1.0]


def test_weight_on_some_ranks_only(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer)
        if overlap.rank() == 1:
            attached.weight = 3
        with pytest.raises(overlap.MismatchError, match=r"rank 1 has set .* but rank 0 has not"):
            layer(torch.ones(1)).sum().backward()
        attached.weight = 1
        layer.zero_grad()
        layer(torch.ones(1)).sum().backward()
        return layer.weight.grad.item()

    assert ranks(2).run(work) == [1.0, 1.0]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_bad_weight(weight):
    attached = overlap.attach(linear())
    with pytest.raises(ValueError, match="weight must be a number of at least 0"):
        attached.weight = weight
    attached.detach()
    overlap.shutdown()


def test_weighted_accumulation_in_a_world_of_one():
    layer = linear()
    attached = overlap.attach(layer)
    attached.weight = 1
    with attached.no_sync():
        layer(torch.tensor([1.0])).sum().backward()
    attached.weight = 3
    layer(torch.tensor([2.0])).sum().backward()
    assert layer.weight.grad.item() == 1.75
    attached.detach()
    overlap.shutdown()


def test_check_every_finds_drift(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer, check_every=2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for step in range(4):
            optimizer.zero_grad()
            layer(torch.ones(1)).sum().backward()
            if step == 2 and overlap.rank() == 1:
                with torch.no_grad():
                    layer.weight.add_(1)
            if step == 3:
                with pytest.raises(overlap.MismatchError, match="'weight'"):
                    optimizer.step()
            else:
                optimizer.step()
        return True

    assert ranks(2).run(work) == [True, True]


def test_backward_passes_per_step(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer, backward_passes_per_step=3)
        x = torch.tensor([overlap.rank() + 1.0])
        seen = []
        for _ in range(2):
            layer.zero_grad()
            for _ in range(3):
                layer(x).sum().backward()
                seen.append(layer.weight.grad.item())
        return seen, attached.stats().steps

    mine = [([r, 2 * r, 4.5] * 2, 2) for r in (1.0, 2.0)]
    assert ranks(2).run(work) == mine


@pytest.mark.parametrize("what", ["parameter", "module"])
def test_c071_replaced_after_attach(ranks, what):
    def work(what):
        overlap.init()
        model = nn.ModuleDict({"a": linear()})
        attached = overlap.attach(model)
        owner, name, new = (
            (model["a"], "weight", nn.Parameter(torch.ones(1, 1)))
            if what == "parameter"
            else (model, "a", linear())
        )
        with pytest.raises(ValueError, match=r"'a\.weight' of an attached model can't be replaced"):
            setattr(owner, name, new)
        attached.detach()
        model["a"].weight = nn.Parameter(torch.ones(1, 1))
        overlap.attach(model)
        model["a"](torch.tensor([overlap.rank() + 1.0])).sum().backward()
        return model["a"].weight.grad.item()

    assert ranks(2).run(work, what) == [1.5, 1.5]


def test_functional_call(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        x = torch.tensor([overlap.rank() + 1.0])
        parameters = dict(layer.named_parameters())
        torch.func.functional_call(layer, parameters, (x,)).sum().backward()
        mine = layer.weight.grad.item()
        other = torch.full((1, 1), 5.0, requires_grad=True)
        torch.func.functional_call(layer, {"weight": other}, (x,)).sum().backward()
        return mine, other.grad.item()

    assert ranks(2).run(work) == [(1.5, 1.0), (1.5, 2.0)]


def test_buffers_are_each_ranks_own_until_synchronised(ranks):
    def work():
        overlap.init()
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), linear())
        attached = overlap.attach(model)
        model(torch.full((2, 1), overlap.rank() + 1.0)).sum().backward()
        before = model[0].running_mean.item()
        attached.sync_buffers()
        return before, model[0].running_mean.item()

    assert ranks(2).run(work) == [(1.0, 1.0), (2.0, 1.0)]


@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_a_step_after_another_number_of_backwards_is_averaged_too(ranks, weights):
    """Epochs of 3 and passes of 2: of each step's gradients all are averaged, and nobody is warned."""

    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer, backward_passes_per_step=2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        rank, seen = overlap.rank(), []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for backwards in (3, 1, 2, 3, 2):
                optimizer.zero_grad()
                for number in range(backwards):
                    if weights is not None:
                        attached.weight = weights[rank]
                    layer(torch.tensor([[(rank + 1.0) * (number + 1)]])).sum().backward()
                optimizer.step()
                seen.append(layer.weight.grad.item())
        return seen

    if weights is None:
        expected = [1.5 * sum(range(1, n + 1)) for n in (3, 1, 2, 3, 2)]
        assert ranks(2).run(work) == [expected] * 2
    else:
        first, second = ranks(2).run(work)
        assert first == second
        # One round or two, each the mean of its backwards by weight: (1 * 1 + 3 * 2) / 4 times their sum.
        assert first[1] == pytest.approx(7 / 4)


def test_a_closures_loss_is_weighted_as_its_gradient_is(ranks):
    """A rank without samples has a NaN loss and weight 0; line searches need the loss of the gradient."""

    def work(counts):
        overlap.init()
        rank = overlap.rank()
        layer = linear().double()
        one = copy.deepcopy(layer)
        attached = overlap.attach(layer)
        values = torch.arange(1.0, 1.0 + sum(counts), dtype=torch.float64)[:, None]
        start = sum(counts[:rank])

        def minimize(model, x, weight):
            optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

            def closure():
                optimizer.zero_grad()
                if weight is not None:
                    attached.weight = weight
                loss = (model(x) - 3 * x - 1).square().mean()
                loss.backward()
                return loss

            return [float(optimizer.step(closure)) for _ in range(3)], model.weight.item()

        mine = minimize(layer, values[start : start + counts[rank]], counts[rank])
        losses, weight = minimize(one, values, None)
        assert mine[0] == pytest.approx(losses, rel=1e-9)
        assert mine[1] == pytest.approx(weight, rel=1e-9)
        return mine

    for counts in ((3, 0), (7, 1)):
        assert len({repr(result) for result in ranks(2).run(work, counts)}) == 1


@pytest.mark.parametrize("name", ["backward_passes_per_step", "check_every"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_bad_counts(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        overlap.attach(linear(), **{name: value})


def test_resuming_with_another_number_of_ranks(ranks, tmp_path):
    path = str(tmp_path / "state.pt")

    def work(path, resume):
        overlap.init()
        rank, size = overlap.rank(), overlap.size()
        torch.manual_seed(rank)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if resume:
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        overlap.attach(model)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(12, 3, dtype=torch.float64)[rank * 12 // size : (rank + 1) * 12 // size]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if rank == 0 and not resume:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    ranks(2).run(work, path, False)
    two, three = ranks(2).run(work, path, True), ranks(3).run(work, path, True)
    assert two[0] == two[1] and three[0] == three[1] == three[2]
    assert two[0] == pytest.approx(three[0], rel=1e-12)
