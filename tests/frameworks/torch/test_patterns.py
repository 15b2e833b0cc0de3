"""Patterns of real programs, each against what one process computes or against values worked out by hand."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import overlap
from tests.frameworks.torch.models import usage


def test_c013_depthwise_convolution_in_channels_last_warns_of_nothing(ranks):
    def work():
        overlap.init()
        rank, size = overlap.rank(), overlap.size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4)).double()
        model = model.to(memory_format=torch.channels_last)
        one = copy.deepcopy(model)
        overlap.attach(model)
        x = torch.randn(2 * size, 4, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                for each, inputs in ((model, x[2 * rank : 2 * rank + 2]), (one, x)):
                    each.zero_grad()
                    each(inputs).square().mean().backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        return True

    assert ranks(2).run(work) == [True, True]


def test_c020_clipping_right_after_backward(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(2, 1, bias=False)
        overlap.attach(layer)
        ends = []
        for _ in range(2):
            layer.zero_grad()
            layer(torch.tensor([[1.0, 1.0], [2.0, 3.0]][overlap.rank()])).sum().backward()
            norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            ends.append((norm.item(), layer.weight.grad.flatten().tolist()))
        return ends

    expected = [(pytest.approx(2.5), [pytest.approx(0.6), pytest.approx(0.8)])] * 2
    assert ranks(2).run(work) == [expected] * 2


def test_c094_one_graph_with_many_small_buckets(ranks):
    def work():
        overlap.init()
        rank, size = overlap.rank(), overlap.size()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()
        one = copy.deepcopy(model)
        overlap.attach(model, bucket_mb=1e-4)
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4 * size, 8, dtype=torch.float64)
            for each, inputs in ((compiled, x[4 * rank : 4 * rank + 4]), (one, x)):
                each.zero_grad()
                each(inputs).square().mean().backward()
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        return len(graphs)

    assert ranks(2).run(work) == [1, 1]


def test_complex_parameters(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
        nn.init.ones_(layer.weight)
        attached = overlap.attach(layer)
        x = torch.tensor([complex(overlap.rank() + 1, 2)])
        layer(x).abs().square().sum().backward()
        mean = layer.weight.grad.item()
        layer.zero_grad()
        attached.weight = overlap.rank()  # only rank 1 counts
        layer(x).abs().square().sum().backward()
        return mean, layer.weight.grad.item()

    # The gradient of |wx|^2 is 2 w |x|^2: 10 on rank 0, 16 on rank 1.
    assert ranks(2).run(work) == [(pytest.approx(13), pytest.approx(16))] * 2


def test_c097_nothing_grows(ranks):
    def work():
        overlap.init()
        layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        attached = overlap.attach(layers)
        optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
        x = torch.randn(4, 16)
        sizes = []
        for step in range(3000):
            optimizer.zero_grad()
            attached.weight = 1 + step % 3
            layers(x).square().mean().backward()
            optimizer.step()
            if step in (300, 2999):
                sizes.append(usage())
        overlap.barrier()  # a rank that leaves ends a thread of the other, which may be measuring still
        return sizes

    for (before, *others), (after, *others_after) in ranks(2).run(work):
        assert after < 1.02 * before
        assert others == others_after


def test_gan_with_a_step_for_each_network(ranks):
    def work():
        overlap.init()
        rank, size = overlap.rank(), overlap.size()
        torch.manual_seed(0)
        networks = [nn.Linear(2, 2).double(), nn.Linear(2, 1).double()]
        plain = copy.deepcopy(networks)
        for network in networks:
            overlap.attach(network)
        pairs = []
        for g, d in (networks, plain):
            optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (g, d)]
            torch.manual_seed(1)
            for _ in range(4):
                z = torch.randn(4 * size, 2, dtype=torch.float64)
                mine = z[4 * rank : 4 * rank + 4] if g is networks[0] else z
                optimizers[1].zero_grad()
                (d(mine) - d(g(mine).detach())).mean().backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                d(g(mine)).square().mean().backward()
                optimizers[0].step()
            pairs.append([*g.parameters(), *d.parameters()])
        for p, q in zip(*pairs, strict=True):
            torch.testing.assert_close(p, q)
        return [p.tolist() for p in pairs[0]]

    results = ranks(2).run(work)
    assert results[0] == results[1]
