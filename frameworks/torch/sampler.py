"""Each rank its own part of a data loader's samples, in another order each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler


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
    """

    def __init__(
        self, sampler: Any, batch_size: int, drop_last: bool, rank: int, size: int, seed: int
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.rank, self.size, self.seed = rank, size, seed
        self.epoch = -1

    def __len__(self) -> int:
        step = self.batch_size * self.size
        return len(self.sampler) // step if self.drop_last else -(-len(self.sampler) // step)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        order = self._order()
        step = self.batch_size * self.size
        for start in range(0, len(self) * step, step):
            samples = order[start : start + step]
            if len(samples) < self.size:
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


class ShardedLoader:
    """What `overlap.shard` returns: iterating it is one epoch of this rank's batches.

    Attributes:
        loader: the torch DataLoader underneath.
    """

    def __init__(self, loader: DataLoader[Any], batches: ShardedBatches) -> None:
        self.loader, self._batches = loader, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def dataset(self) -> Any:
        """The data set, whole."""
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Not needed: every iteration is an epoch of its own. For resuming: the next one has this number."""
        self._batches.epoch = epoch - 1


def shard(loader: DataLoader[Any], rank: int, size: int, seed: int) -> ShardedLoader:
    """See `overlap.shard`."""
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "loader has an IterableDataset, which has no order to share: give each rank its own part"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise TypeError("loader must make its batches by batch_size, not by a batch_sampler of its own")
    batches = ShardedBatches(loader.sampler, loader.batch_size, loader.drop_last, rank, size, seed)
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
    return ShardedLoader(DataLoader(loader.dataset, batch_sampler=batches, **options), batches)
