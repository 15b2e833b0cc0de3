"""Process sets: groups of ranks that collectives can be restricted to; Horovod's classes and functions."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.comm.errors import MismatchError

from . import runtime


class ProcessSet:
    """Some ranks of the job.

    Args:
        ranks: as the job counts them.

    Attributes:
        process_set_id: its number; None until it is registered by `init` or `add_process_set`.
        ranks: sorted.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Sequence[int]) -> None:
        chosen = list(ranks)
        for rank in chosen:
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise ValueError(f"ranks must be integers, not {rank!r}")
        self.ranks: list[int] | None = sorted(chosen)

    def _invalidate(self) -> None:
        self.process_set_id = None

    def number(self) -> int:
        """Its number.

        Raises:
            ValueError: it is not registered.
        """
        if self.process_set_id is None:
            raise ValueError(f"{self} is not registered: pass it to init() or add_process_set() before")
        return self.process_set_id

    def size(self) -> int | None:
        """How many ranks it has; None where it is not registered."""
        if self.process_set_id is None:
            return None
        return len(_ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """This process's number within the set; None where it is not registered.

        Raises:
            ValueError: this process is not in it.
        """
        if self.process_set_id is None:
            return None
        ranks = _ranks_of(self.process_set_id)
        if runtime.rank() not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(runtime.rank())

    def included(self) -> bool | None:
        """Whether this process is in it; None where its ranks are not known yet."""
        return None if self.ranks is None else runtime.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


def _ranks_of(number: int) -> tuple[int, ...]:
    groups = runtime.engine().named.groups
    if number not in groups:
        raise ValueError(f"process set {number} was removed: add it anew")
    return groups[number]


global_process_set = ProcessSet([])
global_process_set.process_set_id, global_process_set.ranks = 0, None

_registered: list[ProcessSet] = []


def set_up(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """After `init`: register the sets that it was given. Collective."""
    global_process_set.ranks = list(range(runtime.size()))
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return
    if isinstance(process_sets, str) or not all(isinstance(each, ProcessSet) for each in process_sets):
        raise ValueError(f'process_sets must be a list of ProcessSet, or "dynamic", not {process_sets!r}')
    known = {ranks: number for number, ranks in runtime.engine().named.groups.items()}
    for place, each in enumerate(process_sets):
        ranks = tuple(each.ranks or ())
        bound = next((other for other in _registered if tuple(other.ranks or ()) == ranks), None)
        if ranks in known and (known[ranks] == 0 or (bound is not None and bound in process_sets[:place])):
            raise ValueError(
                f"process_sets entry number {place} is a duplicate: ranks {list(ranks)} are process set "
                f"{known[ranks]} already"
            )
        if ranks in known:  # a second init: the set is there
            each.process_set_id = known[ranks]
        else:
            add_process_set(each)
            known[ranks] = each.process_set_id or 0


def forget() -> None:
    """After a shutdown: no set is registered any more."""
    for each in _registered:
        each._invalidate()
    _registered.clear()
    global_process_set.ranks = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; every rank of the job calls it with the same ranks, members or not.

    Raises:
        ValueError: there is such a set already, ranks are out of range or twice there, or ranks differ in
            what they give.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {made} is registered already")
    try:
        made.process_set_id = runtime.engine().named.add_group(made.ranks or ())
    except MismatchError as error:
        raise ValueError(str(error)) from error
    _registered.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank of the job calls it. False where there is nothing to remove."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    runtime.engine().named.remove_group(process_set.process_set_id)
    process_set._invalidate()
    if process_set in _registered:
        _registered.remove(process_set)
    return True
