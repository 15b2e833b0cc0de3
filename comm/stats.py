"""What a round cost: how much of its communication was hidden behind computation, how much was exposed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from overlap.comm.handle import Handle

# Rounds that the medians are taken over.
_WINDOW = 1000


@dataclass(frozen=True)
class Stats:
    """Medians over the latest rounds (the first, which learns the plan, is left out); times in milliseconds.

    Attributes:
        steps: rounds so far: backwards whose gradients were averaged.
        step_ms: from the end of one round to the end of the next.
        comm_ms: the time in which the engine was busy with this round's buckets, waits for peers included.
        exposed_ms: of it, while backward had ended and nothing else was done.
        hidden_ms: the rest, behind backward.
        buckets: how many buckets a round has.
    """

    steps: int = 0
    step_ms: float = 0.0
    comm_ms: float = 0.0
    exposed_ms: float = 0.0
    hidden_ms: float = 0.0
    buckets: int = 0

    @property
    def hidden_share(self) -> float:
        """Hidden part of the communication, 0 to 1; 1 where there was none."""
        return self.hidden_ms / self.comm_ms if self.comm_ms else 1.0


class Recorder:
    """Collects rounds."""

    def __init__(self) -> None:
        self._steps = 0
        self._buckets = 0
        self._last_end_s = 0.0
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)

    def add(self, handles: Sequence[Handle[Any]], backward_end_s: float, end_s: float) -> None:
        """A round is over.

        Args:
            handles: of its buckets, all finished.
            backward_end_s, end_s: `time.perf_counter()` when backward ended, and when all was waited for.
        """
        self._steps += 1
        self._buckets = len(handles)
        if self._steps > 1:
            busy = sum(handle.finished_s - handle.started_s for handle in handles)
            exposed = min(busy, end_s - backward_end_s)
            self._rounds.append((end_s - self._last_end_s, busy, exposed))
        self._last_end_s = end_s

    def stats(self) -> Stats:
        if not self._rounds:
            return Stats(steps=self._steps, buckets=self._buckets)
        step, busy, exposed = (median(column) * 1e3 for column in zip(*self._rounds, strict=True))
        return Stats(self._steps, step, busy, exposed, max(0.0, busy - exposed), self._buckets)
