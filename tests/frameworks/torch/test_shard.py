"""`overlap.shard`: complete, disjoint, another order each epoch, the same number of batches on every rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import numpy as np
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import overlap
from overlap.frameworks.torch.sampler import ShardedBatches, ShardedStream


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


@pytest.mark.parametrize("count", [0, 1, 2, 5, 11, 12, 13, 24])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_is_evaluated_once(count, size):
    options = {"batch_size": 4, "drop_last": False, "size": size, "seed": 0, "fill": False}
    samplers = [ShardedBatches(range(count), rank=rank, **options) for rank in range(size)]
    ranks = [list(sampler) for sampler in samplers]
    assert sorted(sum(sum(ranks, []), [])) == list(range(count))
    assert [len(sampler) for sampler in samplers] == [len(batches) for batches in ranks]
    assert 0 <= len(ranks[0]) - len(ranks[-1]) <= 1
    assert all(batches == sorted(batches) and [] not in batches for batches in ranks)


def test_evaluation(ranks):
    def work():
        overlap.init()
        torch.manual_seed(overlap.rank())
        data = TensorDataset(torch.arange(13))
        loaders = [
            overlap.shard(
                DataLoader(data, batch_size=4, shuffle=shuffle, num_workers=workers), evaluation=True
            )
            for shuffle, workers in ((False, 0), (True, 2))
        ]
        batches = [[batch.tolist() for (batch,) in loader] for loader in loaders]
        assert [len(loader) for loader in loaders] == [len(each) for each in batches]
        return batches

    (plain0, mixed0), (plain1, mixed1), (plain2, mixed2) = ranks(3).run(work)
    assert [plain0, plain1, plain2] == [[[0, 1, 2, 3], [12]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    mixed = sum(mixed0 + mixed1 + mixed2, [])
    assert mixed != sorted(mixed) == list(range(13))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams(ranks, workers):
    def work():
        overlap.init()
        stream = Stream()
        loader = overlap.shard(
            DataLoader(
                stream, batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
        )
        assert loader.dataset is stream
        loader.set_epoch(3)
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        assert epochs[0] == epochs[1]
        single = overlap.shard(DataLoader(stream, batch_size=None))
        assert list(single) == list(overlap.shard(stream)) == list(range(overlap.rank(), 11, 2))
        return epochs[0]

    first, second = ranks(2).run(work)
    assert sorted(sum(first + second, [])) == list(range(11))
    if not workers:
        assert (first, second) == ([[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9]])


class Squares(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index * index


def test_data_sets_and_sequences(ranks):
    def work():
        overlap.init()
        values = list(range(11))
        array, tensor = np.arange(22).reshape(11, 2), torch.arange(11)
        subset = overlap.shard(Squares())
        parts = [overlap.shard(each) for each in (values, tuple(values), range(11), array[:, 0] // 2, tensor)]
        assert isinstance(subset, Subset)
        assert [type(part) for part in parts] == [list, tuple, range, np.ndarray, torch.Tensor]
        assert np.shares_memory(overlap.shard(array), array)
        assert overlap.shard(array).shape[1] == 2
        assert len(overlap.shard([])) == len(overlap.shard(torch.zeros(0, 3))) == 0
        assert values == list(range(11))
        return [[round(each**0.5) for each in subset]] + [[int(each) for each in part] for part in parts]

    for size in (1, 3):
        for parts in zip(*ranks(size).run(work), strict=True):
            assert sum(parts, []) == list(range(11))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


class Endless(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            lambda: {1: 2},
            "data must be a torch DataLoader or Dataset, an array, a tensor or a sequence, not dict",
        ),
        (lambda: "text", "not str"),
        (lambda: np.array(1), "not ndarray"),
        (lambda: torch.tensor(1), "not Tensor"),
        (lambda: Endless(), "data set Endless has no length"),
        (lambda: DataLoader([1, 2], batch_sampler=[[0], [1]]), "batch_size"),
        (lambda: DataLoader([1, 2], batch_size=None), "batch_size"),
    ],
)
def test_data_that_cannot_be_shared(data, text):
    try:
        with pytest.raises(TypeError, match=text):
            overlap.shard(data())
        with pytest.raises(ValueError, match="seed must be an integer of at least 0, not -1"):
            overlap.shard(DataLoader([1]), seed=-1)
    finally:
        overlap.shutdown()


@pytest.mark.parametrize("data", [[1, 2], Stream()])
def test_evaluation_drops_nothing(data):
    try:
        with pytest.raises(ValueError, match="drop_last=True, but evaluation=True uses every sample"):
            overlap.shard(DataLoader(data, batch_size=1, drop_last=True), evaluation=True)
        assert isinstance(overlap.shard(DataLoader(Stream(), drop_last=True)).loader.dataset, ShardedStream)
    finally:
        overlap.shutdown()
