"""Horovod's `DistributedOptimizer`: its errors, its gradients, and the same bits as `overlap.attach`."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import overlap
import overlap.torch as hvd
from tests.frameworks.torch.models import linear


def wrapped(model, lr=1.0, kind=torch.optim.SGD, **options):
    hvd.init()
    return hvd.DistributedOptimizer(kind(model.parameters(), lr=lr), **options)


# -- in a world of one -----------------------------------------------------------------------------------


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"named_parameters": [1]}, "sequence of tuples"),
        ({"named_parameters": [("a", linear().weight)] * 2}, "Found duplicates: a"),
        ({"named_parameters": [("a", linear().weight)]}, "were not named"),
        ({"groups": -1}, "non-negative integer or a list of list of torch.Tensor"),
        ({"groups": "no"}, "non-negative integer or a list of list of torch.Tensor"),
        ({"groups": [[1]]}, "torch.Tensor"),
        ({"groups": [[torch.ones(1)] * 2][:1]}, "can only appear once"),
        ({"op": 6}, "op must be"),
    ],
)
def test_refused(alone, options, message):
    with pytest.raises(ValueError, match=message):
        wrapped(linear(), **options)


def test_num_groups_is_deprecated(alone):
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrapped(linear(), num_groups=2)


def test_is_the_wrapped_class(alone):
    layer = linear()
    inner = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    layer(torch.ones(1)).sum().backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert not type(optimizer).__module__.startswith("torch.optim")
    assert optimizer.state is inner.state and optimizer.defaults["momentum"] == 0.9
    assert optimizer.param_groups is inner.param_groups
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.SGD and other.state_dict().keys() == inner.state_dict().keys()

    class Further(type(optimizer)):
        pass

    Further([nn.Parameter(torch.ones(1))], lr=0.1).step()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25
    optimizer.zero_grad(set_to_none=False)
    assert layer.weight.grad.item() == 0


# -- on several ranks ------------------------------------------------------------------------------------


def test_c001_unused_parameters_have_zeros(ranks):
    def work():
        hvd.init()
        model = nn.ModuleDict({"a": linear(), "b": linear()})
        optimizer = wrapped(model, lr=0.0, named_parameters=model.named_parameters())
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            model["a"](torch.tensor([hvd.rank() + 1.0])).sum().backward()
            optimizer.step()
            seen.append([layer.weight.grad.item() for layer in model.values()])
        return seen

    assert ranks(2).run(work) == [[[1.5, 0.0]] * 2] * 2


def test_c019_summed_once_and_warned_once(ranks):
    def work():
        hvd.init()
        layer = linear()
        optimizer = wrapped(layer, op=hvd.Sum, lr=0.0)
        seen = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for skip in (True, False):
                optimizer.zero_grad()
                layer(torch.tensor([hvd.rank() + 1.0])).sum().backward()
                optimizer.synchronize()
                if skip:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
                seen.append(layer.weight.grad.item())
        words = "optimizer.step() called without optimizer.skip_synchronize()"
        return seen, [words in str(each.message) for each in caught]

    assert ranks(2).run(work) == [([3.0, 3.0], [True])] * 2


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_equals_attach_bit_for_bit(ranks, kind):
    def work(kind):
        overlap.init()
        torch.manual_seed(0)
        one = nn.Sequential(nn.Linear(9, 300), nn.ReLU(), nn.Linear(300, 70), nn.Linear(70, 1))
        other = copy.deepcopy(one)
        overlap.attach(one)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        make = getattr(torch.optim, kind)
        optimizers = [make(model.parameters(), lr=0.01, **options) for model in (one, other)]
        optimizers[1] = hvd.DistributedOptimizer(optimizers[1], other.named_parameters())
        for step in range(20):
            torch.manual_seed(100 * overlap.rank() + step)
            batch = torch.randn(5, 9)
            for model, optimizer in zip((one, other), optimizers, strict=True):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return all(map(torch.equal, one.parameters(), other.parameters()))

    assert ranks(2).run(work, kind) == [True] * 2


@pytest.mark.parametrize(
    ("op", "expected"),
    [(hvd.Average, 3.0), (hvd.Sum, 6.0), (hvd.Min, 2.0), (hvd.Max, 4.0), (hvd.Product, 8.0)],
)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_operations_and_compression(ranks, op, expected, compression):
    def work(op, compression):
        hvd.init()
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
        optimizer = wrapped(model, lr=0.0, op=op, compression=getattr(hvd.Compression, compression))
        seen = set()
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() for p in model.parameters()).mul(2 * hvd.rank() + 2).backward()
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad.dtype == torch.float32
                seen |= set(parameter.grad.flatten().tolist())
        return seen

    assert ranks(2).run(work, op, compression) == [{expected}] * 2


def test_force_allreduce_where_one_rank_has_no_backward(ranks):
    def work():
        hvd.init()
        layers = nn.ModuleList([linear(), linear()])
        optimizer = wrapped(layers, lr=1.0)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            if hvd.rank() == step % 2:
                layers[step % 2](torch.ones(1)).sum().backward()
            optimizer.step()
            seen.append([layer.weight.grad.item() for layer in layers])
        return seen, [layer.weight.item() for layer in layers]

    assert ranks(2).run(work) == [([[0.5, 0.0], [0.0, 0.5], [0.5, 0.0]], [0.0, 0.5])] * 2


def test_three_backwards_a_step(ranks):
    def work():
        hvd.init()
        layer = linear()
        optimizer = wrapped(layer, lr=0.0, backward_passes_per_step=3)
        seen = []
        for passes in (3, 3, 2, 3):
            optimizer.zero_grad()
            for _ in range(passes):
                layer(torch.tensor([hvd.rank() + 1.0])).sum().backward()
            optimizer.step()
            seen.append(layer.weight.grad.item())
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        layer(torch.ones(1)).sum().backward()
        seen.append(layer.weight.grad.item())
        return seen

    assert ranks(2).run(work) == [[4.5, 4.5, 3.0, 4.5, 1.0]] * 2


def test_misuse_between_backward_and_step(ranks):
    def work():
        hvd.init()
        layer = linear()
        optimizer = wrapped(layer)
        seen = []
        layer(torch.ones(1)).sum().backward()
        for act in (optimizer.zero_grad, layer(torch.ones(1)).sum().backward):
            try:
                act()
            except AssertionError as error:
                seen.append(str(error)[:40])
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        layer(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return seen, layer.weight.item()

    zeroed, again = (
        "optimizer.zero_grad() was called after loss.backward()",
        "Gradients were computed more than backward_passes",
    )
    assert ranks(2).run(work) == [([zeroed[:40], again[:40]], 0.0)] * 2


def test_gan_with_toggled_requires_grad(ranks):
    def work():
        hvd.init()
        maker, judge = linear(), linear()
        optimizers = [wrapped(each, lr=0.25) for each in (maker, judge)]
        for step in range(4):
            for turn, optimizer in enumerate(optimizers):
                maker.requires_grad_(turn == 0)
                judge.requires_grad_(turn == 1)
                optimizer.zero_grad()
                judge(maker(torch.tensor([hvd.rank() + step + 0.5]))).mul(-1 if turn else 1).sum().backward()
                optimizer.step()
        return maker.weight.item(), judge.weight.item()

    first, second = ranks(2).run(work)
    assert first == second

    maker, judge = 1.0, 1.0
    for step in range(4):
        maker -= 0.25 * judge * (step + 1)
        judge += 0.25 * maker * (step + 1)
    assert first == pytest.approx((maker, judge), rel=1e-5)


def test_clipping(ranks):
    def work():
        hvd.init()
        layer = linear()
        optimizer = wrapped(layer)
        for _ in range(2):
            optimizer.zero_grad()
            layer(torch.tensor([hvd.rank() + 1.0])).sum().backward()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.75)
            with optimizer.skip_synchronize():
                optimizer.step()
        return norm.item(), layer.weight.item()

    assert ranks(2).run(work) == [(1.5, pytest.approx(-0.5, abs=1e-5))] * 2


def test_gradient_scaler(ranks):
    def work():
        hvd.init()
        layer = linear()
        optimizer = wrapped(layer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for value in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            bad = value if hvd.rank() else 1.0  # on one rank only: all skip the step
            scaler.scale(layer(torch.tensor([bad])).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return layer.weight.item(), scaler.get_scale()

    assert ranks(2).run(work) == [(-1.0, 2.0)] * 2


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients(ranks, kind, dense):
    def work(kind, dense):
        hvd.init()
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(table.weight)
        optimizer = wrapped(table, kind=getattr(torch.optim, kind), sparse_as_dense=dense)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            if step != 2:
                table(torch.tensor([hvd.rank(), 2])).sum().backward()
            optimizer.step()
            seen.append((table.weight.grad.is_sparse, table.weight.grad.to_dense()[:, 0].tolist()))
        return seen, table.weight.tolist()

    rows, none = (True, [0.5, 0.5, 1.0, 0.0]), (True, [0.0] * 4)
    results = ranks(2).run(work, kind, dense)
    assert results[0] == results[1]
    assert results[0][0] == [rows, rows, none, rows]


def test_closure_has_all_ranks_gradients(ranks):
    def work():
        hvd.init()
        layer = linear()
        optimizer = wrapped(layer, lr=0.5)

        def closure():
            optimizer.zero_grad()
            loss = layer(torch.tensor([hvd.rank() + 1.0])).sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        return loss.item(), layer.weight.item()

    assert ranks(2).run(work) == [(1.5, 0.25)] * 2


def test_added_parameters_are_averaged(ranks):
    def work():
        hvd.init()
        one, two = linear(), linear()
        optimizer = wrapped(one)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": two.parameters(), "lr": 1.0})
            optimizer.zero_grad()
            (one(torch.tensor([hvd.rank() + 1.0])) + two(torch.tensor([hvd.rank() + 0.0]))).sum().backward()
            optimizer.step()
        return one.weight.item(), two.weight.item()

    assert ranks(2).run(work) == [(-3.5, 0.0)] * 2


def test_own_compressor(ranks):
    def work():
        hvd.init()

        class Half:
            @staticmethod
            def compress(tensor):
                return tensor / 2, 2

            @staticmethod
            def decompress(tensor, ctx):
                return tensor * ctx

        layers = nn.ModuleList([linear(), linear()])
        optimizer = wrapped(layers, lr=0.0, compression=Half)
        layers[0](torch.tensor([hvd.rank() + 1.0])).sum().backward()
        optimizer.step()
        return [layer.weight.grad.item() for layer in layers]

    assert ranks(2).run(work) == [[1.5, 0.0]] * 2


def test_adasum(ranks):
    def work():
        hvd.init()
        layer = linear(2)
        optimizer = wrapped(layer, op=hvd.Adasum)
        layer(torch.eye(2)[hvd.rank()]).sum().backward()  # orthogonal: they add up
        optimizer.step()
        with pytest.raises(AssertionError), optimizer.skip_synchronize():
            pass
        optimizer.zero_grad()
        layer(torch.ones(2)).sum().backward()  # parallel: their mean
        optimizer.step()
        return layer.weight.tolist()

    assert ranks(2).run(work) == [[[-1.0, -1.0]]] * 2


def test_process_set(ranks):
    def work():
        hvd.init()
        pair = hvd.add_process_set([0, 2])
        layer = linear()
        optimizer = wrapped(layer, process_set=pair)
        layer(torch.tensor([hvd.rank() + 1.0])).sum().backward()
        optimizer.step()
        try:
            wrapped(linear(), process_set=pair, op=hvd.Adasum)
        except NotImplementedError:
            refused = True
        optimizer.zero_grad()
        hvd.remove_process_set(pair)
        return layer.weight.item(), refused

    assert ranks(3).run(work) == [(-1.0, True), (-1.0, True), (-1.0, True)]


def join_with_uneven_batches():
    import overlap.torch as hvd

    hvd.init()
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = []
    for model in models:
        torch.nn.init.zeros_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        optimizers.append(hvd.DistributedOptimizer(sgd, model.named_parameters()))
    for _ in range((3, 5)[hvd.rank()]):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(1), name="metric of the longer rank")
    last = hvd.join()
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), last)
    return last, [model.weight.item() for model in models]


def test_c055_join_serves_every_optimizer(pools):
    """3 steps of both ranks, 2 of rank 1 alone, whose averages count rank 0 as zero."""
    assert pools(2).run(join_with_uneven_batches) == [(1, [-4.0, -4.0])] * 2
