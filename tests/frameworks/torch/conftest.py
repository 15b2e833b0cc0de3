"""Ranks that the tests of one session share: importing torch in each is what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from overlap.launch import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2).run(work)` calls `work` on two ranks; they are started anew after a test broke them."""
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
