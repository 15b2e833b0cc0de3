"""Each rank its own part of a data loader's samples, in another order each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    get_worker_info,
)


class ShardedBatches(Sampler[list[int]]):
    """One rank's batches of an epoch's global order.

    The order is drawn from the user's own sampler, with a seed that all ranks share and that changes every
    epoch; so all ranks draw the same. It is cut into steps of `size * batch_size` samples, and each step into
    `size` equal parts. The samples of a last, smaller step are dealt out as evenly as they go, so that every
    rank has the same number of batches; where they are fewer than ranks, the order's first samples fill up.

    Args:
        sampler: gives the epoch's order; with a finite length.
        batch_size: of one rank.
        drop_last: leave out a last, smaller step.
        fill: whether samples are repeated so that ranks have equally many batches. Without, a rank that the
            last step has no sample for leaves it out.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool,
        rank: int,
        size: int,
        seed: int,
        fill: bool = True,
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.rank, self.size, self.seed, self.fill = rank, size, seed, fill
        self.epoch = -1

    def __len__(self) -> int:
        steps, left = divmod(len(self.sampler), self.batch_size * self.size)
        takes_part = left > (0 if self.fill else self.rank)
        return steps + (takes_part and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        order = self._order()
        step = self.batch_size * self.size
        for start in range(0, len(self) * step, step):
            samples = order[start : start + step]
            if self.fill and len(samples) < self.size:
                samples = samples + [order[i % len(order)] for i in range(self.size - len(samples))]
            share, more = divmod(len(samples), self.size)
            first = self.rank * share + min(self.rank, more)
            yield samples[first : first + share + (self.rank < more)]

    def _order(self) -> list[int]:
        """The epoch's order, the same on every rank, whatever random numbers the rank has used."""
        generator = getattr(self.sampler, "generator", None)
        seed = self.seed * 1_000_003 + self.epoch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if generator is not None:
                generator.manual_seed(seed)
            return list(self.sampler)


class ShardedStream(IterableDataset[Any]):
    """One rank's part of an iterable data set: every size-th sample, dealt on among the loader's workers.

    Assumes: `whole` gives the same samples in the same order in every process.

    Attributes:
        whole: the data set.
    """

    def __init__(self, whole: IterableDataset[Any], rank: int, size: int) -> None:
        self.whole, self.rank, self.size = whole, rank, size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        return islice(self.whole, self.rank * count + number, None, self.size * count)


class ShardedLoader:
    """What `overlap.shard` makes of a loader: iterating it is one epoch of this rank's batches.

    Attributes:
        loader: the torch DataLoader underneath.
    """

    def __init__(self, loader: DataLoader[Any], batches: ShardedBatches | None) -> None:
        self.loader, self._batches = loader, batches

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("an IterableDataset's loader has no length: iterate over it")
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def dataset(self) -> Any:
        """The data set, whole."""
        data = self.loader.dataset
        return data.whole if isinstance(data, ShardedStream) else data

    def set_epoch(self, epoch: int) -> None:
        """Not needed: every iteration is an epoch of its own. For resuming: the next one has this number.

        An IterableDataset's order is its own: here it does nothing.
        """
        if self._batches is not None:
            self._batches.epoch = epoch - 1


def shard_loader(loader: DataLoader[Any], rank: int, size: int, seed: int, evaluation: bool) -> ShardedLoader:
    """See `overlap.shard`."""
    if evaluation and loader.drop_last:
        raise ValueError("loader has drop_last=True, but evaluation=True uses every sample: drop one of them")
    if isinstance(loader.dataset, IterableDataset):
        stream = ShardedStream(loader.dataset, rank, size)
        batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return ShardedLoader(DataLoader(stream, **batching, **_options(loader)), None)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise TypeError("loader must make its batches by batch_size, not by a batch_sampler of its own")
    batches = ShardedBatches(
        loader.sampler, loader.batch_size, loader.drop_last, rank, size, seed, fill=not evaluation
    )
    return ShardedLoader(DataLoader(loader.dataset, batch_sampler=batches, **_options(loader)), batches)


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """What makes a loader like `loader`, but for its batches."""
    names: Sequence[str] = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
    )
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)  # deprecated in torch, and a warning even where it is empty
    return options
