"""`overlap.shard`: complete, disjoint, another order each epoch, the same number of batches on every rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import overlap
from overlap.frameworks.torch.sampler import ShardedBatches


def epochs_of(count, batch_size, size, epochs=2, **options):
    """For each epoch, each rank's batches."""
    samplers = [
        ShardedBatches(
            torch.utils.data.RandomSampler(range(count)), batch_size, rank=rank, size=size, **options
        )
        for rank in range(size)
    ]
    return [[list(sampler) for sampler in samplers] for _ in range(epochs)]


@pytest.mark.parametrize("count", [1, 2, 5, 10, 11, 12, 64, 65])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_parts(count, size, drop_last):
    for ranks in epochs_of(count, 4, size, drop_last=drop_last, seed=0):
        assert len({len(batches) for batches in ranks}) == 1
        samples = sorted(sample for batches in ranks for batch in batches for sample in batch)
        if drop_last:
            assert len(samples) == len(set(samples)) == count // (4 * size) * 4 * size
        else:
            left = count % (4 * size)
            filled = max(0, size - left) if left else 0
            assert set(samples) == set(range(count))
            assert len(samples) == count + filled
        for batches in ranks:
            assert all(0 < len(batch) <= 4 for batch in batches)


def test_c076_epochs_differ_and_runs_agree():
    first = epochs_of(10, 5, 2, drop_last=False, seed=0)
    assert first[0] != first[1]
    assert first == epochs_of(10, 5, 2, drop_last=False, seed=0)
    assert first != epochs_of(10, 5, 2, drop_last=False, seed=1)


def test_ranks_agree_whatever_random_numbers_they_used(ranks):
    def work():
        overlap.init()
        torch.manual_seed(overlap.rank())
        data = TensorDataset(torch.arange(20))
        before = torch.random.get_rng_state()
        plain = overlap.shard(DataLoader(data, batch_size=2, shuffle=True))
        own = DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(overlap.rank())
        )
        weighted = DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 20, 8))
        assert torch.equal(before, torch.random.get_rng_state())
        loaders = [plain, overlap.shard(own), overlap.shard(weighted)]
        return [[batch.tolist() for (batch,) in loader] for loader in loaders for _ in range(2)]

    for first, second in zip(*ranks(2).run(work), strict=True):
        assert len(first) == len(second)
        if len(first) == 5:  # without replacement
            assert sorted(sum(first + second, [])) == list(range(20))


def test_order_of_one_process_is_kept_where_nothing_is_shuffled(ranks):
    def work():
        overlap.init()
        loader = overlap.shard(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
        assert len(loader) == 3
        return [batch.tolist() for (batch,) in loader]

    assert ranks(2).run(work) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_workers(ranks):
    def work():
        overlap.init()
        data = TensorDataset(torch.arange(12))
        loader = overlap.shard(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"))
        return [[batch.tolist() for (batch,) in loader] for _ in range(2)]

    first, second = ranks(2).run(work)
    assert sorted(sum(first[0] + second[0], [])) == list(range(12))


def test_set_epoch():
    sampler = ShardedBatches(torch.utils.data.RandomSampler(range(10)), 5, False, 0, 1, 0)
    epochs = [list(sampler) for _ in range(3)]
    sampler.epoch = 1
    assert list(sampler) == epochs[2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: [1, 2], "loader must be a torch DataLoader, not list"),
        (lambda: DataLoader(Stream()), "IterableDataset"),
        (lambda: DataLoader([1, 2], batch_sampler=[[0], [1]]), "batch_size"),
        (lambda: DataLoader([1, 2], batch_size=None), "batch_size"),
    ],
)
def test_loaders_that_cannot_be_shared(loader, text):
    try:
        with pytest.raises(TypeError, match=text):
            overlap.shard(loader())
        with pytest.raises(ValueError, match="seed must be an integer of at least 0, not -1"):
            overlap.shard(DataLoader([1]), seed=-1)
    finally:
        overlap.shutdown()
