"""The backends that the contract is checked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

# The oracle is no test, and tests are in no package.
sys.path.insert(0, os.path.dirname(__file__))


class Inproc:
    """Threads as ranks."""

    def run(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        from overlap.comm.backends.inproc import run_threads

        return run_threads(size, lambda communicator: work(communicator, *args))


class Shm:
    """Processes as ranks, in pools."""

    def __init__(self, pools: Any) -> None:
        self._pools = pools

    def run(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pools(size).run(in_world, work, *args)


def in_world(work: Callable[..., Any], *args: Any) -> Any:
    """Call `work` with a duplicate of the world's communicator, so that it may leave it in any state."""
    import overlap
    from overlap import runtime
    from overlap.comm import reduce
    from overlap.comm.errors import account_of

    overlap.init()
    # Torch's import in seven processes would take longer than all they do: here numpy's kernels are tested.
    reduce.use_torch(False if overlap.size() == 7 else None)
    communicator = runtime.engine().communicator.split(0)
    assert communicator is not None
    try:
        return work(communicator, *args)
    except BaseException as error:
        communicator.abort(*account_of(error))
        raise
    finally:
        communicator.close()


@pytest.fixture(params=["inproc", "shm"])
def backend(request: pytest.FixtureRequest) -> Inproc | Shm:
    """`backend.run(size, work, *args)` calls `work(communicator, *args)` on every rank."""
    return Inproc() if request.param == "inproc" else Shm(request.getfixturevalue("pools"))
