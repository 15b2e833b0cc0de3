"""Names for operations that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Names:
    """Counts operations: names are equal on all ranks that start them in the same order.

    A number is used up only by an operation that was really started, and numbers begin anew where all ranks
    meet: in a join, before which they may have started different operations. Every process set has numbers of
    its own, for ranks outside it don't count with the rest.

    >>> names = Names()
    >>> names.give("allreduce", str), names.give("barrier", str)
    ('allreduce.noname.0', 'barrier.noname.1')
    """

    def __init__(self) -> None:
        # Two threads that start operations must not get one name.
        self._lock = threading.Lock()
        self._meetings = 0
        self._counts: dict[int, int] = {}

    def give(self, prefix: str, start: Callable[[str], T], group: int = 0) -> T:
        """Call `start` with the next name in the process set `group`."""
        with self._lock:
            met = f"{self._meetings}." if self._meetings else ""
            number = self._counts.get(group, 0)
            started = start(f"{prefix}.noname.{met}{number}")
            self._counts[group] = number + 1
        return started

    def meet(self) -> None:
        """All ranks have joined."""
        with self._lock:
            self._meetings += 1
            self._counts.clear()

    def forget(self, group: int) -> None:
        """A process set was removed: another may get its number."""
        with self._lock:
            self._counts.pop(group, None)
