"""`overlap.shard`: each rank its own part of the data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import runtime

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

    from overlap.frameworks.torch.sampler import ShardedLoader, ShardedStream

    Part = TypeVar("Part", np.ndarray, torch.Tensor, Sequence[Any])


@overload
def shard(data: DataLoader[Any], *, seed: int = 0, evaluation: bool = False) -> ShardedLoader: ...
@overload
def shard(  # type: ignore[overload-overlap]  # a stream is a Dataset with another part
    data: IterableDataset[Any], *, seed: int = 0, evaluation: bool = False
) -> ShardedStream: ...
@overload
def shard(data: Dataset[Any], *, seed: int = 0, evaluation: bool = False) -> Subset[Any]: ...
@overload
def shard(data: Part, *, seed: int = 0, evaluation: bool = False) -> Part: ...
def shard(data: Any, *, seed: int = 0, evaluation: bool = False) -> Any:
    """This rank's part of `data`: a loader's batches, with another order in each epoch, or samples.

    Of a torch DataLoader, for training. An epoch's order comes from the loader's own sampler (shuffled or
    not), drawn with a seed common to all ranks. Together the ranks' batches of a step are the batch that one
    process with `size()` times the batch size would take: complete and disjoint, and all ranks have the same
    number of batches. (Where the epoch's last step has fewer samples than ranks, a rank left without gets one
    of the epoch's first.)

    With `evaluation=True` no sample is used twice: together the ranks have each one exactly once, and the
    last ranks may have one batch fewer. Average over samples, not over ranks, and don't train with it.

    Of a DataLoader over an IterableDataset, each rank gets every `size()`-th sample, in every epoch as the
    data set gives them, dealt on among the loader's workers. The data set must give all of its samples, in
    the same order, in every process: one that already divides them by rank or worker would lose some. Ranks
    may have different numbers of batches: put the training loop into `attached.join()`, or make as many
    steps on every rank.

    Of a torch Dataset, an array, a tensor or a sequence: the rank's consecutive part, each sample exactly
    once, in order; sizes differ by at most one. A part of an array or tensor aliases it.

    Args:
        data: one of these; the same on every rank. It is not changed. A DataLoader's `batch_size` is that of
            one rank; workers, collation and pinning are as it has them.
        seed: of all epochs' orders of a DataLoader; the same on every rank.
        evaluation: of a DataLoader: each sample exactly once, as said above.

    Returns:
        A ShardedLoader of a DataLoader; a torch Subset of a Dataset (of an IterableDataset another one); else
        a slice of `data`.

    Raises:
        TypeError: `data` is none of these, or its DataLoader makes batches with a batch_sampler of its own.
        ValueError: `seed` is negative; `evaluation` with a loader that drops the last batch.
    """
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, not {seed!r}")
    sets = sys.modules.get("torch.utils.data")
    if sets is not None and isinstance(data, sets.DataLoader):
        from overlap.frameworks.torch.sampler import shard_loader

        runtime.init()
        return shard_loader(data, runtime.rank(), runtime.size(), seed, evaluation)
    if sets is not None and isinstance(data, sets.IterableDataset):
        from overlap.frameworks.torch.sampler import ShardedStream

        runtime.init()
        return ShardedStream(data, runtime.rank(), runtime.size())
    if sets is not None and isinstance(data, sets.Dataset):
        if not hasattr(data, "__len__"):
            raise TypeError(f"data set {type(data).__name__} has no length (__len__), so it can't be shared")
        return sets.Subset(data, _part(range(len(data))))
    if not _is_sequence(data):
        raise TypeError(
            f"data must be a torch DataLoader or Dataset, an array, a tensor or a sequence, not "
            f"{type(data).__name__}"
        )
    return _part(data)


def _part(data: Any) -> Any:
    """This rank's consecutive elements."""
    runtime.init()
    count, rank, size = len(data), runtime.rank(), runtime.size()
    return data[count * rank // size : count * (rank + 1) // size]


def _is_sequence(data: Any) -> bool:
    """Whether `data` can be sliced along a first dimension."""
    for module, name in (("numpy", "ndarray"), ("torch", "Tensor")):
        if module in sys.modules and isinstance(data, getattr(sys.modules[module], name)):
            return bool(data.ndim)
    return isinstance(data, Sequence) and not isinstance(data, (str, bytes))
