"""How a job is made to end: which signal comes when (pure: it is told the time)."""

from __future__ import annotations

import signal
from collections.abc import Sequence

# (seconds after the step before, signal)
Steps = Sequence[tuple[float, int]]

# After one rank failed the others learn of it through the engine, and end by themselves in about a second.
FAILED: Steps = ((5.0, signal.SIGTERM), (2.0, signal.SIGKILL))
# What Ctrl-C means to a program, then what `kill` means, well within the 5 s that users are promised.
INTERRUPTED: Steps = ((0.0, signal.SIGINT), (2.0, signal.SIGTERM), (1.0, signal.SIGKILL))
STOPPED: Steps = ((0.0, signal.SIGTERM), (2.0, signal.SIGKILL))
AT_ONCE: Steps = ((0.0, signal.SIGKILL),)


class Escalation:
    """Signals that become due one after the other; a plan begun later replaces the one before.

    >>> escalation = Escalation()
    >>> escalation.begin(STOPPED, now=10.0)
    >>> escalation.due(10.0) == [signal.SIGTERM], escalation.next, escalation.due(11.0)
    (True, 12.0, [])
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, int]] = []

    def begin(self, steps: Steps, now: float) -> None:
        """Begin a plan at `now`."""
        self._steps = []
        for delay, number in steps:
            now += delay
            self._steps.append((now, number))

    @property
    def next(self) -> float | None:
        """When the next signal is due; None where nothing is planned."""
        return self._steps[0][0] if self._steps else None

    def due(self, now: float) -> list[int]:
        """Take the signals that are due."""
        found = [number for when, number in self._steps if when <= now]
        self._steps = [step for step in self._steps if step[0] > now]
        return found
