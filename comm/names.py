"""Names for operations that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Names:
    """Counts operations: names are equal on all ranks that start them in the same order.

    A number is used up only by an operation that was really started, and numbers begin anew where all ranks
    meet: in a join, before which they may have started different operations.

    >>> names = Names()
    >>> names.give("allreduce", str), names.give("barrier", str)
    ('allreduce.noname.0', 'barrier.noname.1')
    """

    def __init__(self) -> None:
        # Two threads that start operations must not get one name.
        self._lock = threading.Lock()
        self._meetings = self._number = 0

    def give(self, prefix: str, start: Callable[[str], T]) -> T:
        """Call `start` with the next name."""
        with self._lock:
            met = f"{self._meetings}." if self._meetings else ""
            started = start(f"{prefix}.noname.{met}{self._number}")
            self._number += 1
        return started

    def meet(self) -> None:
        """All ranks have joined."""
        with self._lock:
            self._meetings, self._number = self._meetings + 1, 0
