"""Parameters, optimizer states and objects of one rank on all, and batch norm over all ranks' batches."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import overlap.torch as hvd

OPTIMIZERS = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
]  # fmt: skip


def parameters():
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    forms = [
        model.state_dict(),
        model.named_parameters(),
        list(model.parameters()),
        dict(model.named_parameters()),
    ]
    results = []
    for form in forms:
        with torch.no_grad():
            for each in model.parameters():
                each.add_(hvd.rank())
        hvd.broadcast_parameters(form, 1)
        results.append([each.tolist() for each in model.parameters()])
    extra = {"a": torch.ones(1), "b": {"epoch": hvd.rank()}, "c": None}
    hvd.broadcast_parameters(extra, 1)
    return results, extra["b"]


def test_broadcast_parameters_in_every_form(pools):
    zero, one = pools(2).run(parameters)
    assert zero == one and zero[1] == {"epoch": 1}


def state_of(optimizer, model):
    """All that an optimizer knows, with types."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [plain(each) for each in value]
        return type(value).__name__, value

    return plain(optimizer.state_dict()), [each.tolist() for each in model.parameters()]


def make(name, rank):
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2, bias=name != "Muon")
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1 * (rank + 1), **kwargs)
    return model, optimizer


def train(model, optimizer, steps):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def states(name):
    hvd.init()
    model, optimizer = make(name, hvd.rank())
    if hvd.rank() == 0:
        train(model, optimizer, 3)
    before = state_of(optimizer, model)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    after = state_of(optimizer, model)
    train(model, optimizer, 1)
    return before, after, state_of(optimizer, model)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name)])
def test_c064_an_optimizers_state_arrives_bit_by_bit(pools, name):
    zero, one = pools(2).run(states, name)
    assert repr(zero[0]) == repr(zero[1]) == repr(one[1])
    assert repr(zero[2]) == repr(one[2])


def fresh():
    hvd.init()
    model, optimizer = torch.nn.Linear(3, 2), None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()), weight_decay=0.5)
    model.bias.requires_grad_(False)
    before = [each.tolist() for each in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    after = [each.tolist() for each in model.parameters()]
    return before == after, optimizer.param_groups[0]["lr"], model.weight.grad.tolist(), model.bias.grad


def test_c064_nothing_moves_where_all_are_fresh(pools):
    assert pools(2).run(fresh) == [(True, 0.1, [[0.0] * 3] * 2, None)] * 2


def stateless():
    hvd.init()
    rank, results = hvd.rank(), []
    for name in ("SGD", "Adam", "Adagrad"):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(False)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        if rank == 0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        before = repr(state_of(optimizer, model))
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        frozen = any(each in optimizer.state and name == "Adam" for each in model[0].parameters())
        results.append(
            (
                before == repr(state_of(optimizer, model)) or rank == 1,
                repr(state_of(optimizer, model)),
                frozen,
            )
        )
    return results


def test_c065_without_state_with_frozen_parameters_and_adagrad(pools):
    zero, one = pools(2).run(stateless)
    assert zero == one
    assert all(same and not frozen for same, _, frozen in zero)


def embeddings():
    hvd.init()
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    return model.weight.grad.is_sparse, model.weight.grad.shape


def test_sparse_parameters_get_sparse_zeros(pools):
    assert pools(2).run(embeddings) == [(True, (4, 2))] * 2


def objects():
    hvd.init()
    rank = hvd.rank()

    def refused(call, obj):
        try:
            call(obj)
        except TypeError as error:
            return str(error)

    mine = {"rank": rank, "fn": lambda x: x + rank}
    got = hvd.broadcast_object(mine, 1, name="object")
    everyone = hvd.allgather_object(["x"] * rank)
    unsendable = (each for each in ())
    failed = refused(hvd.broadcast_object, unsendable if rank == 0 else None)
    failed_too = refused(hvd.allgather_object, unsendable if rank == 1 else None)
    return got["fn"](1), got is mine, everyone, failed, failed_too


def test_objects(pools):
    for rank, (value, same, everyone, failed, failed_too) in enumerate(pools(2).run(objects)):
        assert value == 2 and same == (rank == 1)
        assert everyone == [[], ["x"]]
        assert "rank 0's generator can't be pickled" in failed
        assert "rank 1's generator can't be pickled" in failed_too


def one_a_rank():
    hvd.init()
    norm = hvd.SyncBatchNorm(1)
    y = norm(torch.tensor([[1.0 + 2 * hvd.rank()]]))
    return y.item(), norm.running_mean.item(), norm.running_var.item(), int(norm.num_batches_tracked)


def test_c014_batches_of_one(pools):
    for rank, (y, mean, var, tracked) in enumerate(pools(2).run(one_a_rank)):
        assert y == pytest.approx([-0.999995, 0.999995][rank], abs=1e-6)
        assert (mean, var, tracked) == (pytest.approx(0.2), pytest.approx(1.1), 1)


def rows(rank):
    torch.manual_seed(7)
    whole = torch.randn(7, 3, 2, 2, dtype=torch.float64)
    return whole, [whole[:2], whole[2:2], whole[2:]][rank]


def normalized(affine):
    hvd.init()
    _, mine = rows(hvd.rank())
    x = mine.clone().requires_grad_()
    norm = hvd.SyncBatchNorm(3, momentum=None, affine=affine).double()
    y = norm(x)
    y.pow(3).sum().backward()
    weights = [hvd.allreduce(each.grad, op=hvd.Sum).tolist() for each in norm.parameters()]
    norm.eval()
    return y.tolist(), x.grad.tolist(), weights, norm.running_var.tolist(), norm(mine).tolist()


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_those_of_one_process_on_the_whole_batch(pools, affine):
    whole, _ = rows(0)
    x = whole.clone().requires_grad_()
    norm = torch.nn.BatchNorm2d(3, momentum=None, affine=affine).double()
    y = norm(x)
    y.pow(3).sum().backward()
    norm.eval()
    results = pools(3).run(normalized, affine)
    for place, expected in ((0, y), (1, x.grad), (4, norm(whole))):
        parts = [torch.tensor(result[place], dtype=torch.float64).reshape(-1, 3, 2, 2) for result in results]
        torch.testing.assert_close(torch.cat(parts), expected.detach())
    for result in results:
        for mine, expected in zip(result[2], norm.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), expected.grad)
        torch.testing.assert_close(torch.tensor(result[3], dtype=torch.float64), norm.running_var)


def test_too_few_dimensions_are_refused():
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(1)(torch.ones(3))
    assert math.isclose(hvd.SyncBatchNorm(1).eval()(torch.ones(1, 1)).item(), 1, rel_tol=1e-4)
