"""What all Horovod-compatible faces share: start and end, ranks, and what this build has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import process_sets as sets
from . import runtime

_ends: list[Callable[[], None]] = []


def at_shutdown(end: Callable[[], None]) -> None:
    """A face's own part of `shutdown`."""
    _ends.append(end)


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Find the other ranks of this job; calling it again does nothing.

    Args:
        comm: None. (Horovod takes an mpi4py communicator or a list of ranks here.)
        process_sets: to be registered, the same on every rank; or "dynamic", which is always so here.

    Raises:
        ValueError: `comm` is given, or a process set is twice there.
        StartError: not all ranks came.
    """
    if comm is not None and list(comm) != []:
        raise ValueError(
            "comm is not supported: start only the ranks that shall take part, or use a process set"
        )
    runtime.init()
    sets.set_up(process_sets)


def shutdown() -> None:
    """Leave the job. Without `init` it does nothing."""
    runtime.shutdown()
    sets.forget()
    for end in _ends:
        end()


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks."""
    return runtime.size() == runtime.local_size() * runtime.cross_size()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Not there yet.

    Raises:
        ValueError: always.
    """
    raise ValueError("this version of overlap writes no timeline: attached.stats() tells what was hidden")


def stop_timeline() -> None:
    """Not there yet: there is nothing to stop."""


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: there is no MPI in this version."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI is used."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used."""
    return False


def gloo_enabled() -> bool:
    """Whether Horovod's part without MPI is used: overlap's own, which needs none."""
    return True


def gloo_built() -> bool:
    """Whether jobs run without MPI: they do."""
    return True


def nccl_built() -> int:
    """NCCL's version, 0 where it can't be used."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL can be used: it can't."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL can be used: it can't."""
    return False


def cuda_built() -> bool:
    """Whether GPUs can be used: not in this version."""
    return False


def rocm_built() -> bool:
    """Whether ROCm can be used: not in this version."""
    return False
