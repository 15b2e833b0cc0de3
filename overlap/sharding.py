"""`overlap.shard`: each rank its own part of the data."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import runtime

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from overlap.frameworks.torch.sampler import ShardedLoader


def shard(loader: DataLoader[Any], *, seed: int = 0) -> ShardedLoader:
    """Iterate over this rank's part of `loader`'s batches, with another order in each epoch.

    An epoch's order comes from the loader's own sampler (shuffled or not), drawn with a seed common to all
    ranks. Together the ranks' batches of a step are the batch that one process with `size()` times the batch
    size would take: complete and disjoint, and all ranks have the same number of batches. (Where the epoch's
    last step has fewer samples than ranks, a rank left without gets one of the epoch's first.)

    Args:
        loader: a torch DataLoader over a map-style data set; its `batch_size` is that of one rank. It is not
            changed; workers, collation and pinning are as it has them.
        seed: of all epochs' orders; the same on every rank.

    Raises:
        TypeError: not such a loader.
        ValueError: `seed` is negative.
    """
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        raise TypeError(f"loader must be a torch DataLoader, not {type(loader).__name__}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, not {seed!r}")
    from overlap.frameworks.torch.sampler import shard as shard_loader

    runtime.init()
    return shard_loader(loader, runtime.rank(), runtime.size(), seed)
