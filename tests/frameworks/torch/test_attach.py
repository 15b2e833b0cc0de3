"""Gradients under `overlap.attach` are those of one process on the whole batch, whatever the model does."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.utils.checkpoint import checkpoint

import overlap
from tests.frameworks.torch.models import linear


def digest(model: nn.Module) -> str:
    """Of all parameters and gradients, bit for bit."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        if parameter.grad is not None:
            sha.update(parameter.grad.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train_beside_one_process(build, steps=4, bucket_mb=0.05, shape=(12,), batch=6, loop=None):
    """Train a model on every rank, and a copy of it on the whole batch; all gradients must agree.

    Returns a digest of what this rank ends with.
    """
    overlap.init()
    rank, size = overlap.rank(), overlap.size()
    torch.manual_seed(rank)  # attach makes the replicas equal
    model = build().double()
    attached = overlap.attach(model, bucket_mb=bucket_mb)
    one = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, one)]
    for step in range(steps):
        torch.manual_seed(1000 + step)
        whole = torch.randn(batch * size, *shape, dtype=torch.float64)
        part = whole[batch * rank : batch * (rank + 1)]
        for m, x, optimizer in zip((model, one), (part, whole), optimizers, strict=True):
            optimizer.zero_grad()
            (loop or (lambda m, x, _: m(x).square().mean().backward()))(
                m, x, attached if m is model else None
            )
        for (name, mine), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-13, msg=name)
                assert mine.grad.stride() == theirs.grad.stride(), name
        for optimizer in optimizers:
            optimizer.step()
    return digest(model)


def mlp():
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.body[0].weight.requires_grad_(False)
        self.never = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.shared, self.last, self.reentrant = nn.Linear(12, 12), nn.Linear(12, 2), reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=self.reentrant))
        return self.last(x)


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(128, 5),
    ).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "build",
    [mlp, Tied, Frozen, lambda: Checkpointed(True), lambda: Checkpointed(False)],
    ids=["mlp", "tied", "frozen", "reentrant", "non-reentrant"],
)
def test_equals_one_process(ranks, size, build):
    assert len(set(ranks(size).run(train_beside_one_process, build))) == 1


def test_channels_last_keeps_strides(ranks):
    assert len(set(ranks(2).run(train_beside_one_process, conv, shape=(3, 6, 6)))) == 1


def test_bucket_sizes_do_not_change_the_result(ranks):
    digests = [ranks(2).run(train_beside_one_process, mlp, bucket_mb=mb) for mb in (0.001, 0.01, 10)]
    assert len({digest for run in digests for digest in run}) == 1


def test_no_sync_accumulates(ranks):
    def loop(model, x, attached):
        half = len(x) // 2
        if attached is None:  # the whole batch: ranks' halves lie apart
            (2 * model(x).square().mean()).backward()
            return
        with attached.no_sync():
            model(x[:half]).square().mean().backward()
        model(x[half:]).square().mean().backward()

    assert len(set(ranks(2).run(train_beside_one_process, mlp, loop=loop))) == 1


def test_two_backwards_before_a_step(ranks):
    def loop(model, x, _):
        model(x).square().mean().backward()
        model(x).abs().mean().backward()

    assert len(set(ranks(2).run(train_beside_one_process, mlp, loop=loop))) == 1


def test_two_forwards_one_backward(ranks):
    def loop(model, x, _):
        (model(x).square().mean() + model(x.neg()).square().mean()).backward()

    assert len(set(ranks(2).run(train_beside_one_process, mlp, loop=loop))) == 1


def test_zeroed_gradients_instead_of_none(ranks):
    def loop(model, x, _):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        model(x).square().mean().backward()

    assert len(set(ranks(2).run(train_beside_one_process, mlp, loop=loop))) == 1


def test_compiled_whole(ranks):
    def work():
        overlap.init()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        plain = copy.deepcopy(model)
        attached = overlap.attach(model, bucket_mb=0.0001)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            plain.zero_grad()
            compiled(x).sum().backward()
            plain(x).sum().backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
        return attached.stats().buckets

    assert ranks(2).run(work) == [5, 5]


def test_autocast_scaler_and_clipping(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        overlap.attach(layer)
        x = torch.tensor([[1.0, 1.0], [2.0, 3.0]][overlap.rank()])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        return norm.item(), layer.weight.grad.tolist()

    for norm, grad in ranks(2).run(work):
        assert norm == pytest.approx(2.5)
        assert grad[0] == pytest.approx([0.6, 0.8])


# -- situations by number --


def test_c001_unused_everywhere(ranks):
    def work():
        overlap.init()
        model = nn.ModuleDict({"a": linear(), "b": linear()})
        overlap.attach(model)
        rounds = []
        for _ in range(2):
            model.zero_grad()
            model["a"](torch.tensor([overlap.rank() + 1.0])).sum().backward()
            rounds.append((model["a"].weight.grad.item(), model["b"].weight.grad))
        return rounds

    assert ranks(2).run(work) == [[(1.5, None), (1.5, None)]] * 2


def test_c004_other_branch_on_each_rank(ranks):
    def work():
        overlap.init()
        model = nn.ModuleDict({"a": linear(), "b": linear()})
        overlap.attach(model)
        grads = []
        for _ in range(3):
            model.zero_grad()
            model["ab"[overlap.rank()]](torch.ones(1)).sum().backward()
            grads.append((model["a"].weight.grad.item(), model["b"].weight.grad.item()))
        return grads

    assert ranks(2).run(work) == [[(0.5, 0.5)] * 3] * 2


def test_use_changes_from_step_to_step(ranks):
    def work():
        overlap.init()
        model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear()})
        overlap.attach(model)
        grads = []
        for used in ("ab", "bc", "a", "abc", "c"):
            model.zero_grad()
            sum(model[name](torch.tensor([overlap.rank() + 1.0])).sum() for name in used).backward()
            grads.append("".join(name for name in "abc" if model[name].weight.grad is not None))
            assert all(model[name].weight.grad.item() == 1.5 for name in used)
        return grads

    assert ranks(2).run(work) == [["ab", "bc", "a", "abc", "c"]] * 2


def test_c005_one_layer_in_two_reentrant_checkpoints(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(layer.weight)
        overlap.attach(layer)
        grads = []
        for passes in (2, 1, 2, 3, 2):  # from one to two: the second comes late
            layer.zero_grad()
            x = ((overlap.rank() + 1) * torch.ones(1, 2)).requires_grad_()
            for _ in range(passes):
                x = checkpoint(layer, x, use_reentrant=True)
            x.sum().backward()
            grads.append(layer.weight.grad.unique().tolist())
        return grads

    assert ranks(2).run(work) == [[[6.0], [1.5], [6.0], [18.0], [6.0]]] * 2


def test_c007_embedding_tied_to_output(ranks):
    def work():
        overlap.init()
        embedding, output = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        output.weight = embedding.weight
        model = nn.ModuleList([embedding, output]).double()
        nn.init.ones_(embedding.weight)
        overlap.attach(model)
        output(embedding(torch.tensor([overlap.rank()]))).sum().backward()
        return embedding.weight.grad.tolist()

    assert ranks(2).run(work) == [[[2.5, 2.5], [2.5, 2.5], [1.0, 1.0]]] * 2


def test_c010_gradient_penalty(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        grads = []
        for _ in range(3):
            layer.zero_grad()
            x = torch.tensor([overlap.rank() + 1.0], requires_grad=True)
            (slope,) = torch.autograd.grad((layer(x) * x).sum(), x, create_graph=True)
            slope.square().sum().backward()
            grads.append(layer.weight.grad.item())
        return grads

    assert ranks(2).run(work) == [[20.0] * 3] * 2


def test_create_graph_does_not_poison_later_steps(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        grads = []
        for create_graph in (False, True, False, True):
            layer.zero_grad()
            layer(torch.tensor([overlap.rank() + 1.0])).square().sum().backward(create_graph=create_graph)
            grads.append((layer.weight.grad.item(), layer.weight.grad.requires_grad))
        return grads

    assert ranks(2).run(work) == [[(5.0, False)] * 4] * 2


def test_c011_two_forwards_through_batch_norm(ranks):
    def work():
        overlap.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        overlap.attach(model)
        mine, other = copy.deepcopy(model), copy.deepcopy(model)
        batches = [torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(r)) for r in range(2)]
        rank = overlap.rank()
        for m, (one, two) in ((model, batches[rank]), (mine, batches[rank]), (other, batches[1 - rank])):
            (m(one).square().sum() + m(two).square().sum()).backward()
        for averaged, a, b in zip(model.parameters(), mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(averaged.grad, (a.grad + b.grad) / 2)
        torch.testing.assert_close(model[1].running_mean, mine[1].running_mean)
        return model[1].running_mean.tolist()

    first, second = ranks(2).run(work)
    assert first != second


def test_c016_no_sync_is_decided_at_backward(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer)
        x = torch.tensor([overlap.rank() + 1.0])
        first, second = layer(x), layer(10 * x)
        with attached.no_sync():
            first.sum().backward()
        local, sent = layer.weight.grad.item(), attached.stats().steps
        second.sum().backward()
        return local, sent, layer.weight.grad.item()

    assert ranks(2).run(work) == [(1.0, 0, 16.5), (2.0, 0, 16.5)]


def test_c028_nan_reaches_all_ranks(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(2, 1, bias=False)
        overlap.attach(layer)
        layer(torch.tensor([[1.0, 1.0], [float("nan"), 2.0]][overlap.rank()])).sum().backward()
        return str(layer.weight.grad.tolist())

    assert ranks(2).run(work) == ["[[nan, 1.5]]"] * 2


def test_c029_empty_zero_dim_and_transposed(ranks):
    def work():
        overlap.init()
        model = nn.Module()
        model.empty = nn.Parameter(torch.empty(0, 3))
        model.s = nn.Parameter(torch.tensor(1.0))
        model.t = nn.Parameter(torch.ones(2, 3).t())
        overlap.attach(model)
        results = []
        for _ in range(2):
            model.zero_grad()
            k = overlap.rank() + 1.0
            (model.empty.sum() + model.s * k + (model.t * k).sum()).backward()
            results.append((model.s.grad.item(), model.t.grad.tolist(), tuple(model.empty.grad.shape)))
        return results

    assert ranks(2).run(work) == [[(1.5, [[1.5, 1.5]] * 3, (0, 3))] * 2] * 2


def test_c031_mixed_dtypes(ranks):
    kinds = ("float32", "float64", "float16", "bfloat16", "complex64")

    def work():
        overlap.init()
        model = nn.Module()
        for kind in kinds:
            setattr(model, f"p_{kind}", nn.Parameter(torch.ones(1, dtype=getattr(torch, kind))))
        overlap.attach(model)
        for _ in range(2):
            model.zero_grad()
            terms = [(p * (overlap.rank() + 1)).real.sum().double() for p in model.parameters()]
            terms.append(model.p_float64.sum() * 2.0**-40)
            sum(terms).backward()
        grads = {kind: getattr(model, f"p_{kind}").grad for kind in kinds}
        return {kind: (grad.item(), grad.dtype) for kind, grad in grads.items()}

    for grads in ranks(2).run(work):
        assert grads.pop("float64") == (1.5 + 2.0**-40, torch.float64)
        assert grads == {kind: (1.5, getattr(torch, kind)) for kind in kinds if kind != "float64"}


def test_c067_model_is_unchanged(ranks):
    def work():
        overlap.init()
        model = mlp()
        keys, kind = list(model.state_dict()), type(model)
        plain = len(pickle.dumps(model))
        overlap.attach(model)
        x = torch.randn(4, 12)
        model(x).sum().backward()
        assert (list(model.state_dict()), type(model)) == (keys, kind)
        twin = copy.deepcopy(model)
        assert len(pickle.dumps(twin)) < plain * 1.1 + 20_000  # gradients are not a bucket each
        if overlap.rank() == 0:
            twin(x).sum().backward()  # sends nothing, waits for nobody
        pickle.loads(pickle.dumps(model))(x)
        file = io.BytesIO()
        torch.save(model[0].bias.grad, file)
        return len(file.getvalue())

    assert max(ranks(2).run(work)) < 4000


def test_c073_same_bits_in_every_run(ranks):
    runs = [tuple(ranks(3).run(train_beside_one_process, mlp, steps=10)) for _ in range(2)]
    assert len({digest for run in runs for digest in run}) == 1


# -- life after attach --


def test_kept_gradient_stays(ranks):
    def work():
        overlap.init()
        layer = nn.Linear(3, 3)
        overlap.attach(layer)
        kept = []
        for step in range(4):
            layer.zero_grad()
            layer(torch.full((1, 3), overlap.rank() + step + 1.0)).sum().backward()
            kept.append(layer.weight.grad)
        return [grad.unique().tolist() for grad in kept]

    assert ranks(2).run(work) == [[[1.5], [2.5], [3.5], [4.5]]] * 2


def test_unfrozen_everywhere_joins(ranks):
    def work():
        overlap.init()
        model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear()})
        model["a"].weight.requires_grad_(False)
        overlap.attach(model)
        grads = []
        for step in range(4):
            if step == 2:
                model["a"].weight.requires_grad_(True)
            model.zero_grad()
            used = "bc" if step < 2 else "abc"
            sum(model[name](torch.tensor([overlap.rank() + 1.0])).sum() for name in used).backward()
            grads.append([model[n].weight.grad.item() for n in used])
        return grads

    assert ranks(2).run(work) == [[[1.5] * 2] * 2 + [[1.5] * 3] * 2] * 2


def test_c070_unfrozen_on_one_rank(ranks):
    def work():
        overlap.init()
        model = nn.ModuleDict({"a": linear(), "b": linear()})
        model["a"].weight.requires_grad_(False)
        overlap.attach(model)
        for step in range(3):
            if step == 2 and overlap.rank() == 1:
                model["a"].weight.requires_grad_(True)
            try:
                (model["a"](torch.ones(1)) + model["b"](torch.ones(1))).sum().backward()
            except overlap.MismatchError as error:
                return step, str(error)
        return None

    first, second = ranks(2).run(work)
    assert first == second
    assert first[0] == 2
    assert "'a.weight' is frozen on rank 0 but trainable on rank 1" in first[1]


def test_backward_that_raises_on_one_rank(ranks):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            raise KeyError("in backward")

    def work():
        overlap.init()
        model = nn.Sequential(linear(), linear())
        overlap.attach(model)
        x = torch.tensor([overlap.rank() + 1.0])
        seen = []
        for bad in (False, True, False):
            model.zero_grad()
            hidden = model[0](x)
            if bad and overlap.rank() == 1:
                hidden = Raises.apply(hidden)
            try:
                model[1](hidden).sum().backward()
                seen.append(model[0].weight.grad.item())
            except (KeyError, overlap.BackwardAborted) as error:
                seen.append((type(error).__name__, getattr(error, "rank", None)))
        return seen

    assert ranks(2).run(work) == [
        [1.5, ("BackwardAborted", 1), 1.5],
        [1.5, ("KeyError", None), 1.5],
    ]


def test_other_number_of_backwards_is_an_error(ranks):
    def work():
        overlap.init()
        model = linear()
        overlap.attach(model)
        model(torch.ones(1)).sum().backward()
        if overlap.rank() == 0:
            model(torch.ones(1)).sum().backward()
        return None

    with pytest.raises(overlap.RankFailed, match="PeerLost"):
        ranks(2).run(work)


def test_two_models_at_once(ranks):
    def work():
        overlap.init()
        generator, critic = linear(value=2.0), linear(value=3.0)
        overlap.attach(generator)
        overlap.attach(critic)
        x = torch.tensor([overlap.rank() + 1.0])
        for _ in range(3):
            generator.zero_grad()
            critic.zero_grad()
            critic(generator(x)).sum().backward()
        return generator.weight.grad.item(), critic.weight.grad.item()

    assert ranks(2).run(work) == [(4.5, 3.0)] * 2


def test_backward_in_a_forked_child_is_local(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        x = torch.tensor([overlap.rank() + 1.0])
        layer(x).sum().backward()
        child = os.fork()
        if child == 0:
            layer.zero_grad()
            layer(x).sum().backward()
            os._exit(int(layer.weight.grad.item() * 10))
        local = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) / 10
        parents = layer.weight.grad.item()
        layer.zero_grad()
        layer(x).sum().backward()
        return local, parents, layer.weight.grad.item()

    assert ranks(2).run(work, timeout_s=60) == [(1.0, 1.5, 1.5), (2.0, 1.5, 1.5)]


def test_detach_and_attach_again(ranks):
    def work():
        overlap.init()
        layer = linear()
        attached = overlap.attach(layer)
        with pytest.raises(ValueError, match="'weight' is attached already"):
            overlap.attach(layer)
        x = torch.tensor([overlap.rank() + 1.0])
        layer(x).sum().backward()
        attached.detach()
        attached.detach()
        kept = layer.weight.grad.item()
        layer.zero_grad()
        layer(x).sum().backward()
        alone = layer.weight.grad.item()
        overlap.attach(layer)
        layer.zero_grad()
        layer(x).sum().backward()
        return kept, alone, layer.weight.grad.item()

    assert ranks(2).run(work) == [(1.5, 1.0, 1.5), (1.5, 2.0, 1.5)]


def test_buckets_leave_while_backward_runs(ranks):
    def work():
        overlap.init()
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
        attached = overlap.attach(model, bucket_mb=0.3)
        sent_before_end = []
        add = attached._rounds.recorder.add

        def spy(handles, ended_s, end_s):
            sent_before_end.append([handle.submitted_s < ended_s for handle in handles])
            add(handles, ended_s, end_s)

        attached._rounds.recorder.add = spy
        for _ in range(3):
            model(torch.randn(8, 300)).sum().backward()
        stats = attached.stats()
        assert stats.steps == 3
        assert stats.comm_ms == pytest.approx(stats.hidden_ms + stats.exposed_ms)
        return sent_before_end

    for first, *later in ranks(2).run(work):
        assert not any(first)  # the first backward teaches the order
        assert all(all(round) and len(round) == 6 for round in later)


def test_one_parameter_of_400_mb(ranks):
    """One bucket far larger than a bucket's limit, averaged and read to its last element."""

    def work():
        overlap.init()
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(100_000_000))
        overlap.attach(model)
        factors = torch.arange(1000.0).mul_(overlap.rank() + 1)
        found = []
        for _ in range(2):  # the second with a plan
            model.weight.grad = None
            (model.weight.view(-1, 1000) @ factors).sum().backward()
            found.append(bool((model.weight.grad.view(-1, 1000) == torch.arange(1000.0) * 1.5).all()))
        return found

    assert ranks(2).run(work) == [[True, True]] * 2


def test_ten_thousand_parameters(ranks):
    def work():
        overlap.init()
        model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(10_000)])
        overlap.attach(model)
        for _ in range(2):
            for parameter in model:
                parameter.grad = None
            (torch.cat(list(model)).sum() * (overlap.rank() + 1)).backward()
        return {parameter.grad.item() for parameter in model}

    assert ranks(2).run(work) == [{1.5}] * 2


def test_gradients_are_kept_once():
    def peak(attach):
        import psutil

        overlap.init()
        model = nn.Sequential(*[nn.Linear(1500, 1500, bias=False) for _ in range(8)])
        if attach:
            overlap.attach(model)
        process, seen = psutil.Process(), []
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(4, 1500)).sum().backward()
            seen.append(process.memory_full_info().pss)
        return max(seen) / 1e6

    plain, attached = (max(overlap.run(peak, attach, np=2)) for attach in (False, True))
    # 72 MB of gradients, 9 MB the largest.
    assert attached - plain < 9 + 16


def test_world_of_one_sends_nothing():
    layer = linear()
    try:
        attached = overlap.attach(layer)
        layer(torch.ones(1)).sum().backward()
        assert layer.weight.grad.item() == 1.0
        with attached.no_sync():
            layer(torch.ones(1)).sum().backward()
        assert layer.weight.grad.item() == 2.0
        attached.detach()
    finally:
        overlap.shutdown()


def test_detached_model_leaves_nothing(ranks):
    def work():
        import gc
        import threading
        import weakref

        def train():
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            attached = overlap.attach(model)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            attached.detach()
            return weakref.ref(model[0].weight)

        overlap.init()
        parameters, sizes = [], []
        for _ in range(3):
            parameters.append(train())
            gc.collect()
            sizes.append(len(os.listdir("/proc/self/fd")))
        threads = [thread.name for thread in threading.enumerate()]
        return [parameter() is None for parameter in parameters], len(set(sizes)), threads

    for freed, sizes, threads in ranks(2).run(work):
        assert freed == [True] * 3
        assert sizes == 1
        assert "overlap-gradients" not in threads


def test_attached_that_is_dropped_goes_on(ranks):
    def work():
        import gc

        overlap.init()
        layer = linear()
        overlap.attach(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        gc.collect()
        if overlap.rank() == 0:
            layer(torch.ones(1)).sum().backward()
        optimizer.step()
        return layer.weight.item()

    assert ranks(2).run(work) == [0.5, 0.5]


def test_parameters_keep_averaging_without_their_module(ranks):
    """Also those that came in a container which nobody keeps."""

    def work():
        import gc

        overlap.init()
        layers = [linear(), linear()]
        overlap.attach(nn.ModuleList(layers))
        averages = []
        for step in range(3):
            gc.collect()
            for layer in layers:
                layer.weight.grad = None
            layers[1](layers[0](torch.full((1,), overlap.rank() + step + 1.0))).sum().backward()
            averages.append([layer.weight.grad.item() for layer in layers])
        return averages

    assert ranks(2).run(work) == [[[1.5, 1.5], [2.5, 2.5], [3.5, 3.5]]] * 2


def test_dropped_models_leave_nothing(ranks):
    """20 of them, one of which refers to its optimizer; memory, descriptors and threads stay as they were."""

    def work():
        import gc
        import threading
        import weakref

        def train(aborts):
            model = nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 1))
            model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            overlap.attach(model)
            for _ in range(2):
                model.optimizer.zero_grad()
                model(torch.ones(1, 1000)).sum().backward()
                model.optimizer.step()
            if aborts:
                hidden = model(torch.ones(1, 1000))
                hidden.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    hidden.sum().backward()
            return [weakref.ref(p) for p in model.parameters()]

        def held():
            with open("/proc/self/maps") as maps:
                shared = sum("memfd:overlap" in line for line in maps)
            with open("/proc/self/statm") as statm:
                pages = int(statm.read().split()[1])
            return (shared, len(os.listdir("/proc/self/fd")), threading.active_count()), pages

        overlap.init()
        before = threading.active_count()
        for number in range(20):
            parameters = train(aborts=number % 2)
            gc.collect()
            assert not any(parameter() for parameter in parameters)
            for thread in threading.enumerate():
                if thread.name == "overlap-gradients":
                    thread.join(30)
            if number == 4:
                first, first_pages = held()
        last, last_pages = held()
        overlap.barrier()  # a rank that leaves ends a thread of the other, which may be counting still
        return first == last, last[2] - before, (last_pages - first_pages) * os.sysconf("SC_PAGESIZE")

    for same, threads, grown in ranks(2).run(work):
        assert same
        assert threads == 0
        assert grown < 4_000_000  # a model's gradients are 2 MB, of which 15 more were made


def test_a_dropped_model_leaves_peers_an_account(ranks):
    """Rank 1 has dropped its model; rank 0, which still trains, is told so."""

    def work():
        import gc

        overlap.init()
        layer = linear()
        overlap.attach(layer)
        layer(torch.ones(1)).sum().backward()
        if overlap.rank() == 1:
            del layer
            gc.collect()
            return None
        with pytest.raises(overlap.PeerLost, match="rank 1 dropped its model"):
            layer(torch.ones(1)).sum().backward()
        return True

    assert ranks(2).run(work) == [True, None]


def test_copies_and_pickles_of_attached_parameters_are_plain(ranks):
    def work():
        import gc

        overlap.init()
        layer = linear()
        layer.weight.note = "kept"
        attached = overlap.attach(layer)
        file = io.BytesIO()
        torch.save(list(layer.parameters()), file)
        bare = io.BytesIO(file.getvalue())
        copies = [copy.deepcopy(layer).weight, copy.copy(layer.weight), *torch.load(bare, weights_only=False)]
        names = [each.note for each in copies[1:]]
        attached.detach()
        gc.collect()
        kinds = {type(vars(each)) for each in [layer.weight, *copies]}
        return kinds == {dict}, names, b"overlap" in bare.getvalue()

    assert ranks(2).run(work) == [(True, ["kept", "kept"], False)] * 2


def test_a_model_that_only_a_graph_refers_to_is_still_averaged(ranks):
    def work():
        import gc

        overlap.init()
        layer = linear()
        overlap.attach(layer)
        loss = (layer.weight * (overlap.rank() + 1)).sum()
        accumulate = loss.grad_fn.next_functions[0][0].next_functions[0][0]
        del layer
        gc.collect()
        loss.backward()
        return accumulate.variable.grad.item()

    assert ranks(2).run(work) == [1.5, 1.5]


def test_a_hook_that_nothing_averages_for_raises(ranks):
    """Never local gradients in silence."""

    def work():
        import gc

        overlap.init()
        layer = linear()
        overlap.attach(layer)
        layer.weight.__dict__ = {}
        gc.collect()
        with pytest.raises(RuntimeError, match="'weight' was dropped before this backward"):
            layer(torch.ones(1)).sum().backward()
        return True

    assert ranks(2).run(work) == [True, True]


@pytest.mark.parametrize("width", [1, 200])
@pytest.mark.parametrize("how", ["data", "set", "half", "share_memory"])
def test_a_gradient_that_was_given_other_memory_goes_on(ranks, how, width):
    """`p.grad.data = clipped` and `model.half().float()` move the very tensor that is the bucket's slice."""

    def work(how, width):
        overlap.init()
        layer = nn.Linear(width, width)
        overlap.attach(layer)
        seen = []
        for step in range(4):
            if step != 2:  # once without: it accumulates into the tensor that was moved
                layer.zero_grad()
            (layer(torch.ones(1, width)).sum() * (step + 1.0) * (overlap.rank() + 1)).backward()
            seen.append(layer.weight.grad[0, 0].item())
            if how == "data":
                layer.weight.grad.data = layer.weight.grad.data.clamp(-99, 99)
            elif how == "set":
                layer.weight.grad.set_(layer.weight.grad.clone())
            elif how == "half":
                layer.half().float()
            else:
                layer.share_memory()
        return seen

    # Step 2 adds 3 times 1 or 2 to the average of step 1: the mean of all is 3 + 4.5.
    assert ranks(2).run(work, how, width) == [[1.5, 3.0, 7.5, 6.0]] * 2


def test_a_backward_that_makes_a_graph_is_warned_of_once(ranks):
    def work():
        overlap.init()
        layer = linear()
        overlap.attach(layer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                layer(torch.ones(1, 1)).square().sum().backward(create_graph=True)
                layer.zero_grad()
            layer(torch.ones(1, 1)).sum().backward()
        return [str(each.message).partition(":")[0] for each in caught if "averaged" in str(each.message)]

    assert ranks(2).run(work) == [["backward(create_graph=True)"]] * 2
