"""Sparse gradients are averaged as sparse ones."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import overlap


def test_c032_rows_of_some_ranks(ranks):
    def work():
        overlap.init()
        table = nn.Embedding(4, 2, padding_idx=0, sparse=True)
        nn.init.ones_(table.weight)
        overlap.attach(table)
        ids = torch.tensor([[1, 1], [0, 0]][overlap.rank()][: 2 - overlap.rank()])
        seen = []
        for _ in range(2):
            table.zero_grad()
            table(ids).sum().backward()
            gradient = table.weight.grad
            seen.append((gradient.is_sparse, gradient.is_coalesced(), gradient.to_dense().tolist()))
        return seen

    expected = (True, True, [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert ranks(2).run(work) == [[expected] * 2] * 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_beside_dense_parameters_equals_one_process(ranks, size, weighted):
    def work(weighted):
        overlap.init()
        rank, size = overlap.rank(), overlap.size()
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.EmbeddingBag(20, 3, mode="sum", sparse=True, dtype=torch.float64), nn.Linear(3, 1).double()
        )
        one = copy.deepcopy(model)
        attached = overlap.attach(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, one)]
        for _ in range(4):
            lengths = [2 + (r if weighted else 0) for r in range(size)]
            batches = [torch.randint(0, 20, (length, 4)) for length in lengths]
            if weighted:
                attached.weight = lengths[rank]
            for each, batch in ((model, batches[rank]), (one, torch.cat(batches))):
                each.zero_grad()
                each(batch).square().mean().backward()
            assert model[0].weight.grad.is_sparse
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-12, atol=1e-14)
            for optimizer in optimizers:
                optimizer.step()
        return [p.tolist() for p in model.parameters()]

    results = ranks(size).run(work, weighted)
    assert all(result == results[0] for result in results)


def test_ranks_without_rows_and_without_a_backward(ranks):
    def work():
        overlap.init()
        table = nn.Embedding(4, 1, sparse=True)
        overlap.attach(table)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.0)
        seen = []
        for turn in range(2):
            optimizer.zero_grad()
            if overlap.rank() == turn:
                table(torch.tensor([turn])).sum().backward()
            optimizer.step()
            seen.append(table.weight.grad.to_dense().flatten().tolist())
        optimizer.zero_grad()
        table(torch.tensor([], dtype=torch.int64)).sum().backward()
        seen.append(table.weight.grad.to_dense().flatten().tolist())
        return seen

    assert ranks(2).run(work) == [[[0.5, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 0, 0]]] * 2


def test_tied_to_a_dense_layer(ranks):
    def work():
        overlap.init()
        rank = overlap.rank()
        table = nn.Embedding(3, 2, sparse=True)
        output = nn.Linear(2, 3, bias=False)
        output.weight = table.weight
        nn.init.ones_(table.weight)
        model = nn.ModuleList([table, output])
        overlap.attach(model)
        found = table(torch.tensor([rank]))
        (output(found) if rank else found).sum().backward()  # dense on rank 1 only
        return table.weight.grad.to_dense().tolist()

    assert ranks(2).run(work) == [[[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]]] * 2


def test_sparse_gradient_that_no_module_announces(ranks):
    def work():
        overlap.init()
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.ones(3, 2))
        overlap.attach(holder)
        for _ in range(2):
            holder.weight.grad = None
            nn.functional.embedding(
                torch.tensor([overlap.rank()]), holder.weight, sparse=True
            ).sum().backward()
        return holder.weight.grad.to_dense().tolist()

    assert ranks(2).run(work) == [[[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]] * 2
