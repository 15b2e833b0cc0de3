"""A process group of torch's gloo among the ranks of a benchmark, to compare with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.span import Span


@contextmanager
def process_group(communicator: Communicator) -> Iterator[bool]:
    """Collective: a default process group of gloo inside the block; gives False where torch has none."""
    if importlib.util.find_spec("torch") is None:
        yield False
        return
    import torch.distributed as dist

    if not dist.is_available():
        yield False
        return
    tcp_store = dist.TCPStore  # type: ignore[attr-defined]  # public, but torch does not say so

    first, size = communicator.rank == 0, communicator.size
    # Rank 0 takes a free port and tells the others: nothing is left in a file or taken twice.
    store = tcp_store("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if first else None
    port = np.array([store.port if store else 0])
    communicator.broadcast(Span.wrap(port), 0)
    store = store or tcp_store("127.0.0.1", int(port[0]), size, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=communicator.rank, world_size=size)
    try:
        yield True
    finally:
        dist.destroy_process_group()
    communicator.barrier()  # rank 0 holds the store until nobody needs it
